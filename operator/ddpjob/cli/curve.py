"""The loss curve of a job, from the ``metrics.jsonl`` that the trainer keeps beside its checkpoints."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Json = dict[str, Any]
FILE_NAME = "metrics.jsonl"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Point:
    """Mean training loss of one optimizer step."""

    step: int
    loss: float


def losses(path: Path) -> list[Point]:
    """The steps that count, in order: what an interrupted run did beyond the checkpoint that was resumed is dropped.

    The newest run counts whole, the run that it resumed from up to the step of that checkpoint, and so on back. Torn
    lines are skipped; a file that cannot be read has no points.
    """
    origins: dict[int, tuple[int, int] | None] = {}
    found: list[tuple[int, Point]] = []
    for row in _rows(path):
        try:
            if row["event"] == "start":
                origin = row["resumedFrom"]
                origins[int(row["run"])] = (int(origin["run"]), int(origin["step"])) if origin else None
            elif row["event"] == "train" and row["loss"] is not None:
                found.append((int(row["run"]), Point(int(row["step"]), float(row["loss"]))))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    last = _last_steps(origins)
    kept = {point.step: point for run, point in found if point.step <= last.get(run, -1)}
    return [kept[step] for step in sorted(kept)]


def drawing(points: Sequence[Point], width: int, height: int = 13) -> list[str]:
    """Lines of text, at most ``width`` wide; none where there are too few points for a curve."""
    points = [point for point in points if math.isfinite(point.loss)]
    if len(points) < 3:
        return []
    import plotext  # type: ignore[import-untyped]

    shown = _thinned(points, 4 * width)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.plot([p.step for p in shown], [p.loss for p in shown], marker="braille")
    plotext.title("training loss by step")
    steps = [points[0].step, points[len(points) // 2].step, points[-1].step]
    plotext.xticks(steps, [f"{step:,}" for step in steps])
    return [line.rstrip() for line in _COLOUR.sub("", plotext.build()).splitlines()]


def sparkline(values: Sequence[float], width: int = 16) -> str:
    """All values as a line of bars, lowest to highest; each bar is the mean of its share of them."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if count < 2:
        return ""
    edges = [len(finite) * i // count for i in range(count + 1)]
    shown = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(shown), max(shown)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (v - low) / (high - low))] if high > low else "▁" for v in shown)


def _thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Means of neighbours: a dot has four columns, and more points than that are noise."""
    bundle = math.ceil(len(points) / most)
    groups = [points[i : i + bundle] for i in range(0, len(points), bundle)]
    return [Point(group[len(group) // 2].step, sum(p.loss for p in group) / len(group)) for group in groups]


def _rows(path: Path) -> list[Json]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _last_steps(origins: dict[int, tuple[int, int] | None]) -> dict[int, float]:
    """Run to the last of its steps that counts, for the newest run and all that it descends from."""
    last: dict[int, float] = {}
    run, step = max(origins, default=0), math.inf
    while run in origins and run not in last:
        last[run] = step
        origin = origins[run]
        if origin is None:
            break
        run, step = origin[0], min(step, origin[1])
    return last
