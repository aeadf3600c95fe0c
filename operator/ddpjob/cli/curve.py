"""The loss curve at the end of a run: reads the trainer's metrics, and draws them as text."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ddpjob.api.objects import Json

_LARGEST_STEP = 10**12  # that a drawing shows
_BARS = "▁▂▃▄▅▆▇█"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def metrics_of(directory: Path | None) -> Path | None:
    """Return what the trainer wrote into its checkpoint directory: a folder, or a file if it is older than 0.2."""
    paths = [directory / "metrics", directory / "metrics.jsonl"] if directory else []
    return next((path for path in paths if path.exists()), None)


def losses(metrics: Path) -> dict[int, float]:
    """Return the mean loss of every optimizer step, without steps that a resumed run repeated.

    A run has the steps of the run that it resumed from, up to the step of that checkpoint, and then its own. The newest
    run counts. Incomplete lines are skipped; a file that cannot be read has no steps.
    """
    runs: dict[int, dict[int, float]] = {}
    for row in _rows(metrics):
        try:
            run = int(row["run"])
            if row["event"] == "start":
                runs[run] = {}  # also if the row does not say from where it resumed
                if (origin := row.get("resumedFrom")) is not None:
                    last, before = int(origin["step"]), runs.get(int(origin["run"]), {})
                    runs[run] = {step: loss for step, loss in before.items() if step <= last}
            elif row["event"] == "train" and row["loss"] is not None and run in runs:
                runs[run][int(row["step"])] = float(row["loss"])
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return dict(sorted(runs[max(runs)].items())) if runs else {}


def _rows(metrics: Path) -> Iterator[Json]:
    for path in sorted(metrics.glob("run-*.jsonl")) if metrics.is_dir() else [metrics]:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def drawing(losses: Mapping[int, float], width: int, height: int = 13) -> list[str]:
    """Return the loss curve as lines of at most ``width`` characters; none for fewer than three steps."""
    points = [(step, loss) for step, loss in losses.items() if math.isfinite(loss) and abs(step) <= _LARGEST_STEP]
    if len(points) < 3:
        return []
    import plotext  # type: ignore[import-untyped]

    # A drawing has four columns of dots per character: it shows means of neighbouring points.
    bundle = math.ceil(len(points) / (4 * width))
    groups = [points[i : i + bundle] for i in range(0, len(points), bundle)]
    steps = [group[len(group) // 2][0] for group in groups]
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.plot(steps, [sum(loss for _, loss in group) / len(group) for group in groups], marker="braille")
    plotext.title("training loss by step")
    ticks = [points[0][0], points[len(points) // 2][0], points[-1][0]]
    plotext.xticks(ticks, [f"{step:,}" for step in ticks])
    return [line.rstrip() for line in _COLOUR.sub("", plotext.build()).splitlines()]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the course of the values in one line of at most ``width`` bars; empty for fewer than three values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 3:
        return ""
    bundle = math.ceil(len(finite) / width)
    means = [sum(group) / len(group) for group in (finite[i : i + bundle] for i in range(0, len(finite), bundle))]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    bars = "".join(_BARS[round((mean - low) * scale)] for mean in means)
    return f"{bars} {finite[0]:.4g} → {finite[-1]:.4g}"
