"""What ``ddprun.report`` writes to the metrics: rows, lineage over attempts, and a volume that fails."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import ddprun
from ddpplot.recorded import read_history
from ddprun import script_interface, script_metrics
from ddprun.checkpoint_files import run_numbers
from ddprun.errors import Superseded
from ddprun.heartbeat import Heartbeat
from ddprun.reporting.metrics import RowsFile, read_rows
from ddprun.reporting.progress import ProgressRecord
from ddprun.script_metrics import ScriptMetrics
from ddprun.settings import Settings
from tests.ddptrain.runs import wait_until
from tests.metrics import effective_rows


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "DDPJOB_CHECKPOINT_DIR", "DDPJOB_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(script_interface, "_state", script_interface._state)
    attempt(tmp_path)


def attempt(folder: Path) -> ProgressRecord:
    """Begin another process, as far as the calls can see."""
    progress = ProgressRecord(1)
    script_interface.begin(progress, Heartbeat(), Settings(checkpoint_dir=str(folder)))
    return progress


def written() -> None:
    """Let the thread write all rows."""
    metrics = script_interface._state.metrics
    assert metrics is not None
    metrics._background.request()
    assert metrics._background.wait(30)


def train(*steps: int) -> None:
    for step in steps:
        ddprun.report(step=step, total_steps=9, loss=step / 10)
    written()


def counted(folder: Path) -> list[tuple[int, int]]:
    return [(row["run"], row["step"]) for row in effective_rows(folder, "train")]


def test_reports_are_rows_that_are_drawn(tmp_path: Path) -> None:
    ddprun.report(step=1, total_steps=2, epoch=0, loss=0.5, learning_rate=0.1, samples_per_second=7.5)
    ddprun.report(step=2, epoch=1, loss=0.25, accuracy=0.75)
    written()
    train_rows, [evaluation] = effective_rows(tmp_path, "train"), effective_rows(tmp_path, "eval")
    facts = [{name: row[name] for name in row if name not in ("time", "event")} for row in train_rows]
    assert facts == [
        {"run": 1, "step": 1, "epoch": 0, "loss": 0.5, "lr": 0.1, "samplesPerSecond": 7.5},
        {"run": 1, "step": 2, "epoch": 1, "loss": 0.25},
    ]
    assert (evaluation["step"], evaluation["accuracy"]) == (2, 0.75)
    history = read_history(tmp_path)
    assert ([step.loss for step in history.steps], history.total_steps) == ([0.5, 0.25], 2)
    assert [found.accuracy for found in history.evaluations] == [0.75]


def test_numbers_of_numpy_and_torch_are_numbers_and_others_are_refused(tmp_path: Path) -> None:
    progress = script_interface._state.progress
    assert progress is not None
    ddprun.report(step=np.int64(3), loss=torch.tensor(0.5), accuracy=np.float32(0.25), epoch=torch.tensor(2))  # type: ignore[arg-type]
    written()
    assert json.loads(json.dumps(progress.snapshot()))["step"] == 3
    [row] = effective_rows(tmp_path, "train")
    assert (row["step"], row["loss"], row["epoch"]) == (3, 0.5, 2)
    for value in ("high", torch.zeros(2), [1.0]):
        with pytest.raises(TypeError, match="loss is no number"):
            ddprun.report(step=4, loss=value)  # type: ignore[arg-type]


def test_run_that_loaded_a_checkpoint_continues_the_rows_of_the_run_that_saved_it(tmp_path: Path) -> None:
    ddprun.checkpoints(tmp_path).save(0, {})
    train(1, 2)
    ddprun.checkpoints(tmp_path).save(2, {})
    train(3, 4)
    attempt(tmp_path)
    train(1)  # did not resume, and saved nothing
    attempt(tmp_path)
    assert ddprun.checkpoints(tmp_path).load_newest() is not None
    train(3, 4, 5)
    ddprun.checkpoints(tmp_path).save(5, {})
    assert counted(tmp_path) == [(1, 1), (1, 2), (3, 3), (3, 4), (3, 5)]
    assert run_numbers(tmp_path) == [3, 1], "run and metrics have one number"
    written()
    assert [(row["run"], row["step"]) for row in read_rows(tmp_path) if row["event"] == "save"] == [
        (1, 0),
        (1, 2),
        (3, 5),
    ]


def test_start_names_attempt_and_life_and_a_checkpoint_of_the_script_is_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPJOB_ATTEMPT", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    ddprun.report(step=1, loss=1.0, checkpoint=tmp_path / "own.pt")
    written()
    start, *rows = read_rows(tmp_path)
    assert (start["attempt"], start["life"]) == (2, 4)
    assert [(row["event"], row["step"]) for row in rows] == [("train", 1), ("save", 1)]


def test_script_with_checkpoints_of_its_own_continues_at_its_first_report(tmp_path: Path) -> None:
    train(*range(1, 7))
    attempt(tmp_path)
    train(*range(5, 8))
    assert counted(tmp_path) == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6), (2, 7)]
    attempt(tmp_path)
    train(1, 2)
    assert counted(tmp_path) == [(3, 1), (3, 2)]


def test_attempt_with_a_lower_number_cannot_save_after_a_newer_one_has(tmp_path: Path) -> None:
    train(1)
    older = ddprun.checkpoints(tmp_path)
    attempt(tmp_path)
    train(1)
    ddprun.checkpoints(tmp_path).save(1, {})
    with pytest.raises(Superseded):
        older.save(1, {})
    with pytest.raises(Superseded):
        older.save(2, {})


def test_only_rank_zero_writes_and_only_with_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    ddprun.report(step=1, loss=1.0)
    written()
    monkeypatch.delenv("RANK")
    script_interface.begin(ProgressRecord(1), Heartbeat(), Settings())
    ddprun.report(step=1, loss=1.0)
    assert script_interface._state.metrics is None
    assert list(tmp_path.iterdir()) == []


def test_stalled_volume_delays_no_step_and_rows_in_memory_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_metrics, "_WAITING", 500)
    train(1)
    metrics = script_interface._state.metrics
    assert metrics is not None
    reader = replaced_by_full_pipe(metrics)
    monkeypatch.setattr(metrics, "_requested", 0.0)
    ddprun.report(step=2, loss=0.0)
    wait_until(metrics._writing.locked, "the thread to write")
    began = time.monotonic()
    for step in range(3, 2000):
        ddprun.report(step=step, loss=0.0)
    assert time.monotonic() - began < 20, "no report waited for the volume"
    assert len(metrics._rows) <= 500

    def drained() -> bool:
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 65536)
        return metrics._background.wait(0.01) and not metrics._rows

    metrics._background.request()
    wait_until(drained, "the volume answers again")
    os.close(reader)
    assert metrics._dropped == 0, "their number is in a row"


def replaced_by_full_pipe(metrics: ScriptMetrics) -> int:
    """Make the next write of rows wait until the returned descriptor is read."""
    assert metrics._file is not None
    reader, writer = os.pipe2(os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    fcntl.fcntl(writer, fcntl.F_SETFL, 0)
    os.dup2(writer, metrics._file._file)
    os.close(writer)
    return reader


def test_full_volume_ends_no_training_and_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(1)
    metrics = script_interface._state.metrics
    assert metrics is not None
    assert metrics._file is not None
    on_disk, full = os.dup(metrics._file._file), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, metrics._file._file)
    for step in (2, 3):
        train(step)
    assert capsys.readouterr().err.count("No space left") == 1
    os.dup2(on_disk, metrics._file._file)
    train(4)
    assert counted(tmp_path) == [(1, 1), (1, 2), (1, 3), (1, 4)]
    os.close(on_disk)
    os.close(full)


def test_file_grows_slower_the_longer_the_training_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_metrics, "_UNTHINNED", 10)
    train(*range(1, 50))
    assert [step for _, step in counted(tmp_path)] == [*range(1, 10), *range(10, 20, 2), *range(20, 40, 4), 40, 48]


def test_last_rows_are_written_when_the_process_ends(tmp_path: Path) -> None:
    lines = (
        "import ddprun, os",
        "ddprun.report(step=1, loss=1.0)",
        "if not os.fork():",
        "    ddprun.report(step=7, loss=7.0)",  # in a process that the rank forked
        "    raise SystemExit",
        "os.wait()",
        "ddprun.report(step=2, loss=2.0)",
        "raise ValueError",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "DDPJOB_CHECKPOINT_DIR": str(tmp_path / "new" / "folder")},
    )  # fmt: skip
    assert done.stderr.endswith("ValueError\n")
    assert [row["event"] for row in read_rows(tmp_path / "new" / "folder")] == ["start", "train", "train"]


def test_file_of_another_attempt_is_never_taken(tmp_path: Path) -> None:
    RowsFile(tmp_path, 1)
    with pytest.raises(FileExistsError):
        RowsFile(tmp_path, 1)
