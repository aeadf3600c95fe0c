"""`ddptrain report`: what it reads of a training, what it draws, and that no text can become markup."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpplot import figure
from ddpplot.history import History
from ddpplot.timeline import span
from ddprun.distributed.topology import Ranks
from ddprun.errors import DataMissing
from ddprun.launcher.node_reports import NodeReports
from ddptrain.inference.predict import read_png
from ddptrain.report_page import page
from ddptrain.report_page.history import read_history
from ddptrain.report_page.mistakes import Mistakes, grey_png, mistakes_of
from tests.ddptrain.builders import SMALL
from tests.ddptrain.runs import ForkServer

HOSTILE = "</text></title><script>alert('x')</script><img src=x onerror=\"alert('y')\">"


def write(root: Path, run: int, steps: range, *, origin: int | None = None, loss: object = 0.5, **start: Any) -> None:
    """Write the metrics of one run, which takes a second per step and evaluates every tenth step."""
    resumed = None if origin is None else {"run": run - 1, "step": origin}
    rows: list[dict[str, Any]] = [
        {"event": "start", "run": run, "resumedFrom": resumed, "totalSteps": 40, "worldSize": 2, "data": "idx",
         "attempt": run, "time": run * 100.0, **start}
    ]  # fmt: skip
    for number, step in enumerate(steps, 1):
        at = {"run": run, "step": step, "time": run * 100.0 + number}
        rows.append({"event": "train", **at, "loss": loss, "lr": 0.1, "samplesPerSecond": 1000.0 * run})
        if step % 10 == 0:
            rows.append({"event": "eval", **at, "accuracy": 0.9 + step / 1000, "loss": loss, "samples": 100})
    (root / "metrics").mkdir(exist_ok=True)
    (root / "metrics" / f"run-{run:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def restarted(root: Path) -> History:
    """Return a training whose first run took 25 steps and saved the 20th; the second run finished it."""
    write(root, 1, range(1, 26))
    write(root, 2, range(21, 41), origin=20)
    return read_history(root)


def contents(history: History, **more: Any) -> page.Contents:
    return page.Contents(
        **{"name": "job", "history": history, "manifest": {}, "mistakes": None, "problem": "none", **more}
    )


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


def test_the_numbers_as_json(tmp_path: Path) -> None:
    found = page.as_json(contents(restarted(tmp_path), problem=""))
    assert (found["schema"], found["finished"], found["step"], found["restarts"]) == (1, True, 40, 1)
    assert found["samplesPerSecond"] == 1500.0
    assert (len(found["steps"]), len(found["lost"]), len(found["evaluations"])) == (40, 5, 4)
    assert found["problem"] is None


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
    text = page.as_html(contents(history))
    assert "Not available: none" in text
    assert "nan" not in text


def test_a_run_has_the_cause_of_the_first_attempt_that_failed_after_its_start(tmp_path: Path) -> None:
    write(tmp_path, 1, range(1, 26))
    write(tmp_path, 2, range(21, 41), origin=20)
    # Attempts 2 to 5 end before rank 0 opens its metrics, so run 2 is that of attempt 6.
    for attempt in (1, 2, 3, 4, 5, 6):
        time = 130.0 + attempt if attempt < 6 else 300.0
        report = {"rank": 1, "message": f"attempt {attempt}", "cause": "own"}
        content = {"node": 0, "nnodes": 1, "time": time, "report": report, "ranks": []}
        folder = tmp_path / "reports" / f"job-{attempt}"
        folder.mkdir(parents=True)
        (folder / "node-0.json").write_text(json.dumps(content))
    assert [run.cause for run in read_history(tmp_path).runs] == ["rank 1: attempt 1", "rank 1: attempt 6"]


def test_every_restart_has_its_cause_after_restarts_and_later_launches_in_the_same_directory(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    command = ("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path)
    slow = ("--checkpoint-every", 4, "--step-delay", 0.3)
    first = ddptrain.start(*command, *slow, "--max-restarts", 1, "--chaos", "crash:1:6")
    first.at_step(7)  # after the restart
    os.kill(first.ranks()[1], signal.SIGKILL)
    assert first.wait() == 137, first.output()
    ddptrain.run(*command, "--chaos", "kill:0:14", code=137)
    ddptrain.run(*command)
    crash, killed, again, finished = (run.cause for run in read_history(tmp_path).runs)
    assert crash == "rank 1: RuntimeError: crash injected by --chaos, after step 5"
    assert re.fullmatch(r"rank 1 was killed by SIGKILL, in step \d+", killed)
    assert again == "rank 0 was killed by SIGKILL, in step 14"
    assert not finished
    assert "rank 0 was killed by SIGKILL" in ddptrain.run("why", tmp_path).output()


def test_a_stopped_run_says_what_stopped_it(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    command = ("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path)
    limited = ddptrain.run(*command, "--stop-after", 4, code=75)
    assert limited.message()["message"] == "stopped by --stop-after 4, and saved"
    stopped = ddptrain.start(*command, "--step-delay", 0.2)
    step = stopped.at_step(6)["step"]
    stopped.stop()
    assert stopped.wait() == 75, stopped.output()
    assert re.fullmatch(r"stopped by a signal after step \d+, and saved", stopped.message()["message"])
    ddptrain.run(*command, "--chaos", "crash:0:0:resume", code=1)  # before it opens its metrics
    first, second = read_history(tmp_path).runs
    assert (first.cause, first.reached) == ("stopped by --stop-after 4", 4)
    assert (second.cause, second.reached >= step) == (f"stopped by a signal after step {second.reached}", True)


@pytest.mark.parametrize(
    ("report", "cause"),
    [
        ({"message": "rank 3 was killed by SIGBUS", "signal": 7, "step": 4}, "rank 3 was killed by SIGBUS, in step 4"),
        ({"message": "boom", "exception": "ValueError", "traceback": "…", "step": 4},
         "rank 3: ValueError: boom, after step 4"),
        ({"message": "loss is nan at step 5", "exception": "NotFinite", "step": 5}, "rank 3: loss is nan at step 5"),
        ({"message": "KeyError", "exception": "KeyError", "traceback": "…", "step": 0}, "rank 3: KeyError"),
        ({"message": "network: refused", "phase": "preflight"}, ""),
    ],
)  # fmt: skip
def test_a_cause_names_rank_exception_or_signal_and_step(tmp_path: Path, report: dict[str, Any], cause: str) -> None:
    write(tmp_path, 1, range(1, 4))
    NodeReports(tmp_path / "reports" / "u-1", Ranks()).write({"rank": 3, **report}, [], [])
    assert [run.cause for run in read_history(tmp_path).runs] == [cause]


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
    manifest = {"step": 10, "run": 1, "config": {"model": HOSTILE}, "torch": HOSTILE}
    text = page.as_html(contents(history, name=HOSTILE, manifest=manifest, problem=HOSTILE))
    for markup in ("<script", "<img", 'onerror="', "</text></title>"):
        assert markup not in text
    assert text.count("&lt;script&gt;") >= 6
    for element in ET.fromstring(figure.drawing(history)).iter():  # noqa: S314 - our own
        assert not element.tag.endswith("script")


def test_mistakes_are_ordered_by_the_probability_of_the_label(tmp_path: Path) -> None:
    labels = np.array([0, 1, 2, 3], np.uint8)
    images = np.arange(4 * 28 * 28, dtype=np.int64).astype(np.uint8).reshape(4, 28, 28)
    probabilities = np.full((4, 10), 0.01)
    for sample, (predicted, truth) in enumerate([(0, 0.9), (7, 0.2), (7, 0.1), (3, 0.9)]):
        probabilities[sample, predicted] = 0.6
        probabilities[sample, labels[sample]] = truth
    found = mistakes_of(probabilities, labels, images, 5)
    assert [(miss.index, miss.label, miss.predicted) for miss in found.worst] == [(2, 2, 7), (1, 1, 7)]
    assert (found.missed, found.samples, found.confusion[2][7], found.largest_miss) == (2, 4, 1, 1)
    assert len(mistakes_of(probabilities, labels, images, 1).worst) == 1
    (tmp_path / "image.png").write_bytes(grey_png(images[2]))
    assert (read_png(tmp_path / "image.png")[..., 0] == images[2]).all()


def test_a_model_without_mistakes_has_no_gallery(tmp_path: Path) -> None:
    perfect = Mistakes([[5 * (row == column) for column in range(10)] for row in range(10)], [])
    text = page.as_html(contents(restarted(tmp_path), mistakes=perfect, manifest={"step": 40, "run": 2}))
    assert "every sample of the test set is recognized" in text


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
        page.as_html(contents(history))
        json.dumps(page.as_json(contents(history)), allow_nan=False)


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="no metrics of a training"):
        read_history(tmp_path / "absent")


def test_a_killed_and_resumed_training_becomes_page_picture_and_json(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    root, out, svg = tmp_path / "my job", tmp_path / "report.html", tmp_path / "curves.svg"
    ranks = ("--nproc-per-node", 2, "--max-restarts", 1, "--chaos", "kill:1:16", "--checkpoint-every", 4)
    ddptrain.run("launch", *SMALL, *ranks, "--data-dir", idx, "--checkpoint-dir", root)
    ddptrain.run("report", root, "--data-dir", idx, "--out", out, "--svg", svg)
    text = out.read_text()
    assert ("rank 1 was killed by SIGKILL, in step 16" in text, 'id="misses"' in text) == (True, True)
    marks = [svg.read_text().count(f'class="{kind}"') for kind in ("restart inplace", "failure", "save")]
    assert marks == [1, 1, 6], "a life of the same launcher; saves after steps 4, 6, 8, 12, 16 and 18"
    assert not (root / "report.html").exists()

    printed = ddptrain.run("report", root, "--data-dir", idx, "--json").output().splitlines()[-1]
    found = json.loads(printed)
    evaluated = ddptrain.run("eval", "--checkpoint-dir", root, "--data-dir", idx).output().splitlines()[-1]
    assert sum(found["confusion"][digit][digit] for digit in range(10)) == json.loads(evaluated)["correct"]
    assert [(run["resumed"], run["reached"], run["repeated"]) for run in found["runs"]] == [(0, 15, 3), (12, 18, 0)]

    run = ddptrain.run("report", root / "metrics" / "run-000002.jsonl")
    assert "warning: no confusion matrix: --data idx needs --data-dir" in run.output()
    assert "Not available: --data idx needs --data-dir" in (root / "report.html").read_text()
