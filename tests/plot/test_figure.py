"""The curves as a picture: their cost, and the labels of restarts."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path

from ddpplot import figure
from ddpplot.history import History, Run, StepRow
from ddpplot.recorded import read_history
from ddpplot.terminal import loss_drawing
from tests.plot.rows import write_run


def history_of(count: int) -> History:
    steps = [StepRow(1, step, 2 + math.sin(step), None, step / 100) for step in range(1, count + 1)]
    return History([Run(1, "", "", 1, 0, 0.0, count / 100, count)], steps, [], [], count, "")


def test_drawing_costs_as_much_for_each_step_of_a_long_training() -> None:
    """The loss of each of 100,000 steps was smoothed over 2,500 values: 25 s, and without end for a million."""

    def seconds(history: History) -> float:
        began = time.process_time()
        figure.drawing(history)
        return time.process_time() - began

    short = min(seconds(history_of(20_000)) for _ in range(3))
    assert seconds(history_of(320_000)) < 60 * short, "16 times as many steps"


def test_each_restart_has_its_label_also_close_to_another(tmp_path: Path) -> None:
    write_run(tmp_path, 1, range(1, 500), attempt=1, totalSteps=1000)
    write_run(tmp_path, 2, range(481, 490), origin=480, attempt=2)
    write_run(tmp_path, 3, range(486, 1001), origin=485, attempt=3)
    picture = figure.drawing(read_history(tmp_path))
    flags = re.findall(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="18" rx="3"/>\n.*>(attempt \d)<', picture
    )
    assert [label for *_, label in flags] == ["attempt 2", "attempt 3"]
    assert flags[0][1] != flags[1][1], "one below the other"


def test_ticks_of_a_terminal_are_round_numbers() -> None:
    steps = [StepRow(1, step, 2.307 * math.exp(-step / 300), None, None) for step in range(1, 1001)]
    lines = loss_drawing(History([], steps, [], [], None, ""), 76)
    assert [line.partition("┤")[0].strip() for line in lines if "┤" in line] == ["2", "1.5", "1", "0.5"]
