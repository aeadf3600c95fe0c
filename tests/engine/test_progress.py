"""Conversion of rank 0's report to the status, also for malformed reports."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddpjob.engine.progress import checkpoint_status, known_part, progress_status
from tests.builders import NOW

REPORT: dict[str, Any] = {
    "schema": 1, "seq": 412, "ageSeconds": 2.0, "phase": "train", "epoch": 1, "totalEpochs": 2, "step": 300,
    "totalSteps": 470, "loss": 0.04, "accuracy": None, "samplesPerSecond": 17000.4, "worldSize": 4,
    "checkpoint": {"run": 3, "step": 250},
}  # fmt: skip


def test_report_is_converted_to_status_progress() -> None:
    assert progress_status(REPORT, {}, NOW) == {
        "phase": "train", "epoch": 1, "totalEpochs": 2, "step": 300, "totalSteps": 470, "percent": 63, "loss": "0.04",
        "samplesPerSecond": "17000", "display": "63% 300/470", "lastHeartbeatTime": "2026-03-01T11:59:58Z",
    }  # fmt: skip


def test_unchanged_report_does_not_change_the_status() -> None:
    before = progress_status(REPORT, {}, NOW)
    later = REPORT | {"ageSeconds": 12.0, "seq": 413}
    assert progress_status(later, before, NOW + timedelta(seconds=10)) == before


def test_nan_loss_is_a_string() -> None:
    assert progress_status(REPORT | {"loss": float("nan")}, {}, NOW)["loss"] == "nan"


def test_phase_without_a_loss_keeps_the_last_one() -> None:
    before = progress_status(REPORT, {}, NOW)
    during = progress_status(REPORT | {"phase": "evaluate", "loss": None}, before, NOW)
    assert during["loss"] == "0.04" and during["phase"] == "evaluate"


def test_progress_without_total_steps_shows_only_the_step() -> None:
    assert progress_status({"step": 7}, {}, NOW)["display"] == "step 7"


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        ({}, None),
        ({"checkpoint": None}, None),
        ({"checkpoint": {"run": 1}}, None),
        ({"checkpoint": {"run": 1, "step": 5}}, {"path": "run-000001/step-000000005.pt", "step": 5}),
        (
            {"checkpoint": None, "resumedFrom": {"run": 1, "step": 5}},
            {"path": "run-000001/step-000000005.pt", "step": 5, "resumedFromStep": 5},
        ),
    ],
)
def test_checkpoint_path_is_that_of_its_file(report: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = checkpoint_status(report, None, NOW)
    assert (found and {k: v for k, v in found.items() if k != "time"}) == expected


def test_time_of_the_last_checkpoint_is_kept() -> None:
    first = checkpoint_status(REPORT, None, NOW)
    assert checkpoint_status(REPORT, first, NOW + timedelta(minutes=1)) == first


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*REPORT, "resumedFrom", "etaSeconds"]), junk))
def test_malformed_report_gives_a_valid_status(report: dict[str, Any]) -> None:
    made = progress_status(report, {}, NOW)
    assert isinstance(made["display"], str)
    checkpoint_status(report, None, NOW)


@given(st.dictionaries(st.sampled_from([*REPORT, "resumedFrom", "etaSeconds", "other"]), junk))
@example(REPORT | {"phase": "x" * 60_000, "step": 10**4000, "checkpoint": {"run": 3, "step": 250, "files": ["a"] * 9}})
def test_known_part_of_a_report_gives_the_same_status_and_is_small(report: dict[str, Any]) -> None:
    known = known_part(report)
    before = {"step": 1, "loss": "0.5"}
    assert progress_status(known, before, NOW) == progress_status(report, before, NOW)
    assert checkpoint_status(known, None, NOW) == checkpoint_status(report, None, NOW)
    assert len(repr(known)) < 1024


def test_long_phase_is_truncated() -> None:
    assert len(progress_status({"phase": "x" * 60_000}, {}, NOW)["display"]) == 64
