"""Which rank makes the others wait in each step, and in what part of the step: decided from the sums of all ranks.

All ranks exchange gradients in the same iterations, so between two of them the slowest rank waits least. How much less
than the others it waits is what it costs them. A rank counts as slow if that is a tenth of a step, more than chance
explains, and the same rank and the same part in most of the last windows, which overlap: on a machine with load, any
rank is last now and then.

A thread that waits for a core is late for that alone, so this time is left out before the ranks are compared. It is a
part of its own: "throttled" if the CPU limit of the container explains it, else "queue", which takes more windows to
prove, because other programs of the node come and go.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ddprun.step_parts import StepSums

_NOT_RUN = ("throttled", "queue")
PARTS = {
    "data": "which waits longer for data",
    "forward": "whose forward pass takes longer",
    "backward": "whose backward pass takes longer",
    "communication": "whose communication hook takes longer",
    "optimizer": "whose optimizer takes longer",
    "collection": "which collects garbage longer",
    "throttled": "which the CPU limit of its container stops",
    "queue": "which waits for a core that other programs use",
    "script": "which does more between the parts of a step",
}
"""The parts of a step, and what is said of a rank that is late in one."""
_LEAST_SHARE = 0.1  # of a step, that the others wait for a slow rank
_LEAST_SECONDS = 0.0005  # of a step
_ERRORS = 4.0  # standard errors above chance
_SPAN = 4  # records from the beginning to the end of a window; each record ends one
_WINDOWS, _AGREEING = 5, 4
_WINDOWS_QUEUE, _AGREEING_QUEUE = 15, 13
_OVER = 4  # windows without it that end a verdict
_KEPT = 32  # records of a rank


@dataclass(frozen=True)
class Window:
    """One rank between two iterations; seconds per iteration.

    Attributes:
        own: of its own work. wait: for the others. error: standard error of ``wait``.
        parts: by their names, of its own work; ``collection``, ``throttled`` and ``queue`` are also in the others.
    """

    step: float
    wait: float
    error: float
    parts: dict[str, float]


def window(before: StepSums, after: StepSums) -> Window | None:
    """Return what a rank did between two records; None if nothing was measured."""
    iterations, samples = after.iteration - before.iteration, after.samples - before.samples
    if iterations <= 0 or samples < 2:
        return None

    def per(name: str, count: float) -> float:
        grown: float = getattr(after, name) - getattr(before, name)
        return max(0.0, grown / count)

    step, wait = per("time", iterations), per("wait", samples)
    variance = max(0.0, per("wait_squares", samples) - wait * wait) * samples / (samples - 1)
    hook = per("hook", iterations)
    parts = {
        "data": per("data", iterations),
        "forward": per("forward", samples),
        "backward": max(0.0, per("backward", samples) - hook),
        "communication": hook,
        "optimizer": per("optimizer", iterations),
    }
    parts["script"] = max(0.0, step - wait - sum(parts.values()))
    parts |= {name: per(name, iterations) for name in ("collection", "throttled")}
    parts["queue"] = per("queued", iterations)
    return Window(step, wait, math.sqrt(variance / samples), parts)


@dataclass(frozen=True)
class SlowRank:
    """A verdict.

    Attributes:
        seconds: of each step, that the others wait for the rank. step: a step takes so many seconds.
        since: of CLOCK_MONOTONIC on the node of the rank.
    """

    rank: int
    part: str
    seconds: float
    step: float
    since: float

    @property
    def share(self) -> float:
        """The part of a step that the others wait."""
        return self.seconds / self.step if self.step else 0.0

    def message(self, node: int) -> str:
        """Return the verdict as text. node: of the rank."""
        times = f"{1000 * self.seconds:.1f} ms of each step of {1000 * self.step:.1f} ms"
        return f"slow: the other ranks wait {times} for rank {self.rank} (node {node}), {PARTS[self.part]}"


def suspect(windows: Mapping[int, Window]) -> tuple[int, str, float, float] | None:
    """Return the rank that is late in one window, in which part, and the seconds of each step and of the lateness.

    None if no rank is.
    """
    if len(windows) < 2:
        return None
    step = median(each.step for each in windows.values())
    found = []
    for rank, each in windows.items():
        others = [other for number, other in windows.items() if number != rank]
        late = median(other.wait for other in others) - each.wait
        throttled, queued = (_more(name, each, others) for name in _NOT_RUN)
        why = "throttled" if throttled >= queued / 2 else "queue"
        error = math.hypot(each.error, median(other.error for other in others))
        for part, seconds in ((_part(each, others), late - queued), (why, min(late, queued))):
            if seconds > max(_LEAST_SHARE * step, _LEAST_SECONDS, _ERRORS * error):
                found.append((seconds, rank, part))
    if not found:
        return None
    seconds, rank, part = max(found)
    return rank, part, seconds, step


def _more(part: str, own: Window, others: Sequence[Window]) -> float:
    return max(0.0, own.parts[part] - median(other.parts[part] for other in others))


def _part(own: Window, others: Sequence[Window]) -> str:
    """Return the part in which a rank takes longest, compared with the others."""
    more = {part: _more(part, own, others) for part in PARTS if part not in _NOT_RUN}
    most = max(more, key=lambda part: more[part])
    # A collection of garbage happens within another part.
    return "collection" if more["collection"] >= more[most] / 2 else most


@dataclass
class SlowRanks:
    """The records of all ranks, and the verdict that follows from them."""

    _records: dict[int, dict[int, StepSums]] = field(default_factory=dict)
    _last: int = 0  # the iteration at the end of the last window
    _suspects: deque[tuple[int, str] | None] = field(default_factory=lambda: deque(maxlen=_WINDOWS_QUEUE))
    _measured: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=_WINDOWS_QUEUE))
    windows: dict[int, Window] = field(default_factory=dict)
    """The newest of each rank."""
    verdict: SlowRank | None = None

    def take(self, rank: int, records: Iterable[StepSums]) -> None:
        """Add new records of a rank. An earlier iteration in a later record begins another training."""
        known = self._records.setdefault(rank, {})
        for sums in records:
            if known and sums.iteration < max(known) and sums.time > max(each.time for each in known.values()):
                self._records, self._last = {rank: {}}, 0
                known = self._records[rank]
            known[sums.iteration] = sums
        for iteration in sorted(known)[:-_KEPT]:
            del known[iteration]

    def turn(self) -> bool:
        """Judge the windows that have become complete; return whether the verdict has changed."""
        before = self.verdict
        for begin, end in self._complete():
            self._judge(begin, end)
        return self.verdict != before

    def _complete(self) -> Iterator[tuple[int, int]]:
        """Yield the beginnings and ends of the windows that all ranks have recorded since the last call."""
        if len(self._records) < 2:
            return
        common = sorted(set.intersection(*(set(records) for records in self._records.values())))
        for place, end in enumerate(common):
            if end > self._last and place >= _SPAN:
                self._last = end
                yield common[place - _SPAN], end

    def _judge(self, begin: int, end: int) -> None:
        found = {rank: window(records[begin], records[end]) for rank, records in self._records.items()}
        self.windows = {rank: each for rank, each in found.items() if each is not None}
        late = suspect(self.windows)
        self._suspects.append(late[:2] if late else None)
        since = min((records[begin].time for records in self._records.values()), default=0.0)
        self._measured.append((late[2], late[3], since) if late else (0.0, 0.0, since))
        if late and self._is_proven(*late[:2]):
            self.verdict = self._verdict(*late[:2])
        elif self.verdict and (self.verdict.rank, self.verdict.part) not in list(self._suspects)[-_OVER:]:
            self.verdict = None

    def _is_proven(self, rank: int, part: str) -> bool:
        windows, agreeing = (_WINDOWS_QUEUE, _AGREEING_QUEUE) if part == "queue" else (_WINDOWS, _AGREEING)
        return list(self._suspects)[-windows:].count((rank, part)) >= agreeing

    def _verdict(self, rank: int, part: str) -> SlowRank:
        agreeing = [
            measured for late, measured in zip(self._suspects, self._measured, strict=True) if late == (rank, part)
        ]
        same = self.verdict is not None and (self.verdict.rank, self.verdict.part) == (rank, part)
        since = self.verdict.since if self.verdict and same else agreeing[0][2]
        return SlowRank(rank, part, median(each[0] for each in agreeing), median(each[1] for each in agreeing), since)
