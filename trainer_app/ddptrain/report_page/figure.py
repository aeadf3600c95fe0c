"""The curves of a training as SVG: loss, accuracy and throughput over the steps, with a mark at each restart.

The page embeds the drawing; ``standalone`` makes it a file of its own. The colours are in ``templates/curves.css``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from ddptrain.report_page.history import History

STYLE = "\n" + (Path(__file__).parent / "templates" / "curves.css").read_text()
_LEFT, _RIGHT, _TOP, _GAP, _BOTTOM = 56, 14, 26, 40, 44  # pixels around and between the panels
_HEIGHTS = (200, 110, 90)
_HITS = 90  # columns that show their numbers under the pointer
_SMOOTHING = 80  # the strong line of the loss averages over two of so many parts of the training

Places = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Scale:
    """Maps values from ``low`` to ``high`` to pixels from ``start`` to ``end``, on request by their logarithm."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = map(math.log, (self.low, self.high, value)) if self.is_log else (self.low, self.high, value)
        return self.start + (self.end - self.start) * (value - low) / ((high - low) or 1.0)

    def ticks(self, most: int) -> list[float]:
        """Return at most about ``most`` round values in the range."""
        if self.is_log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for digits in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
                found = [d * 10.0**e for e in decades for d in digits if self.low <= d * 10.0**e <= self.high]
                if len(found) <= most:
                    return found if len(found) > 1 else [self.low, self.high]
            return found[:: -(-len(found) // most)]  # of so many powers of ten, every second or third
        rough = (self.high - self.low) / most or 1.0
        unit = 10.0 ** math.floor(math.log10(rough))
        size = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
        first = math.ceil(self.low / size - 1e-9)
        return [n * size for n in range(first, math.floor(self.high / size + 1e-9) + 1)]


def standalone(history: History) -> str:
    """Return the curves as a file of its own, on a background of its own, so that it is legible on any page."""
    body, width, height = _drawing(history, 960, hits=False)
    title = f"Training on {history.data}: loss, accuracy and throughput over the steps"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="curves" role="img" '
        f'viewBox="-16 -12 {width + 32} {height + 20}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n"
        f'<rect x="-16" y="-12" width="{width + 32}" height="{height + 20}" rx="12" style="fill: var(--card)"/>\n'
        f"{body}\n</svg>\n"
    )


def embedded(history: History, width: int) -> str:
    """Return the curves as an ``svg`` element for a page that has STYLE."""
    body, width, height = _drawing(history, width, hits=width > 600)
    return (
        f'<svg class="curves" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="Loss, accuracy and throughput over the steps">\n{body}\n</svg>'
    )


def _drawing(history: History, width: int, *, hits: bool) -> tuple[str, int, int]:
    last = max(history.total_steps or 0, history.last_step, *(step.step for step in history.lost), 1)
    across = _Scale(0, last, _LEFT, width - _RIGHT)
    tops = [_TOP + sum(_HEIGHTS[:n]) + n * _GAP for n in range(3)]
    bottoms = [top + height for top, height in zip(tops, _HEIGHTS, strict=True)]
    parts = [
        *_bands(history, across, tops, bottoms),
        *_loss(history, across, tops[0], bottoms[0]),
        *_accuracy(history, across, tops[1], bottoms[1]),
        *_speed(history, across, tops[2], bottoms[2]),
        *_restarts(history, across, tops, bottoms),
    ]
    for tick in across.ticks(int(across.end - across.start) // 100):
        x = across(tick)
        parts.append(_text(x, bottoms[2] + 18, f"{tick:,.0f}", "end" if x > across.end - 20 else "middle"))
    parts.append(_text((_LEFT + width - _RIGHT) / 2, bottoms[2] + 36, "step", "middle"))
    if hits:
        parts += _hits(history, across, tops[0], bottoms[2])
    return "\n".join(parts), width, bottoms[2] + _BOTTOM


def _loss(history: History, across: _Scale, top: float, bottom: float) -> list[str]:
    taken = [(step.step, step.loss) for step in history.steps if step.loss is not None]
    tested = [(row.step, row.loss) for row in history.evaluations if row.loss is not None]
    values = [loss for _, loss in (*taken, *tested)] + [step.loss for step in history.lost if step.loss is not None]
    is_log = bool(values) and min(values) > 0
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = 0.06 * (high - low or 1.0)
    low, high = (low / 1.12, high * 1.12) if is_log else (low - margin, high + margin)
    down = _Scale(low, high, bottom, top, is_log)
    name = "loss (logarithmic)" if is_log else "loss"
    parts = _panel(name, across, down, top, show=lambda value: f"{value:.3g}", ticks=6)
    parts.append(_path(_extremes(_placed(taken, across, down)), "raw loss"))
    reach = max(1, len(taken) // _SMOOTHING)
    for run in {step.run: None for step in history.lost}:
        of_run = [(step.step, step.loss) for step in history.lost if step.run == run and step.loss is not None]
        parts.append(_path(_extremes(_placed(_smooth(of_run, reach), across, down)), "lost"))
    parts.append(_path(_thin(_placed(_smooth(taken, reach), across, down)), "line loss"))
    places = _placed(tested, across, down)
    parts += [_dot(x, y, "loss") for x, y in places]
    if tested and len(tested) <= 40:
        x, y = places[-1]
        dx, dy, anchor = (-8, -7, "end") if x + 90 > across.end else (9, 4, "start")
        parts.append(_text(x + dx, y + dy, f"test {tested[-1][1]:.4f}", anchor, "value loss"))
    if across.end - across.start > 600:
        parts.append(_text(across.end, top - 9, "line: training, smoothed · dots: test set", "end"))
    return parts


def _accuracy(history: History, across: _Scale, top: float, bottom: float) -> list[str]:
    found = [(row.step, row.accuracy) for row in history.evaluations]
    low, high = (min(a for _, a in found), max(a for _, a in found)) if found else (0.0, 1.0)
    margin = max(0.35 * (high - low), 0.002)
    down = _Scale(max(0.0, low - margin), min(1.0, high + margin), bottom, top)
    parts = _panel("accuracy on the test set", across, down, top, show=lambda value: f"{100 * value:.4g}%", ticks=3)
    places = _placed(found, across, down)
    parts.append(_path(_thin(places), "line accuracy"))
    if len(places) <= 40:
        parts += [_dot(x, y, "accuracy") for x, y in places]
    labelled = places if len(places) <= 8 else places[-1:]
    for (x, y), (_, accuracy) in zip(labelled, found[-len(labelled) :], strict=True):
        at_edge = x > across.end - 30
        parts.append(_text(x - 8 if at_edge else x, y - 9, f"{accuracy:.2%}", "end" if at_edge else "middle", "value"))
    if not found:
        parts.append(_text((across.start + across.end) / 2, (top + bottom) / 2, "not evaluated yet", "middle"))
    return parts


def _speed(history: History, across: _Scale, top: float, bottom: float) -> list[str]:
    found = [step.speed for step in history.steps if step.speed is not None]
    down = _Scale(0, max(found, default=1.0) * 1.1 or 1.0, bottom, top)
    show = lambda value: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"  # noqa: E731
    parts = _panel("samples per second", across, down, top, show=show, ticks=4)
    for run in {step.run: None for step in history.steps}:  # a new run starts its average anew
        own = [(step.step, step.speed) for step in history.steps if step.run == run and step.speed is not None]
        parts.append(_path(_extremes(_placed(own, across, down)), "line speed"))
    return parts


def _bands(history: History, across: _Scale, tops: Sequence[float], bottoms: Sequence[float]) -> list[str]:
    """Return a band over the steps that were computed again after each restart, to be painted below the curves."""
    parts = []
    for before, run in pairwise(history.runs):
        x = across(run.resumed)
        if (width := across(before.reached) - x) > 0:
            for top, bottom in zip(tops, bottoms, strict=True):
                parts.append(
                    f'<rect class="band" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{bottom - top}">'
                    f"<title>{before.repeated:,} steps that were computed again</title></rect>"
                )
    return parts


def _restarts(history: History, across: _Scale, tops: Sequence[float], bottoms: Sequence[float]) -> list[str]:
    """Return a line at the step from which each restart resumed, with a flag."""
    lines, flags, free = [], [], -math.inf
    many = len(history.restarts) > 3
    for number, run in enumerate(history.restarts, 1):
        x = across(run.resumed)
        lines.append('<g class="restart">')
        lines.append(f"<title>restart {number}: run {run.number} resumed from step {run.resumed:,}</title>")
        for top, bottom in zip(tops, bottoms, strict=True):
            lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
        lines.append("</g>")
        label = f"{number}" if many else f"restart {number}" if len(history.restarts) > 1 else "restart"
        width = 6.8 * len(label) + 10
        left = x - width if x + width > across.end else x
        if left > free:  # the flags of restarts close together would overlap
            flags.append(f'<g class="flag"><title>restart {number}</title>')
            flags.append(f'<rect x="{left:.1f}" y="{tops[0]}" width="{width:.1f}" height="18" rx="3"/>')
            flags.append(_text(left + width / 2, tops[0] + 13, label, "middle") + "</g>")
            free = left + width + 2
    return lines + flags


def _panel(
    name: str, across: _Scale, down: _Scale, top: float, *, show: Callable[[float], str], ticks: int
) -> list[str]:
    parts = [_text(across.start, top - 9, name, "start", "name")]
    for tick in down.ticks(ticks):
        y = down(tick)
        parts.append(f'<path class="grid" d="M{across.start:.1f} {y:.1f}H{across.end:.1f}"/>')
        parts.append(_text(across.start - 8, y + 4, show(tick), "end"))
    return parts


def _hits(history: History, across: _Scale, top: float, bottom: float) -> list[str]:
    """Return invisible columns; the column under the pointer shows the numbers of its step. This needs no script."""
    if not history.steps:
        return []
    count = min(_HITS, len(history.steps))
    shown = [history.steps[round(n * (len(history.steps) - 1) / max(1, count - 1))] for n in range(count)]
    middles = [across(step.step) for step in shown]
    edges = [across.start, *((a + b) / 2 for a, b in pairwise(middles)), across.end]
    parts = []
    size = f'y="{top}" height="{bottom - top}"'
    for step, x, (left, right) in zip(shown, middles, pairwise(edges), strict=True):
        loss = f"loss {step.loss:.4f}" if step.loss is not None else ""
        numbers = f"step {step.step:,}", loss, f"{step.speed:,.0f} samples/s" if step.speed is not None else ""
        parts.append(
            f'<g class="hit"><rect x="{left:.1f}" width="{max(0.0, right - left):.1f}" {size}/>'
            f'<g><line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'
            + _text((across.start + across.end) / 2, top - 9, " · ".join(filter(None, numbers)), "middle")
            + "</g></g>"
        )
    return parts


def _smooth(found: Sequence[tuple[int, float]], reach: int) -> list[tuple[int, float]]:
    """Return the mean of each value and up to ``reach`` values on each side, the same number on both.

    Fewer values are used at the first steps, where a loss falls steeply, and at the last steps.
    """
    values, result = [value for _, value in found], []
    for at, (step, _) in enumerate(found):
        left = min(reach, at)
        window = values[at - left : at + min(left, len(values) - 1 - at) + 1]
        result.append((step, math.fsum(window) / len(window)))
    return result


def _placed(found: Sequence[tuple[int, float]], across: _Scale, down: _Scale) -> list[tuple[float, float]]:
    return [(across(step), down(value)) for step, value in found]


def _extremes(places: Places) -> Places:
    """Return at most two places per pixel column, its highest and its lowest, so that a long curve keeps its noise."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for place in places:
        columns.setdefault(int(place[0]), []).append(place)
    thinned: list[tuple[float, float]] = []
    for column in columns.values():
        kept = {min(column, key=lambda place: place[1]), max(column, key=lambda place: place[1])}
        thinned += sorted(kept)
    return thinned


def _thin(places: Places) -> Places:
    """Return the last place of each column of two pixels."""
    return list({int(x) // 2: (x, y) for x, y in places}.values())


def _path(places: Places, kind: str) -> str:
    points = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path class="{kind}" d="M{points}"/>' if points else ""


def _dot(x: float, y: float, kind: str) -> str:
    return f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'


def _text(x: float, y: float, content: str, anchor: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'
