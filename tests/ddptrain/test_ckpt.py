"""The verbs ``ckpt``, ``why`` and ``config print``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ddprun.checkpoint_files import Checkpoints, newest_valid
from ddprun.launcher import node_reports as why
from ddptrain import commands as ckpt
from ddptrain.cli import main
from tests.ddptrain.builders import command, place, rank_state
from tests.ddptrain.runs import ForkServer, assert_same_end


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two runs with two checkpoints each."""
    for run in (1, 2):
        writer = Checkpoints(tmp_path, keep=9)
        writer.resume(lambda _: None)
        writer.claim({})
        for step in (10 * run, 10 * run + 5):
            writer.save(step, b"x" * 100, {"evaluation": {"accuracy": step / 100}, "complete": False, "time": 1.0})
    return tmp_path


def test_ls_lists_the_newest_first_with_values_of_the_manifests(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "ls", "--checkpoint-dir", str(saved), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["run"], row["step"], row["accuracy"]) for row in rows] == [
        (2, 25, 0.25), (2, 20, 0.2), (1, 15, 0.15), (1, 10, 0.1),
    ]  # fmt: skip
    assert {row["verdict"] for row in rows} == {"not verified"}
    assert main(["ckpt", "ls", "--checkpoint-dir", str(saved)]) == 0
    assert "0.2500" in capsys.readouterr().out


