"""``ddprun.checkpoints`` in one process; the store below it has tests of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ddprun
from ddprun import script_interface
from ddprun.checkpoint_files import Checkpoints, checkpoint_file
from ddprun.errors import ConfigMismatch, Superseded
from ddprun.heartbeat import Heartbeat, HeartbeatRecord
from ddprun.reporting.progress import ProgressRecord
from ddprun.script_checkpoints import ScriptCheckpoints
from ddprun.script_metrics import ScriptMetrics
from ddprun.settings import Settings


@pytest.fixture(autouse=True)
def progress(monkeypatch: pytest.MonkeyPatch) -> ProgressRecord:
    """Make this process a rank of a launcher until the end of the test."""
    for name in ("RANK", "WORLD_SIZE", "DDPJOB_CHECKPOINT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(script_interface, "_state", script_interface._state)
    progress = ProgressRecord(1)
    script_interface.begin(progress, Heartbeat(), Settings())
    return progress


def attempt(folder: Path, heartbeat: Heartbeat | None = None) -> ScriptCheckpoints:
    """Return what a process of its own would have."""
    return ScriptCheckpoints(
        ScriptMetrics(folder), keep=3, heartbeat=heartbeat or Heartbeat(), volume_timeout=290,
        on_saved=lambda place: None, on_loaded=lambda step: None,
    )  # fmt: skip


def weights(number: float) -> dict[str, Any]:
    return {"weights": torch.full((3,), number), "epoch": 1}


def test_newest_state_is_loaded_and_its_place_is_in_the_progress(tmp_path: Path, progress: ProgressRecord) -> None:
    assert progress.snapshot()["fenced"] is False
    checkpoints = ddprun.checkpoints(tmp_path)
    assert progress.snapshot()["fenced"] is True
    assert checkpoints.load_newest() is None
    for step in (10, 20):
        checkpoints.save(step, weights(step))
    found = attempt(tmp_path).load_newest()
    assert found is not None
    assert (found.step, found.state["weights"].tolist(), found.state["epoch"]) == (20, [20.0] * 3, 1)
    place = progress.snapshot()["checkpoint"]
    assert (tmp_path / place["path"], place["step"]) == (checkpoint_file(tmp_path, 1, 20), 20)
    assert progress.snapshot()["savingSeconds"] > 0


def test_steps_are_counted_from_the_checkpoint_on(tmp_path: Path, progress: ProgressRecord) -> None:
    attempt(tmp_path).save(20, weights(20))
    assert ddprun.checkpoints(tmp_path).load_newest() is not None
    script_interface.count_step()
    assert progress.snapshot()["step"] == 21


def test_one_directory_has_one_object_for_all_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ddprun.checkpoints("saved").save(1, weights(1))
    ddprun.checkpoints(tmp_path / "saved").save(2, weights(2))
    assert ddprun.checkpoints("saved") is not ddprun.checkpoints("other")


def test_checkpoint_that_cannot_be_loaded_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt(tmp_path).save(1, weights(1))
    other = Checkpoints(tmp_path, keep=3)
    other.claim({})
    other.save(2, b"no file of torch.save", {})
    found = attempt(tmp_path).load_newest()
    assert found is not None
    assert found.step == 1
    assert "cannot be loaded" in capsys.readouterr().err


def test_state_with_objects_is_named_at_the_first_save_and_needs_a_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = attempt(tmp_path)
    checkpoints.save(1, {"folder": tmp_path})
    assert "which only load_newest(weights_only=False) loads" in capsys.readouterr().err
    checkpoints.save(2, {"folder": tmp_path})
    assert capsys.readouterr().err == ""
    with pytest.raises(ConfigMismatch, match=r"holds pathlib.*weights_only=False"):
        attempt(tmp_path).load_newest()
    reader = attempt(tmp_path)
    found = reader.load_newest(weights_only=False)
    assert found is not None
    assert found.state == {"folder": tmp_path}
    reader.save(3, {"folder": tmp_path})
    assert capsys.readouterr().err == ""


def test_steps_only_increase_and_none_is_written_twice(tmp_path: Path) -> None:
    checkpoints = attempt(tmp_path)
    checkpoints.save(5, weights(5))
    written = checkpoint_file(tmp_path, 1, 5).stat()
    checkpoints.save(5, weights(6))  # periodic, and again before a stop
    assert checkpoint_file(tmp_path, 1, 5).stat() == written
    with pytest.raises(ValueError, match="step 4 comes before step 5"):
        checkpoints.save(4, weights(4))
    with pytest.raises(ValueError, match="step -1"):
        attempt(tmp_path).save(-1, weights(0))
    attempt(tmp_path).save(2, weights(2))  # a training that resumed from an older checkpoint


def test_step_that_is_saved_already_counts_as_saved_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = ddprun.checkpoints(tmp_path)
    checkpoints.save(5, weights(5))
    assert not script_interface.saved_after_stop()
    monkeypatch.setattr(script_interface._state, "stop_agreed", True)
    checkpoints.save(5, weights(5))
    assert script_interface.saved_after_stop()


def test_older_attempt_saves_until_the_newer_one_does(tmp_path: Path) -> None:
    old, new = attempt(tmp_path), attempt(tmp_path)
    old.save(10, weights(10))
    assert new.load_newest() is not None
    old.save(20, weights(20))
    new.save(15, weights(15))
    with pytest.raises(Superseded):
        old.save(30, weights(30))
    found = attempt(tmp_path).load_newest()
    assert found is not None
    assert found.step == 15


def test_load_changes_nothing_on_the_volume(tmp_path: Path) -> None:
    attempt(tmp_path).save(1, weights(1))
    before = sorted(tmp_path.rglob("*"))
    assert attempt(tmp_path).load_newest() is not None
    assert attempt(tmp_path / "absent").load_newest() is None
    assert sorted(tmp_path.rglob("*")) == before


def test_load_warns_of_a_volume_that_no_save_can_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(tmp_path).save(1, weights(1))
    monkeypatch.setattr("ddprun.checkpoint_files.unique", lambda name: f"absent/{name}")  # root may write everywhere
    assert attempt(tmp_path).load_newest() is not None
    assert f"warning: cannot write {tmp_path}" in capsys.readouterr().err


def test_ranks_without_a_process_group_cannot_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group first"):
        attempt(tmp_path).load_newest()


class Witness:
    """Calls a function while it is pickled."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        self.call()
        return (dict, ())


def test_save_is_a_phase_with_the_limit_of_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[HeartbeatRecord] = []
    heartbeat = Heartbeat()
    script_interface.begin(ProgressRecord(1), heartbeat, Settings(volume_timeout=1000.0))
    ddprun.report(step=7)
    ddprun.checkpoints(tmp_path).save(7, {"seen": Witness(lambda: seen.append(heartbeat.last))})
    assert [(record.phase, record.limit, record.step) for record in seen] == [("save", 1000.0, 7)]
    assert (heartbeat.last.phase, heartbeat.last.limit) == ("train", 0.0)
    monkeypatch.setenv("RANK", "1")
    ddprun.checkpoints(tmp_path / "other").save(8, weights(8))
    assert not (tmp_path / "other").exists()
    assert (heartbeat.last.phase, heartbeat.last.limit) == ("save", 1000.0), "rank 1 waits for rank 0"
    script_interface.count_step()
    assert (heartbeat.last.phase, heartbeat.last.limit, heartbeat.last.step) == ("train", 0.0, 7)
