"""The history of a training out of its directory, its curves and its page, in which no text can become markup."""

from __future__ import annotations

import itertools
import json
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpplot import figure
from ddpplot.history import History
from ddpplot.page import TrainingPage, as_html, span
from ddpplot.recorded import read_history
from ddprun.errors import DataMissing
from tests.plot.rows import write_run

HOSTILE = "</text></title><script>alert('x')</script><img src=x onerror=\"alert('y')\">"


def write(root: Path, run: int, steps: range, *, origin: int | None = None, loss: object = 0.5, **start: Any) -> None:
    """Write the metrics of one run, which takes a second per step and evaluates every tenth step."""
    start = {"totalSteps": 40, "worldSize": 2, "data": "idx", "attempt": run, "time": run * 100.0} | start
    rows: list[dict[str, Any]] = []
    for number, step in enumerate(steps, 1):
        at = {"step": step, "time": run * 100.0 + number}
        rows.append({"event": "train", **at, "loss": loss, "lr": 0.1, "samplesPerSecond": 1000.0 * run})
        if step % 10 == 0:
            rows.append({"event": "eval", **at, "accuracy": 0.9 + step / 1000, "loss": loss, "samples": 100})
    write_run(root, run, range(0), origin=origin, rows=tuple(rows), **start)


def restarted(root: Path) -> History:
    """Return a training whose first run took 25 steps and saved the 20th; the second run finished it."""
    write(root, 1, range(1, 26))
    write(root, 2, range(21, 41), origin=20)
    return read_history(root)


def html(history: History, name: str = "job") -> str:
    return as_html(TrainingPage(name, "ddpjob 0.1.0", history))


def test_a_restart_keeps_the_steps_that_count_and_those_that_were_repeated(tmp_path: Path) -> None:
    history = restarted(tmp_path)
    assert [step.step for step in history.steps] == list(range(1, 41))
    assert [(step.run, step.step) for step in history.lost] == [(1, step) for step in range(21, 26)]
    assert [(run.resumed, run.reached, run.repeated, run.attempt) for run in history.runs] == [
        (0, 25, 5, "1"), (20, 40, 0, "2"),
    ]  # fmt: skip
    assert [(one.run, one.step) for one in history.evaluations] == [(1, 10), (1, 20), (2, 30), (2, 40)]
    assert (history.total_steps, history.last_step) == (40, 40)
    assert history.is_finished
    assert span(history, None) == (100.0, 220.0)


def test_the_curves_are_well_formed_and_mark_the_restart_where_it_resumed(tmp_path: Path) -> None:
    drawing = ET.fromstring(figure.drawing(restarted(tmp_path)))  # noqa: S314 - our own
    marks = [element for element in drawing.iter() if element.get("class") == "restart"]
    bands = [element for element in drawing.iter() if element.get("class") == "band"]
    assert (len(marks), len(bands)) == (1, 3)
    left, right = 56.0, 960.0 - 14
    lines = [element for element in marks[0] if element.tag.endswith("line")]
    assert {float(line.get("x1", 0)) for line in lines} == {(left + right) / 2}, "step 20 of 40"
    assert float(bands[0].get("width", 0)) == pytest.approx((right - left) * 5 / 40, abs=0.1)
    assert len([element for element in drawing.iter() if element.get("class") == "dot accuracy"]) == 4


@pytest.mark.parametrize(
    ("steps", "loss"), [(range(0), 1.0), (range(1, 2), 1.0), (range(1, 4), None), (range(1, 9), -2.0),
                        (range(1, 9), 0), (range(1, 31), 0.3), (range(1, 4), "x")],
)  # fmt: skip
def test_a_training_with_hardly_any_rows_still_has_a_page(tmp_path: Path, steps: range, loss: object) -> None:
    write(tmp_path, 1, steps, loss=loss, time=None, totalSteps=None)
    history = read_history(tmp_path)
    ET.fromstring(figure.drawing(history))  # noqa: S314 - our own
    assert "nan" not in html(history)


def test_a_stopped_run_says_what_stopped_it(tmp_path: Path) -> None:
    write(tmp_path, 1, range(1, 5))
    with (tmp_path / "metrics" / "run-000001.jsonl").open("a") as stream:
        stream.write(json.dumps({"event": "stopped", "run": 1, "step": 4, "message": "stopped by --stop-after 4"}))
    assert [(run.cause, run.reached) for run in read_history(tmp_path).runs] == [("stopped by --stop-after 4", 4)]


