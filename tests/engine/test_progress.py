"""Conversion of rank 0's report to the status, also for malformed reports."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddpjob.api.report import ReportedCheckpoint, training_report
from ddpjob.api.status import CheckpointStatus, Progress
from ddpjob.engine.progress import checkpoint_status, progress_status
from tests.builders import NOW
from tests.engine.test_reports import junk

REPORT: dict[str, Any] = {
    "schema": 1, "seq": 412, "ageSeconds": 2.0, "phase": "train", "epoch": 1, "totalEpochs": 2, "step": 300,
    "totalSteps": 470, "loss": 0.04, "accuracy": None, "samplesPerSecond": 17000.4, "worldSize": 4,
    "stepsPerSecond": 66.406,
    "checkpoint": {"step": 250, "path": "250.pt"},
}  # fmt: skip


def progress(report: dict[str, Any], before: Progress | None = None, now: datetime = NOW) -> Progress:
    return progress_status(training_report(report), before, now)


def checkpoint(report: dict[str, Any], before: CheckpointStatus | None = None) -> CheckpointStatus | None:
    return checkpoint_status(training_report(report), before, NOW + timedelta(minutes=1 if before else 0))


def test_report_is_converted_to_status_progress() -> None:
    assert progress(REPORT).wire() == {
        "phase": "train", "epoch": 1, "totalEpochs": 2, "step": 300, "totalSteps": 470, "percent": 63, "loss": "0.04",
        "samplesPerSecond": "17000", "stepsPerSecond": "66.4", "display": "63% 300/470",
        "lastHeartbeatTime": "2026-03-01T11:59:58Z",
    }  # fmt: skip


def test_unchanged_report_does_not_change_the_status() -> None:
    before = progress(REPORT)
    later = REPORT | {"ageSeconds": 12.0, "seq": 413}
    assert progress(later, before, NOW + timedelta(seconds=10)) == before


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        ("NaN", "nan"),
        ("Infinity", "inf"),
        ("-Infinity", "-inf"),
        (float("nan"), "nan"),
        (1e308, "1e+308"),
        ("no", "0.04"),
    ],
)
def test_loss_that_is_no_number_replaces_the_last_good_one(loss: object, shown: str) -> None:
    during = progress(REPORT | {"step": 301, "loss": loss}, progress(REPORT))
    assert during.loss == shown
    assert progress(REPORT | {"step": 302, "loss": None}, during).loss == shown


@pytest.mark.parametrize(
    ("report", "percent", "display"),
    [
        ({"step": 200, "totalSteps": 200, "percent": 60}, 60, "60% 200/200"),
        ({"step": 7}, None, "step 7"),
        ({"step": 7, "percent": 60}, 60, "60% step 7"),
        ({"percent": 100}, 100, "100%"),
        ({"step": 7, "totalSteps": 70, "percent": 101}, 10, "10% 7/70"),
    ],
)
def test_percentage_of_the_trainer_is_shown_as_it_is(report: dict[str, Any], percent: int | None, display: str) -> None:
    found = progress(report)
    assert (found.percent, found.display) == (percent, display)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({}, None),
        ({"checkpoint": None}, None),
        ({"checkpoint": {"step": 5}}, None),
        ({"checkpoint": {"path": "last.ckpt"}}, None),
        ({"checkpoint": {"step": 5, "path": "v1/last.ckpt"}}, {"path": "v1/last.ckpt", "step": 5}),
        (
            {"checkpoint": None, "resumedFrom": {"step": 5, "path": "last.ckpt"}},
            {"path": "last.ckpt", "step": 5, "resumedFromStep": 5},
        ),
    ],
)
def test_checkpoint_with_a_step_and_a_path_is_recorded(report: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = checkpoint(report)
    assert (found and {k: v for k, v in found.wire().items() if k != "time"}) == expected


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../other/a.pt", "a/../../b.pt", "a\x1b[2J", "x" * 257, 7, None, ["a"]]
)
def test_path_that_is_not_below_the_directory_is_ignored(path: object) -> None:
    assert checkpoint({"checkpoint": {"step": 5, "path": path}}) is None


def test_time_of_the_last_checkpoint_is_kept() -> None:
    first = checkpoint(REPORT)
    assert checkpoint(REPORT, first) == first


def test_the_newest_checkpoint_at_which_all_agreed_is_kept() -> None:
    first = checkpoint(REPORT | {"agreedCheckpoint": {"step": 240, "path": "240.pt"}})
    assert first is not None and (first.agreed_path, first.agreed_step) == ("240.pt", 240)
    later = checkpoint(REPORT | {"checkpoint": {"step": 260, "path": "260.pt"}}, first)
    assert later is not None and (later.path, later.agreed_path, later.agreed_step) == ("260.pt", "240.pt", 240)


@given(st.dictionaries(st.sampled_from([*REPORT, "resumedFrom", "etaSeconds", "percent", "other"]), junk))
@example(REPORT | {"phase": "x" * 60_000, "step": 10**4000, "checkpoint": {"run": 3, "step": 250, "files": ["a"] * 9}})
@example({name: {"run": 3, "step": 250, "path": "x" * 256} for name in ("checkpoint", "resumedFrom")})
def test_malformed_report_gives_a_valid_status_and_is_small(report: dict[str, Any]) -> None:
    found = training_report(report)
    assert len(repr(found)) < 1024 and len(found.phase or "") <= 64
    Progress.model_validate(progress_status(found, None, NOW).wire())
    if made := checkpoint_status(found, None, NOW):
        CheckpointStatus.model_validate(made.wire())


@pytest.mark.parametrize("wrong", [None, True, -1, 1.5, "3", 2**70, [3], {}])
def test_field_of_a_wrong_type_or_value_is_ignored(wrong: object) -> None:
    found = training_report(REPORT | {"step": wrong, "checkpoint": {"step": wrong}})
    assert found == replace(training_report(REPORT), step=None, checkpoint=ReportedCheckpoint(step=None))
