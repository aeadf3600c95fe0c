"""The curves of a training as SVG: loss, accuracy and throughput over the steps, and what happened.

The page embeds the drawing, and commands write it as a file. This module computes the places of everything;
``templates/curves.svg.j2`` draws it with the colours of ``templates/curves.css``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ddpplot.history import History, loss_text, round_values
from ddpplot.marks import Mark, marks, name_of

STYLE = Markup((Path(__file__).parent / "templates" / "curves.css").read_text())  # noqa: S704 - a constant
TEMPLATES = Environment(
    loader=PackageLoader("ddpplot"), undefined=StrictUndefined, autoescape=True, trim_blocks=True,
    lstrip_blocks=True, keep_trailing_newline=True,
)  # fmt: skip
_LEFT, _RIGHT, _TOP, _GAP, _BOTTOM = 56, 14, 26, 40, 44  # pixels around and between the panels
_APART = 6  # pixels between two marks of saves, at least
_SYMBOLS = {"save": "▲ saved", "failure": "× failed", "restart": "┆ restart", "inPlace": "┊ restart in place",
            "notFinite": "× loss not finite"}  # fmt: skip
_HITS = 90  # columns that show their numbers under the pointer
_SMOOTHING = 80  # the strong line of the loss averages over two of so many parts of the training
_SMOOTHED = 4000  # means from which that line is made of a long training; a drawing has fewer columns

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
        return round_values(self.low, self.high, most)


@dataclass
class _Panel:
    """One diagram.

    Attributes:
        curves: (class, points of the path).
        dots: (class, x, y).
        labels: (x, y, text, anchor, class).
    """

    name: str
    across: _Scale
    down: _Scale
    ticks: list[tuple[float, str]]
    curves: list[tuple[str, str]] = field(default_factory=list)
    dots: list[tuple[str, float, float]] = field(default_factory=list)
    labels: list[tuple[float, float, str, str, str]] = field(default_factory=list)

    @property
    def top(self) -> float:
        return self.down.end

    @property
    def bottom(self) -> float:
        return self.down.start

    def places(self, found: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
        return [(self.across(step), self.down(value)) for step, value in found]

    def curve(self, kind: str, places: Places) -> None:
        if places:
            self.curves.append((kind, "L".join(f"{x:.1f} {y:.1f}" for x, y in places)))

    def label(self, x: float, y: float, text: str, anchor: str, kind: str = "") -> None:
        self.labels.append((x, y, text, anchor, kind))


def drawing(history: History, width: int = 960, *, is_page: bool = False) -> str:
    """Return the curves: for a page that has STYLE, or as a file with a background, which is legible on any page."""
    last = max(history.total_steps or 0, history.last_step, *(step.step for step in history.lost), 1)
    across = _Scale(0, last, _LEFT, width - _RIGHT)
    panels = _panels(history, across)
    ticks = [(across(tick), f"{tick:,.0f}") for tick in across.ticks(int(across.end - across.start) // 100)]
    # The steps that were computed again after each restart are a band below the curves.
    again = [(before, across(run.resumed)) for before, run in pairwise(history.runs)]
    bands = [(x, across(run.reached) - x, run.repeated) for run, x in again if across(run.reached) > x]
    found = marks(history)
    for mark in [mark for mark in found if mark.kind == "notFinite"][-1:]:
        at_end = across(mark.step) + 90 > across.end
        x = across(mark.step) + (-9 if at_end else 9)
        panels[0].label(x, panels[0].bottom - 4, f"{mark.label} at step {mark.step:,}", "end" if at_end else "start")
    kinds = {mark.kind for mark in found}
    return TEMPLATES.get_template("curves.svg.j2").render(
        standalone=not is_page, data=history.data, style=STYLE, width=width, height=panels[-1].bottom + _BOTTOM,
        left=across.start, right=across.end, panels=panels, bands=bands, flags=_flags(found, across),
        restarts=[(across(mark.step), mark) for mark in found if mark.kind in ("restart", "inPlace")],
        failures=[(across(mark.step), mark) for mark in found if mark.kind in ("failure", "notFinite")],
        saves=_saves(found, across), names={run.number: name_of(run) for run in history.runs},
        symbols=" · ".join(text for kind, text in _SYMBOLS.items() if kind in kinds) if width > 600 else "",
        steps=[(x, label, "end" if x > across.end - 20 else "middle") for x, label in ticks],
        hits=_hits(history, across) if is_page and width > 600 else [],
    )  # fmt: skip


def _panels(history: History, across: _Scale) -> list[_Panel]:
    """Return the diagrams that have something to show; without any, that of the loss."""
    found: list[tuple[int, Callable[[History, _Scale, float, float], _Panel]]] = [(200, _loss)]
    if history.evaluations:
        found.append((110, _accuracy))
    if history.throughput.runs:
        found.append((90, _speed))
    panels, top = [], float(_TOP)
    for height, make in found:
        panels.append(make(history, across, top, top + height))
        top += height + _GAP
    return panels


def _flags(found: Sequence[Mark], across: _Scale) -> list[tuple[float, float, float, str, Mark]]:
    """Return (x, y below the top, width, label, mark) of the restarts.

    A flag that would overlap another is in a row below; of many restarts it is left out.
    """
    restarts = [mark for mark in found if mark.kind in ("restart", "inPlace")]
    flags, ends = [], [-math.inf] * (len(restarts) if len(restarts) <= 3 else 1)
    for number, mark in enumerate(restarts, 1):
        label = mark.label if len(restarts) <= 3 else f"{number}"
        x, size = across(mark.step), 7.2 * len(label) + 12
        x = x - size if x + size > across.end else x
        row = next((row for row, end in enumerate(ends) if x > end), None)
        if row is not None:
            flags.append((x, 20.0 * row, size, label, mark))
            ends[row] = x + size + 2
    return flags


def _saves(found: Sequence[Mark], across: _Scale) -> list[tuple[float, Mark]]:
    """Return (x, mark) of the saves; of those that would overlap the first."""
    shown, free = [], -math.inf
    for mark in sorted((mark for mark in found if mark.kind == "save"), key=lambda mark: mark.step):
        if (x := across(mark.step)) >= free:
            shown.append((x, mark))
            free = x + _APART
    return shown


def _panel(name: str, across: _Scale, down: _Scale, *, show: Callable[[float], str], ticks: int) -> _Panel:
    return _Panel(name, across, down, [(down(tick), show(tick)) for tick in down.ticks(ticks)])


def _loss(history: History, across: _Scale, top: float, bottom: float) -> _Panel:
    taken = history.finite
    tested = [(row.step, row.loss) for row in history.evaluations if row.loss is not None]
    repeated: dict[int, list[tuple[int, float]]] = {}
    for step in history.lost:
        if step.loss is not None and math.isfinite(step.loss):
            repeated.setdefault(step.run, []).append((step.step, step.loss))
    values = [loss for _, loss in (*taken, *tested, *chain(*repeated.values()))]
    is_log = bool(values) and min(values) > 0
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = 0.06 * (high - low or 1.0)
    low, high = (low / 1.12, high * 1.12) if is_log else (low - margin, high + margin)
    name = "loss (logarithmic)" if is_log else "loss"
    panel = _panel(name, across, _Scale(low, high, bottom, top, is_log), show=lambda value: f"{value:.3g}", ticks=6)
    panel.curve("raw loss", panel.places(_extremes(taken, across)))
    size = -(-len(taken) // _SMOOTHED) or 1
    reach = max(1, len(taken) // size // _SMOOTHING)
    for of_run in repeated.values():
        panel.curve("lost", panel.places(_extremes(_smooth(_means(of_run, size), reach), across)))
    panel.curve("line loss", panel.places(_extremes(_smooth(_means(taken, size), reach), across)))
    places = panel.places(tested)
    panel.dots += [("loss", x, y) for x, y in places]
    if tested and len(tested) <= 40:
        x, y = places[-1]
        dx, dy, anchor = (-8, -7, "end") if x + 90 > across.end else (9, 4, "start")
        panel.label(x + dx, y + dy, f"test {tested[-1][1]:.4f}", anchor, "value loss")
    if across.end - across.start > 600:
        panel.label(across.end, top - 9, "line: training, smoothed" + " · dots: test set" * bool(tested), "end")
    return panel


def _accuracy(history: History, across: _Scale, top: float, bottom: float) -> _Panel:
    found = [(row.step, row.accuracy) for row in history.evaluations]
    low, high = min(a for _, a in found), max(a for _, a in found)
    margin = max(0.35 * (high - low), 0.002)
    down = _Scale(max(0.0, low - margin), min(1.0, high + margin), bottom, top)
    panel = _panel("accuracy on the test set", across, down, show=lambda value: f"{100 * value:.4g}%", ticks=3)
    places = panel.places(found)
    panel.curve("line accuracy", panel.places(_extremes(found, across)))
    if len(places) <= 40:
        panel.dots += [("accuracy", x, y) for x, y in places]
    labelled = places if len(places) <= 8 else places[-1:]
    for (x, y), (_, accuracy) in zip(labelled, found[-len(labelled) :], strict=True):
        dx, anchor = (-8, "end") if x > across.end - 30 else (0, "middle")
        panel.label(x + dx, y - 9, f"{accuracy:.2%}", anchor, "value")
    return panel


def _speed(history: History, across: _Scale, top: float, bottom: float) -> _Panel:
    throughput = history.throughput
    most = max(value for run in throughput.runs for _, value in run)
    down = _Scale(0, most * 1.1 or 1.0, bottom, top)
    show = lambda value: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"  # noqa: E731
    panel = _panel(f"{throughput.unit} per second", across, down, show=show, ticks=4)
    for run in throughput.runs:  # a new run starts its average again
        panel.curve("line speed", panel.places(_extremes(run, across)))
    return panel


def _hits(history: History, across: _Scale) -> list[tuple[float, float, float, str]]:
    """Return (x, from, to, numbers) of columns; the one under the pointer shows its numbers, without a script."""
    count = min(_HITS, len(history.steps))
    shown = [history.steps[round(n * (len(history.steps) - 1) / max(1, count - 1))] for n in range(count)]
    middles = [across(step.step) for step in shown]
    edges = [across.start, *((a + b) / 2 for a, b in pairwise(middles)), across.end]
    hits = []
    for step, x, (left, right) in zip(shown, middles, pairwise(edges), strict=False):
        loss = f"loss {loss_text(step.loss)}" if step.loss is not None else ""
        numbers = f"step {step.step:,}", loss, f"{step.speed:,.0f} samples/s" if step.speed is not None else ""
        hits.append((x, left, max(left, right), " · ".join(filter(None, numbers))))
    return hits


def _means(found: Sequence[tuple[int, float]], size: int) -> Sequence[tuple[int, float]]:
    """Return the mean of each ``size`` neighbouring values, at the step of the one in the middle."""
    if size == 1:
        return found
    groups = [found[at : at + size] for at in range(0, len(found), size)]
    return [(group[len(group) // 2][0], math.fsum(value for _, value in group) / len(group)) for group in groups]


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


def _extremes(found: Sequence[tuple[int, float]], across: _Scale) -> Sequence[tuple[int, float]]:
    """Return at most two points per pixel column, its highest and its lowest, so that a long curve keeps its noise."""
    columns: dict[int, list[tuple[int, float]]] = {}
    pixels = (across.end - across.start) / (across.high - across.low)
    for point in found:
        columns.setdefault(int(across.start + point[0] * pixels), []).append(point)
    thinned: list[tuple[int, float]] = []
    for column in columns.values():
        value = itemgetter(1)
        thinned += sorted({min(column, key=value), max(column, key=value)})
    return thinned
