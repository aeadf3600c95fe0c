"""The metrics of all runs: effective rows are those of a training that was never interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddprun.reporting.console import Console
from ddprun.reporting.progress import ProgressRecord
from ddptrain.training.metrics import MetricsLogger
from tests.metrics import effective_rows


def write(path: Path, run: int, resumed: int | None, steps: range, *, origin: int = 0) -> None:
    log = opened(path, run, {"run": origin or run - 1, "step": resumed} if resumed is not None else None)
    for step in steps:
        log.log("train", step, loss=run + step / 1000)
    assert log.flush()


def opened(path: Path, run: int, resumed_from: dict[str, int] | None = None) -> MetricsLogger:
    logger = MetricsLogger(ProgressRecord(1), Console(0), epochs=2, steps_per_epoch=9)
    assert logger.open(path, resumed_from) == run
    return logger


def origins(path: Path) -> list[tuple[int, int]]:
    return [(row["run"], row["step"]) for row in effective_rows(path, "train")]


@pytest.mark.parametrize(
    ("runs", "counted"),
    [
        ([(1, None, range(1, 8)), (2, 4, range(5, 10))], {1: range(1, 5), 2: range(5, 10)}),
        ([(1, None, range(1, 8)), (2, 4, range(5, 6))], {1: range(1, 5), 2: range(5, 6)}),
        ([(1, None, range(1, 8)), (2, None, range(1, 3))], {2: range(1, 3)}),
        # Run 2 saved nothing, while run 1 was still alive and saved step 6.
        ([(1, None, range(1, 8)), (2, 2, range(3, 5)), (3, 6, range(7, 9), 1)], {1: range(1, 7), 3: range(7, 9)}),
        # Run 3 resumed from before its origin began.
        ([(1, None, range(1, 8)), (2, 6, range(7, 9)), (3, 4, range(5, 7))], {1: range(1, 5), 3: range(5, 7)}),
    ],
    ids=["resumed", "resumed, ended early", "from step 0", "a run without a successor", "from before its origin"],
)
def test_rows_that_count_are_those_of_a_training_without_interruption(
    tmp_path: Path, runs: list[tuple[Any, ...]], counted: dict[int, range]
) -> None:
    for run, resumed, steps, *origin in runs:
        write(tmp_path, run, resumed, steps, origin=origin[0] if origin else 0)
    assert origins(tmp_path) == [(run, step) for run, steps in counted.items() for step in steps]


@pytest.mark.parametrize(
    "origin",
    ["run-000001", 1, [], {}, {"run": 1}, {"run": None, "step": 3}, {"run": 1, "step": "x"}, {"run": 1, "step": 1e999}],
)
def test_run_with_a_malformed_origin_counts_alone_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], origin: object
) -> None:
    write(tmp_path, 1, None, range(1, 8))
    write(tmp_path, 2, 3, range(4, 6))
    path = tmp_path / "metrics" / "run-000002.jsonl"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(first), "resumedFrom": origin}) + "\n" + rest)
    assert origins(tmp_path) == [(2, 4), (2, 5)]
    said = capsys.readouterr().err
    assert said.startswith(f"warning: run 2 in {tmp_path}: resumedFrom is ")
    assert said.endswith("the steps of earlier runs are not counted\n")


def test_malformed_and_incomplete_rows_are_skipped(tmp_path: Path) -> None:
    write(tmp_path, 1, None, range(1, 3))
    with (tmp_path / "metrics" / "run-000001.jsonl").open("a") as stream:
        for event, run, step in (
            ("start", 1e999, 1),
            ("train", [], 1),
            ("train", 1, 1e999),
            ("train", 1, 10**400),
            ([], 1, 1),
        ):
            stream.write(json.dumps({"event": event, "run": run, "step": step, "resumedFrom": None}) + "\n")
        stream.write("[" * 100_000 + "\n")
        stream.write('{"event": "train", "run": 1, "st')  # of a process that was killed
    assert origins(tmp_path) == [(1, 1), (1, 2)]


def test_an_older_attempt_that_still_writes_cannot_touch_the_rows_of_a_newer_one(tmp_path: Path) -> None:
    # As on NFS, where two clients append at the size that each of them has seen.
    old, new = opened(tmp_path, 1), opened(tmp_path, 2, {"run": 1, "step": 0})
    for logger in (old, new):
        logger.log("train", 1, loss=1.0)
        assert logger.flush()
    os.truncate(tmp_path / "metrics" / "run-000001.jsonl", 0)
    assert origins(tmp_path) == [(2, 1)]


def test_only_a_loss_that_is_no_number_is_a_text_and_others_become_null(tmp_path: Path) -> None:
    path = tmp_path
    log = opened(path, 1)
    log.log("train", 1, loss=float("nan"), lr=float("inf"))
    assert log.flush()
    row = json.loads(
        (path / "metrics" / "run-000001.jsonl").read_text().splitlines()[1],
        parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)),
    )
    assert (row["loss"], row["lr"]) == ("NaN", None)
