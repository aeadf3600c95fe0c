"""``preflight`` accepts a working setup, and names the rank and the check that fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddptrain.preflight import MUST_AGREE, check_agreement
from tests.ddptrain.builders import node
from tests.ddptrain.runs import ForkServer, Run
from tests.processes import free_port


def found(run: Run) -> dict[str, Any]:
    line = next(line for line in run.output().splitlines() if line.startswith('{"code"'))
    return dict(json.loads(line))


def check(run: Run, name: str) -> dict[str, Any]:
    return next(dict(entry) for entry in found(run)["checks"] if entry["check"] == name)


def test_three_working_ranks_pass_and_report_their_bandwidth(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    out = tmp_path / "checkpoints"
    argv = ("preflight", "--nproc-per-node", 3, "--data", "idx", "--data-dir", idx, "--checkpoint-dir", out, "--json")
    run = ddptrain.run(*argv)
    result = found(run)
    assert (result["code"], result["worldSize"]) == (0, 3)
    assert {entry["verdict"] for entry in result["checks"]} == {"ok"}
    for row in result["bandwidth"]:
        factor = {"all_reduce": 4 / 3, "all_gather": 2 / 3, "reduce_scatter": 2 / 3, "broadcast": 1}[row["collective"]]
        assert row["busbw"] == pytest.approx(row["algbw"] * factor)
        assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
    assert len(result["bandwidth"]) == 8
    assert list(out.iterdir()) == [], "the probe file must be deleted"


@pytest.mark.parametrize(
    ("flags", "failed", "code"),
    [
        (("--seed", 0), "same seed", 78),
        (("--log-every", 1), "same config", 78),  # it only decides the collectives
        (("--data-dir", "/absent"), "data", 66),
    ],
)
def test_a_rank_that_differs_is_named_on_both_nodes(
    ddptrain: ForkServer, idx: Path, flags: tuple[str, object], failed: str, code: int
) -> None:
    port, (flag, value) = free_port(), flags
    argv = ("preflight", "--data", "idx", "--data-dir", idx, "--json", flag)
    others = {0: idx if flag == "--data-dir" else value, 1: value if flag == "--data-dir" else 3}
    runs = [ddptrain.start(*argv, others[rank], env=node(rank, port, nproc=1)) for rank in (0, 1)]
    assert [run.wait() for run in runs] == [code, code], runs[0].output()
    assert check(runs[0], failed)["verdict"] == "failed"
    assert "rank 1" in check(runs[0], failed)["detail"]
    assert failed in runs[1].message()["message"]
    assert '"checks"' not in runs[1].output(), "the table is printed once, by node 0"


def test_a_collective_with_a_wrong_result_is_named_with_its_rank(ddptrain: ForkServer, idx: Path) -> None:
    argv = ("preflight", "--nproc-per-node", 2, "--data", "idx", "--data-dir", idx, "--json")
    run = ddptrain.run(*argv, code=71, mutant="broadcast_garbled_on_rank_1")
    assert check(run, "collectives")["detail"] == "rank 1: broadcast"


def test_an_unwritable_volume_exits_with_73(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "checkpoints"
    run = ddptrain.run("preflight", "--data", "idx", "--data-dir", idx, "--checkpoint-dir", out, code=73)
    assert "cannot write" in run.output()
    assert "not ready, exit code 73" in run.output()


def test_preflight_runs_on_ranks_started_by_hand(ddptrain: ForkServer, idx: Path) -> None:
    env = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    argv = ("preflight", "--data", "idx", "--data-dir", idx, "--json")
    runs = [ddptrain.start(*argv, env=env | {"RANK": rank}) for rank in (0, 1)]
    assert [run.wait() for run in runs] == [0, 0], runs[0].output()
    assert found(runs[0])["worldSize"] == 2
    assert runs[1].output() == ""


def facts(rank: int, **odd: object) -> dict[str, Any]:
    return {**dict.fromkeys(MUST_AGREE, "x"), "rank": rank, "host": f"host-{rank}", "dataError": None, **odd}


@pytest.mark.parametrize("name", MUST_AGREE)
def test_a_rank_that_differs_in_one_fact_is_named(name: str) -> None:
    checks = {entry["check"]: entry for entry in check_agreement([facts(0), facts(1), facts(2, **{name: "y"})])}
    assert checks[f"same {name}"]["verdict"] == "failed"
    kind = "DataMismatch" if name == "dataDigest" else "ConfigMismatch"
    assert (checks[f"same {name}"]["kind"], checks[f"same {name}"]["code"]) == (kind, 78)
    assert checks[f"same {name}"]["detail"].startswith("rank 2 (host-2) has y")
    assert [entry["verdict"] for entry in checks.values()].count("failed") == 1