def test_many_restarts_have_a_line_each_and_flags_that_do_not_overlap(tmp_path: Path) -> None:
    write(tmp_path, 1, range(1, 3))
    for run in range(2, 40):
        write(tmp_path, run, range(run, run + 2), origin=run - 1)
    drawing = list(ET.fromstring(figure.drawing(read_history(tmp_path), 400, is_page=True)).iter())  # noqa: S314 - our own
    assert len([element for element in drawing if element.get("class") == "restart"]) == 38
    flags = [element[1] for element in drawing if element.get("class") == "flag"]
    ends = [(float(flag.get("x", 0)), float(flag.get("x", 0)) + float(flag.get("width", 0))) for flag in flags]
    assert 5 < len(ends) < 38
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ends))


def test_many_steps_make_a_small_picture_with_the_extremes(tmp_path: Path) -> None:
    write(tmp_path, 1, range(1, 1))
    path = tmp_path / "metrics" / "run-000001.jsonl"
    with path.open("a") as stream:
        for step in range(1, 50_001):
            row = {"event": "train", "run": 1, "step": step, "loss": 9.0 if step == 31_234 else 1.0 + step % 2 / 10}
            stream.write(json.dumps(row) + "\n")
    drawing = figure.drawing(read_history(tmp_path))
    assert len(drawing) < 80_000
    raw = next(e for e in ET.fromstring(drawing).iter() if e.get("class") == "raw loss")  # noqa: S314 - our own
    heights = sorted({float(point.split()[1]) for point in raw.get("d", "").lstrip("M").split("L")})
    assert heights[1] - heights[0] > 100, "the one high loss is drawn"


@pytest.mark.parametrize("spike", [1e-8, 1e8, 1e17, 1e299, 1e308, 10**400])
def test_a_single_huge_loss_leaves_the_smoothed_curve_of_the_others(tmp_path: Path, spike: float) -> None:
    write(tmp_path, 1, range(1, 201))
    path = tmp_path / "metrics" / "run-000001.jsonl"
    path.write_text(path.read_text().replace('"step": 50, "time": 150.0, "loss": 0.5', f'"step": 50, "loss": {spike}'))
    drawing = ET.fromstring(figure.drawing(read_history(tmp_path)))  # noqa: S314 - our own
    line, raw = (
        [point.split()[1] for e in drawing.iter() if e.get("class") == kind for point in e.get("d", "")[1:].split("L")]
        for kind in ("line loss", "raw loss")
    )
    assert line[-1] == line[0] == raw[0], "all losses but one are equal"


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    write(tmp_path, 1, range(1, 12), data=HOSTILE, attempt=HOSTILE, worldSize=2)
    (tmp_path / "run-000001").mkdir()
    (tmp_path / "run-000001" / "owner.json").write_text(json.dumps({"host": HOSTILE}))
    history = read_history(tmp_path)
    text = html(history, HOSTILE)
    assert "default-src 'none'" in text, "no script runs, and nothing is requested"
    for markup in ("<script", "<img", 'onerror="', "</text></title>"):
        assert markup not in text
    assert text.count("&lt;script&gt;") >= 4
    for element in ET.fromstring(figure.drawing(history)).iter():  # noqa: S314 - our own
        assert not element.tag.endswith("script")


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**400, "\ud800"])
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["run", "step"]), inner),
    max_leaves=3,
)
FIELDS = st.sampled_from(
    ["event", "run", "step", "resumedFrom", "time", "worldSize", "totalSteps", "attempt", "loss", "accuracy", "message"]
)


@given(st.sampled_from(["start", "train", "eval", "stopped"]), st.dictionaries(FIELDS, JUNK, min_size=1))
@settings(max_examples=60, deadline=None)
def test_a_malformed_row_of_any_kind_still_gives_a_page(event: str, malformed: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root, 1, range(1, 21))
        row = {"event": event, "run": 2, "step": 20, "time": 200.0, "resumedFrom": {"run": 1, "step": 12}, "loss": 0.5}
        with (root / "metrics" / "run-000002.jsonl").open("w") as stream:
            for content in ({**row, "event": "start"}, {**row, "accuracy": 0.9, **malformed}):
                stream.write(json.dumps(content) + "\n")
        history = read_history(root)
        ET.fromstring(figure.drawing(history))  # noqa: S314 - our own
        html(history)


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="no metrics of a training"):
        read_history(tmp_path / "absent")