def test_verify_names_a_damaged_checkpoint_and_exits_with_66(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "verify", "--checkpoint-dir", str(saved)]) == 0
    capsys.readouterr()
    (saved / "run-000002" / "step-000000020.pt").write_bytes(b"y" * 100)
    before = sorted(saved.rglob("*"))
    assert main(["ckpt", "verify", "--checkpoint-dir", str(saved)]) == 66
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if "content does not match its digest" in line] == ["20"]
    assert sorted(saved.rglob("*")) == before, "verify must change nothing"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        '"x"',
        '{"evaluation": 3, "bytes": "x"}',
        '{"time": "x"}',
        '{"time": 1e300, "bytes": 1e300}',
        '{"evaluation": {"accuracy": "x"}}',
    ],
)
def test_an_unreadable_manifest_is_listed_and_fails_verify(
    saved: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (saved / "run-000002" / "step-000000020.json").write_text(content)
    assert main(["ckpt", "ls", "--checkpoint-dir", str(saved)]) == 0
    assert main(["ckpt", "verify", "--checkpoint-dir", str(saved)]) == 66
    assert "manifest is not readable" in capsys.readouterr().out


def test_a_file_named_like_a_run_and_a_folder_named_like_a_manifest_are_ignored(saved: Path) -> None:
    (saved / "run-000007").touch()
    (saved / "run-000002" / "step-000000099.json").mkdir()
    assert [row["step"] for row in ckpt.listing(saved, check=True) if row["verdict"] == "ok"] == [25, 20, 15, 10]
    writer = Checkpoints(saved, keep=9)
    found = writer.resume(lambda _: None)
    assert found is not None
    assert found[0].place == place(2, 25)
    assert writer.claim({}) == 8


@pytest.mark.parametrize("verb", [("ls",), ("verify",), ("rollback", "--step", "20")])
def test_an_unreadable_volume_is_an_error_with_the_path(
    saved: Path, capsys: pytest.CaptureFixture[str], verb: tuple[str, ...]
) -> None:
    shutil.rmtree(saved / "run-000002")
    (saved / "run-000002").symlink_to("run-000002")  # unreadable for root too
    assert main(["ckpt", *verb, "--checkpoint-dir", str(saved)]) == 66
    assert f"cannot read {saved}/run-000002" in capsys.readouterr().err


def rollback(root: Path, *choice: str) -> int:
    return main(["ckpt", "rollback", *choice, "--checkpoint-dir", str(root)])


def test_rollback_sets_newer_checkpoints_aside_and_deletes_nothing(saved: Path) -> None:
    assert rollback(saved, "--run", "1", "--step", "10") == 0
    found = newest_valid(saved, lambda path, reason: None)
    assert found is not None
    assert found[0].place == place(1, 10)
    assert len(list(saved.rglob("*.rolled-back"))) == 6


def test_rollback_without_a_step_is_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollback(saved) == 2
    assert "next:  `ddptrain ckpt ls --checkpoint-dir" in capsys.readouterr().err


def test_rollback_to_a_damaged_checkpoint_changes_nothing(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "run-000001" / "step-000000010.pt").write_bytes(b"y")
    before = sorted(saved.rglob("*"))
    assert rollback(saved, "--run", "1", "--step", "10") == 66
    assert "no valid checkpoint of run 1, step 10" in capsys.readouterr().err
    assert sorted(saved.rglob("*")) == before


def test_a_rolled_back_run_ends_with_the_same_weights(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder in (whole, cut):
        ddptrain.run(*command(1, idx, folder, "--model", "mlp"))
    assert rollback(cut, "--step", "12") == 0
    again = ddptrain.run(*command(1, idx, cut, "--model", "mlp"))
    assert again.message()["resumedFrom"] == place(1, 12)
    assert_same_end(whole, cut)


def node_report(node: int, time: float, ranks: list[Any], **report: Any) -> dict[str, Any]:
    return {"node": node, "nnodes": 2, "time": time, "ranks": ranks, "report": {"cause": "own", **report}}


def test_why_prefers_an_own_failure_to_an_earlier_lost_peer() -> None:
    nodes = [
        node_report(0, 1.0, [], code=77, cause="peer", rank=0),
        node_report(1, 2.0, [], code=137, rank=3),
    ]
    assert why.merge_reports(nodes)[0]["rank"] == 3


def test_why_compares_the_ranks_of_all_nodes_to_find_the_hung_one() -> None:
    waiting = [vars(rank_state(rank, collectives=9)) for rank in (0, 1)]
    behind = [vars(rank_state(2, collectives=8)), vars(rank_state(3, collectives=9))]
    nodes = [node_report(at, 1.0, r, code=76, cause="peer", rank=2 * at) for at, r in enumerate((waiting, behind))]
    report, ranks = why.merge_reports(nodes)
    assert (report["rank"], report["cause"], len(ranks)) == (2, "own", 4)


def test_why_skips_invalid_reports_and_unknown_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = tmp_path / "reports" / "local-0" / "node-0.json"
    node.parent.mkdir(parents=True)
    whole = {**node_report(0, 1.0, [{**vars(rank_state(0)), "mood": "bad"}], code=76, rank=0), "nnodes": 1}
    for content in ("", "[]", {**whole, "ranks": [{"rank": 0}]}, {**whole, "ranks": [1]}, {**whole, "ranks": None}):
        node.write_text(content if isinstance(content, str) else json.dumps(content))
        assert main(["why", str(tmp_path)]) == 66
    node.write_text(json.dumps(whole))
    assert main(["why", str(tmp_path)]) == 0
    assert "root cause: rank 0," in capsys.readouterr().out


def test_why_prints_hint_and_next_step_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = tmp_path / "reports" / "local-0" / "node-0.json"
    node.parent.mkdir(parents=True)
    advice = {"message": "no data", "hint": "the volume is empty", "next": "fetch the data"}
    node.write_text(json.dumps({**node_report(0, 1.0, [], code=66, rank=0, **advice), "nnodes": 1}))
    assert main(["why", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:] == [
        "root cause: rank 0, exit code 66: no data",
        "at:    not known",
        "hint:  the volume is empty",
        "next:  fetch the data",
    ]
    assert main(["why", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["attempt"], found["report"]["hint"], found["ranks"]) == ("local-0", "the volume is empty", [])


def test_why_prints_control_characters_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = tmp_path / "reports" / "local-0" / "node-0.json"
    node.parent.mkdir(parents=True)
    states = [vars(rank_state(0)) | {"phase": "\x1b[2J", "collective": ""}]
    content = {**node_report(0, 1.0, states, code=1, rank=0, message="\x1b]0;owned\x07", hint="\x9b1m"), "nnodes": 1}
    node.write_text(json.dumps(content))
    assert main(["why", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert r"\x1b]0;owned\x07" in printed
    assert all(c.isprintable() or c == "\n" for c in printed)


def test_why_explains_a_hang(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ddptrain.run(*command(2, idx, tmp_path, "--chaos", "hang:1:5", "--hang-timeout", 2), code=76)
    assert main(["why", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "root cause: rank 1, exit code 76" in text
    assert "rank 1 (node 0) works in phase batch of step 5 at trainer.py:" in text
    assert "rank 0 (node 0) waits in all_reduce of gradients of step 5" in text
    assert main(["why", str(tmp_path / "run-000001")]) == 66
    assert "no report of a failure" in capsys.readouterr().err


def test_a_printed_configuration_is_a_valid_file_and_shows_origins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1e-3\nbatch-size: 64\ndownload: false\nepochs: 9\nseed: 5\n")
    monkeypatch.setenv("DDPTRAIN_EPOCHS", "8")
    monkeypatch.setenv("DDPJOB_DATA_DIR", "/data")
    argv = ["config", "print", "--origin", "--config", str(file), "--seed", "6"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    origins = {line.split(":")[0]: line.partition("# ")[2] for line in printed.splitlines()}
    assert origins["lr"] == f"{file}: lr"
    assert origins["batch_size"] == f"{file}: batch-size"
    assert (origins["epochs"], origins["seed"], origins["data_dir"], origins["model"]) == (
        "DDPTRAIN_EPOCHS", "--seed", "DDPJOB_DATA_DIR", "default",
    )  # fmt: skip
    file.write_text(printed)
    assert main(["config", "print", "--config", str(file)]) == 0
    assert [line.split("#")[0].strip() for line in printed.splitlines()] == capsys.readouterr().out.splitlines()
