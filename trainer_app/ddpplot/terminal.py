"""The curves of a training as text for a terminal: loss and throughput over the steps, with what happened marked."""

import math
import re
import textwrap
from collections.abc import Sequence

from ddpplot.history import History, round_values
from ddpplot.marks import Mark, marks

_LOSS = "training loss by step"
_LOSS_HEIGHT, _SPEED_HEIGHT = 15, 9  # lines
_LABELS = 7  # characters of a number beside a curve
_MOST_LINES = 12  # of starts, failures and stops below the curves; then the first and the last ones
_MOST_OF_A_MARK = 3  # lines
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_COLOURS = {"restart": "orange", "inPlace": "blue", "failure": "red", "stop": "gray", "notFinite": "red"}
_SYMBOLS = {"restart": "│", "inPlace": "┊", "failure": "×", "stop": "■", "save": "▴", "notFinite": "!"}

Points = Sequence[tuple[int, float]]


def loss_drawing(history: History, width: int, height: int = 13) -> list[str]:
    """Return the loss curve as lines of at most ``width`` characters; none for fewer than three steps."""
    return _drawing(_LOSS, [_losses(history)], width, height, (), coloured=False)


def drawing(history: History, width: int, *, coloured: bool) -> list[str]:
    """Return the curves, and a line for each start, failure and stop: at most ``width`` characters each.

    Args:
        coloured: with escape sequences for colours.
    """
    found, speed = marks(history), history.throughput
    lines = _drawing(_LOSS, [_losses(history)], width, _LOSS_HEIGHT, found, coloured=coloured)
    title = f"{speed.unit} per second"
    lines += _drawing(title, speed.runs, width, _SPEED_HEIGHT, found, coloured=coloured, from_zero=True)
    return [*lines, *_legend(found, width, coloured=coloured)]


def _losses(history: History) -> Points:
    return [(step.step, step.loss) for step in history.steps if step.loss is not None]  # NaN, too: it has a place


def _legend(found: Sequence[Mark], width: int, *, coloured: bool) -> list[str]:
    """Return a line for each start, failure and stop, and one for all saves."""
    events = [mark for mark in found if mark.kind != "save"]
    shown = events if len(events) <= _MOST_LINES else [*events[: _MOST_LINES // 2], *events[-_MOST_LINES // 2 :]]
    lines = []
    for at, mark in enumerate(shown):
        if at == _MOST_LINES // 2 and len(shown) < len(events):
            lines.append(f"  … {len(events) - len(shown)} more")
        symbol = _SYMBOLS[mark.kind]
        first, *others = textwrap.wrap(
            f"step {mark.step:,}: {_printable(mark.text)}", width - 4, max_lines=_MOST_OF_A_MARK, placeholder=" …"
        )
        lines += [
            f"  {_painted(symbol, mark.kind) if coloured else symbol} {first}",
            *(f"    {line}" for line in others),
        ]
    if saves := [mark.step for mark in found if mark.kind == "save"]:
        lines.append(f"  {_SYMBOLS['save']} {len(saves)} saved, the last at step {max(saves):,}")
    return lines


def _drawing(
    title: str,
    runs: Sequence[Points],
    width: int,
    height: int,
    found: Sequence[Mark],
    *,
    coloured: bool,
    from_zero: bool = False,
) -> list[str]:
    kept = [[(step, value) for step, value in run if math.isfinite(value)] for run in runs]
    points = [point for run in kept for point in run]
    steps = [step for run in runs for step, _ in run]  # also those of a loss that is NaN
    if len(points) < 3:
        return []
    import plotext  # type: ignore[import-untyped]

    plotext.clear_figure()
    plotext.limit_size(False, False)
    plotext.theme("clear")
    plotext.plot_size(width, height)
    # A drawing has two columns of dots per character: it shows means of neighbouring points.
    bundle = math.ceil(len(points) / (4 * width))
    for run in filter(None, kept):
        groups = [run[i : i + bundle] for i in range(0, len(run), bundle)]
        middles = [group[len(group) // 2][0] for group in groups]
        plotext.plot(middles, [sum(value for _, value in group) / len(group) for group in groups], marker="braille")
    low = 0.0 if from_zero else min(value for _, value in points)
    high = max(low, *(value for _, value in points))
    heights = round_values(low, high, 5 if height > _SPEED_HEIGHT else 3) or [low]
    plotext.yticks(heights, [_number(value).rjust(_LABELS) for value in heights])
    _draw_marks([mark for mark in found if min(steps) <= mark.step <= max(steps)], low, high)
    plotext.title(title)
    plotext.xlim(min(steps), max(steps))
    ticks = sorted({min(steps), steps[len(steps) // 2], max(steps)})
    plotext.xticks(ticks, [f"{step:,}" for step in ticks])
    text = plotext.build()
    return [line.rstrip() for line in (text if coloured else _COLOUR.sub("", text)).splitlines()]


def _draw_marks(found: Sequence[Mark], low: float, high: float) -> None:
    """Draw lines at starts, and the other marks below the curve."""
    import plotext

    bottom = low - 0.08 * (high - low) if found else low
    plotext.ylim(bottom, high if high > bottom else bottom + 1)
    for mark in found:
        if mark.kind in ("restart", "inPlace"):
            plotext.vline(mark.step, _COLOURS[mark.kind])
    for mark in sorted(found, key=lambda mark: mark.kind != "save"):  # what is drawn later covers the others
        if mark.kind not in ("restart", "inPlace"):
            colour = _COLOURS.get(mark.kind, "default")
            plotext.scatter([mark.step], [bottom], marker=_SYMBOLS[mark.kind], color=colour)


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _painted(text: str, kind: str) -> str:
    codes = {"restart": 33, "inPlace": 34, "failure": 31, "stop": 90, "notFinite": 31}
    return f"\x1b[{codes[kind]}m{text}\x1b[0m"


def _printable(text: str) -> str:
    """Return the text on one line; a message of a program may contain escape sequences."""
    return "".join(character if character.isprintable() else "?" for character in " ".join(text.split()))
