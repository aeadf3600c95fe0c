"""What the curves are drawn from: which runs are restarts in place, which failure ended which run, saves, speed."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ddpplot.history import RunFailure
from ddpplot.job import JobRecord, with_failures
from ddpplot.marks import marks
from ddpplot.page import bars
from ddpplot.recorded import read_history
from tests.plot.rows import BEGAN, restarted, write_run

KILLED = RunFailure("rank 1 was killed", 1, 1, reason="SIGKILL")
RAISED = RunFailure("boom", 1, reason="ValueError", hint="a hint", next_step="a step", step=47, time=BEGAN + 230)
JOB = JobRecord("mnist", began=BEGAN + 90, ended=BEGAN + 390, failures=[RAISED, KILLED])


def test_marks_are_starts_lives_failures_and_saves_in_the_order_in_which_they_happened(tmp_path: Path) -> None:
    restarted(tmp_path)
    history = with_failures(read_history(tmp_path), JOB)
    assert [(one.kind, one.step, one.label) for one in marks(history)] == [
        ("save", 20, "saved"),
        ("failure", 25, "failed"),
        ("inPlace", 20, "life 2"),
        ("save", 40, "saved"),
        ("failure", 47, "failed"),
        ("restart", 40, "attempt 2"),
    ]
    texts = [mark.text for mark in marks(history)]
    assert texts[0] == "saved in 0.25 s"
    assert texts[1] == "attempt 1, life 1 failed: rank 1 was killed"
    assert texts[2] == "attempt 1, life 2 resumed from step 20 in place"
    assert texts[4] == "attempt 1, life 2 failed: boom"
    assert [(run.reached, run.repeated) for run in history.runs] == [(25, 5), (47, 7), (60, 0)]
    assert history.is_finished


def test_a_failure_is_not_that_of_a_run_of_an_earlier_job_or_of_a_later_run(tmp_path: Path) -> None:
    restarted(tmp_path)
    history = read_history(tmp_path)
    later = replace(JOB, began=BEGAN + 1000, failures=[replace(RAISED, time=BEGAN + 1010)])
    assert not any(run.cause for run in with_failures(history, later).runs)
    early = replace(JOB, failures=[replace(RAISED, time=BEGAN + 30)])
    assert not any(run.cause for run in with_failures(history, early).runs)


def test_an_attempt_without_metrics_is_in_the_timeline(tmp_path: Path) -> None:
    restarted(tmp_path)
    pulling = RunFailure("no image", 3, reason="ImagePullBackOff", time=BEGAN + 375)
    job = replace(JOB, failures=[pulling, RAISED, KILLED])
    found = bars(with_failures(read_history(tmp_path), job), job)
    assert [(bar.run.number if bar.run else None, bar.failure and bar.failure.reason) for bar in found] == [
        (1, "SIGKILL"),
        (2, "ValueError"),
        (3, None),
        (None, "ImagePullBackOff"),
    ]
    assert [round(bar.left, 1) for bar in found] == [3.3, 36.7, 70.0, 95.0]
    assert all(0 <= bar.left < 100 and bar.left + bar.width <= 100.01 for bar in found)


def test_saves_are_also_known_by_the_names_of_checkpoints(tmp_path: Path) -> None:
    """The row of a save may be lost with the process, and an earlier release writes none."""
    write_run(tmp_path, 1, range(1, 11), rows=({"event": "save", "step": 4, "seconds": 0.5},))
    for step in (4, 8):
        checkpoint = tmp_path / "run-000001" / f"step-{step:09d}.json"
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.touch()
    assert [(save.step, save.seconds) for save in read_history(tmp_path).saves] == [(4, 0.5), (8, None)]


def test_a_program_that_reports_no_speed_has_that_of_its_rows(tmp_path: Path) -> None:
    restarted(tmp_path)
    found = read_history(tmp_path).throughput
    assert (found.unit, found.median, len(found.runs)) == ("steps", pytest.approx(1.0), 3)
    write_run(tmp_path, 4, range(0))
    with (tmp_path / "metrics" / "run-000004.jsonl").open("a") as file:
        file.write('{"event": "train", "run": 4, "step": 1, "loss": 1, "samplesPerSecond": 70}\n')
    assert read_history(tmp_path).throughput.runs == [[(1, 70.0)]]


def test_a_copy_of_the_folder_metrics_suffices(tmp_path: Path) -> None:
    restarted(tmp_path / "volume")
    copy = tmp_path / "anything"
    shutil.copytree(tmp_path / "volume" / "metrics", copy)
    assert read_history(copy) == read_history(tmp_path / "volume")


def test_a_directory_of_transformers_has_the_log_of_its_newest_checkpoint(tmp_path: Path) -> None:
    """As Trainer of transformers 5.23 writes it, with save_total_limit=2."""
    for step in (20, 30):
        log: list[dict[str, float]] = [
            {"epoch": n / 10, "loss": 1 / n, "learning_rate": 0.1, "step": n} for n in (10, 20)
        ]
        log.append({"epoch": 2.0, "eval_loss": 0.5, "eval_accuracy": 0.75, "eval_runtime": 1.0, "step": 20})
        log += [{"epoch": 3.0, "loss": math.nan, "step": 30}] if step == 30 else []
        state = {"global_step": step, "max_steps": 40, "log_history": log, "best_metric": None}
        folder = tmp_path / "output" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "output" / "checkpoint-40").mkdir()
    (tmp_path / "output" / "checkpoint-40" / "trainer_state.json").write_text('{"log_history"')
    for root in (tmp_path, tmp_path / "output"):
        history = read_history(root)
        assert history.finite == [(10, 0.1), (20, 0.05)] and history.diverged == 30
        assert [(row.step, row.accuracy, row.loss) for row in history.evaluations] == [(20, 0.75, 0.5)]
        assert [save.step for save in history.saves] == [20, 30, 40]
        assert (history.total_steps, history.throughput.runs) == (40, [])
