"""The curves in a terminal: their width, their marks, and that no text of a program reaches the terminal as it is."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from ddpplot import figure
from ddpplot.history import History, RunFailure, StepRow
from ddpplot.recorded import read_history
from ddpplot.terminal import drawing, loss_drawing
from tests.plot.rows import restarted, write_run


def history_of(losses: dict[int, float]) -> History:
    steps = [StepRow(1, step, loss, None, None) for step, loss in losses.items()]
    return History([], steps, [], [], None, "")


def test_curve_fits_the_width_without_escape_sequences() -> None:
    lines = loss_drawing(history_of({step: 2.3 * math.exp(-step / 600) for step in range(1, 5001)}), 76)
    assert len(lines) > 8
    assert all(len(line) <= 76 for line in lines)
    assert "\x1b" not in "".join(lines)
    assert "5,000" in lines[-1]


def test_two_points_draw_no_curve() -> None:
    assert loss_drawing(history_of({1: 2.0, 2: 1.0}), 76) == []


def test_equal_losses_are_drawn() -> None:
    assert loss_drawing(history_of(dict.fromkeys(range(20), 0.0)), 60)


def test_axis_ends_at_the_last_step_also_if_its_loss_is_nan() -> None:
    lines = loss_drawing(history_of({step: 1 / step if step < 25 else math.nan for step in range(1, 50)}), 60)
    assert lines[-1].split()[-1] == "49"
    curve = [line for line in lines if "│" in line or "┤" in line]
    assert max(len(line.rstrip(" │")) for line in curve) < 40, "half of the axis has no curve"


def test_marks_are_listed_below_both_curves(tmp_path: Path) -> None:
    restarted(tmp_path)
    history = read_history(tmp_path)
    failed = replace(history.runs[0], cause="bad \x1b[2J\nline", failure=RunFailure("bad", 1, 1))
    history = replace(history, runs=[failed, *history.runs[1:]])
    lines = drawing(history, 90, coloured=False)
    assert all(len(line) <= 90 for line in lines)
    assert [line.count("┬") for line in lines if "┌" in line] == [2, 2], "a line at each restart, in both curves"
    assert [line for line in lines if line.startswith("  ")][-4:] == [
        "  × step 25: attempt 1, life 1 failed: bad ?[2J line",
        "  ┊ step 20: attempt 1, life 2 resumed from step 20 in place",
        "  │ step 40: attempt 2 resumed from step 40",
        "  ▴ 2 saved, the last at step 40",
    ]
    coloured = "\n".join(drawing(history, 90, coloured=True))
    assert "\x1b[31m×\x1b[0m" in coloured and "\x1b[2J" not in coloured


def test_first_loss_of_a_run_that_is_no_number_is_listed(tmp_path: Path) -> None:
    rows = [{"event": "train", "step": step, "loss": loss} for step, loss in ((61, "NaN"), (62, 0.5), (63, "Infinity"))]
    write_run(tmp_path, 1, range(1, 61), rows=tuple(rows), attempt=1)
    history = read_history(tmp_path)
    assert (history.loss, history.diverged) == (math.inf, 63)
    lines = drawing(history, 90, coloured=False)
    assert lines[-1] == "  ! step 61: attempt 1: the loss is NaN at step 61 and 1 later"
    assert any("!" in line for line in lines[:-1]), "a mark below the curve"
    picture = figure.drawing(history)
    assert ">NaN at step 61<" in picture and "× loss not finite" in picture and "nan" not in picture


def test_of_many_restarts_the_first_and_the_last_are_listed(tmp_path: Path) -> None:
    restarted(tmp_path)
    history = read_history(tmp_path)
    runs = [replace(history.runs[0], number=number, attempt=str(number)) for number in range(1, 40)]
    lines = drawing(replace(history, runs=runs), 80, coloured=False)
    assert "  … 26 more" in lines
    assert "attempt 2 " in lines[-14] and "attempt 39 " in lines[-2]
