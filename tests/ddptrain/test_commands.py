"""The verb ``rollback``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddprun.checkpoint_files import Checkpoints, newest_valid
from ddptrain.cli import main
from tests.ddptrain.builders import command, place
from tests.ddptrain.runs import ForkServer, assert_same_end


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two runs with two checkpoints each."""
    for run in (1, 2):
        writer = Checkpoints(tmp_path, keep=9)
        writer.resume(lambda _: None)
        writer.claim({})
        for step in (10 * run, 10 * run + 5):
            writer.save(step, b"x" * 100, {})
    return tmp_path


def test_an_unreadable_volume_is_an_error_with_the_path(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(saved / "run-000002")
    (saved / "run-000002").symlink_to("run-000002")  # unreadable for root too
    assert rollback(saved, "--step", "20") == 66
    assert f"cannot read {saved}/run-000002" in capsys.readouterr().err


def rollback(root: Path, *choice: str) -> int:
    return main(["rollback", *choice, "--checkpoint-dir", str(root)])


def test_rollback_sets_newer_checkpoints_aside_and_deletes_nothing(saved: Path) -> None:
    assert rollback(saved, "--run", "1", "--step", "10") == 0
    found = newest_valid(saved, lambda path, reason: None)
    assert found is not None
    assert found[0].place == place(1, 10)
    assert len(list(saved.rglob("*.rolled-back"))) == 6


def test_rollback_without_a_step_is_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rollback(saved) == 2
    assert "next:  take it from the name of a checkpoint: " in capsys.readouterr().err


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
