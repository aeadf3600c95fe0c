"""A run that is killed and resumed ends like one that was never interrupted: same weights, bit for bit, same losses."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest

from ddprun.checkpoint_files import manifests, seal
from ddprun.reporting.metrics import read_rows
from tests.ddptrain.builders import RESUMED, SAVING, STEPS, command, place
from tests.ddptrain.runs import ForkServer, Whole, assert_same_end, final_weights, losses

pytestmark = pytest.mark.together


def test_killed_and_resumed_run_ends_like_an_uninterrupted_one(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole
) -> None:
    # A process without a launcher; test_chaos.py and test_in_place.py end ranks.
    cut = tmp_path / "cut"
    first = ddptrain.start(*command(1, idx, cut, "--step-delay", 0.2))
    first.at_step(6)
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL

    second = ddptrain.run(*command(1, idx, cut))
    resumed = second.message()["resumedFrom"]
    assert resumed["run"] == 1
    assert resumed["step"] >= 4
    assert f"resumed from run 1, step {resumed['step']}" in second.output()
    assert [at for at, _ in losses(cut)] == list(range(1, STEPS + 1))
    assert_same_end(whole(1, *SAVING).folder, cut)


@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_saves_and_exits_with_75_and_the_resumed_run_loses_no_step(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole, world_size: int
) -> None:
    cut = tmp_path / "cut"
    stopped = ddptrain.start(*command(world_size, idx, cut, "--checkpoint-every", 0, "--step-delay", 0.1))
    stopped.at_step(3)
    # Only one rank gets the signal, as when one node is drained; all must leave after the same step.
    os.kill(stopped.ranks()[1] if world_size > 1 else stopped.pid, signal.SIGTERM)
    assert stopped.wait() == 75
    message = stopped.message()
    assert (message["outcome"], message["code"], message["saved"]) == ("stopped", 75, True)
    assert message["checkpoint"] == place(1, message["step"])
    assert "error:" not in stopped.output()

    second = ddptrain.run(*command(world_size, idx, cut, "--checkpoint-every", 0))
    assert second.message()["resumedFrom"] == message["checkpoint"]
    assert second.message()["progress"]["resumedFrom"] == message["checkpoint"]
    assert_same_end(whole(world_size, *SAVING).folder, cut)


def test_sigterm_without_a_checkpoint_directory_exits_with_75_unsaved(ddptrain: ForkServer, idx: Path) -> None:
    run = ddptrain.start("train", *RESUMED, "--data-dir", idx, "--step-delay", 0.1)
    run.at_step(2)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75
    assert run.message()["saved"] is False


def test_finished_training_started_again_reports_so_and_writes_nothing(
    ddptrain: ForkServer, idx: Path, whole: Whole
) -> None:
    folder, first = whole(2, *SAVING)
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
    again = ddptrain.run(*command(1, idx, folder))
    assert "already finished" in again.output()
    assert "resuming" not in again.output(), "there is nothing to resume, also with another number of ranks"
    message = again.message()
    assert (message["outcome"], message["code"]) == ("already finished", 0)
    assert (message["accuracy"], message["checkpoint"]) == (first["accuracy"], first["checkpoint"])
    after = {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}
    assert before == after, "not even a probe is written, because the volume may be read-only"


def test_an_intact_checkpoint_that_cannot_be_loaded_is_skipped(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    ddptrain.run(*command(1, idx, tmp_path, "--stop-after", 8), code=75)
    paths = [path for _, path in manifests(tmp_path, 1)]
    for path in paths:
        manifest = json.loads(path.read_text()) | {"sha256": hashlib.sha256(b"no tensors").hexdigest()}
        path.with_suffix(".pt").rename(path.with_suffix(".kept"))
        path.with_suffix(".pt").write_bytes(b"no tensors")
        path.write_text(json.dumps(manifest | {"seal": seal(manifest)}))
    refused = ddptrain.run(*command(1, idx, tmp_path), code=78).message()
    assert "step-000000004.pt cannot be loaded" in refused["message"], "it does not begin again at step 0"
    older = paths[1]
    older.with_suffix(".kept").rename(older.with_suffix(".pt"))
    manifest = json.loads(older.read_text()) | {
        "sha256": hashlib.sha256(older.with_suffix(".pt").read_bytes()).hexdigest()
    }
    older.write_text(json.dumps(manifest | {"seal": seal(manifest)}))
    assert ddptrain.run(*command(1, idx, tmp_path)).message()["resumedFrom"] == place(1, 4)
    assert paths[0].exists()


def test_run_superseded_by_a_newer_one_exits_with_80(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    old = ddptrain.start(*command(2, idx, tmp_path, "--step-delay", 0.6))
    old.at_step(2)
    new = ddptrain.start(*command(2, idx, tmp_path, "--step-delay", 0.01))
    assert new.wait() == 0, new.output()
    assert old.wait() == 80, old.output()
    message = old.message()
    assert (message["code"], message["cause"], message["exception"]) == (80, "own", "Superseded")
    assert [at for at, _ in losses(tmp_path)] == list(range(1, STEPS + 1))
    assert final_weights(tmp_path)


def test_start_rows_record_where_each_run_resumed(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    job = {"DDPJOB_UID": "u-1", "DDPJOB_ATTEMPT": 4}
    run = ddptrain.start(*command(1, idx, tmp_path, "--step-delay", 0.1), env=job)
    run.at_step(5)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75
    ddptrain.run(*command(2, idx, tmp_path), env=job | {"DDPJOB_ATTEMPT": 5})
    rows = read_rows(tmp_path)
    starts = [row for row in rows if row["event"] == "start"]
    assert [(s["run"], s["attempt"], s["worldSize"]) for s in starts] == [(1, 4, 1), (2, 5, 2)]
    assert starts[0]["resumedFrom"] is None
    assert starts[1]["resumedFrom"]["run"] == 1
    owner = json.loads((tmp_path / "run-000002" / "owner.json").read_text())
    assert (owner["uid"], owner["attempt"], owner["parentRun"]) == ("u-1", 5, 1)
