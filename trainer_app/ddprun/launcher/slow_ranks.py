"""Which rank makes the others wait in each step, and in what part of the step: decided from the sums of all ranks.

All ranks exchange gradients in the same iterations, so between two of them the slowest rank waits least. How much less
than the others it waits is what it costs them. A rank counts as slow if that is a tenth of a step, more than chance
explains, and the same rank and the same part in most of the last windows, which overlap: on a machine with load, any
rank is last now and then. Of a node most of whose ranks are late, its first rank is named.

A thread that waits for a core is late for that alone, so this time is left out before the ranks are compared. It is a
part of its own: "throttled" if the CPU limit of the container explains it, else "queue", which takes more windows to
prove, because other programs of the node come and go.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median

from ddprun.step_parts import StepSums

PARTS = {
    "data": "which waits longer for data",
    "forward": "whose forward pass takes longer",
    "backward": "whose loss or backward pass takes longer",
    "communication": "whose communication hook takes longer",
    "optimizer": "whose optimizer takes longer",
    "collection": "which collects garbage longer",
    "throttled": "which the CPU limit of its container stops",
    "queue": "which waits for a core that other programs use",
    "script": "which does more between the parts of a step",
}
"""The parts of a step, and what is said of a rank that is late in one."""
_NOT_RUN = ("throttled", "queue")
_WITHIN = ("collection", *_NOT_RUN)  # other parts
_LEAST_SHARE = 0.1  # of a step, that the others wait for a slow rank
_LEAST_SECONDS = 0.0005  # of a step
_ERRORS = 4.0  # standard errors above chance
_CONTRADICTED = 2.0  # standard errors by which others wait less than a rank that a CPU limit stops
_SPAN = 4  # records from the beginning to the end of a window; each record ends one
_WINDOWS, _AGREEING = 5, 4
_WINDOWS_QUEUE, _AGREEING_QUEUE = 15, 13
_OVER = 4  # windows without it that end a verdict
_KEPT = 12  # records of a rank
_FEW = 16  # ranks up to which each is compared with the others alone; else with all
_SILENT = 60.0  # seconds without a new window that end a verdict: the ranks do something else


@dataclass(frozen=True, slots=True)
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

    step, exchange, buffers = per("time", iterations), per("wait", samples), per("buffers", iterations)
    variance = max(0.0, per("wait_squares", samples) - exchange * exchange) * samples / (samples - 1)
    hook, wait = per("hook", iterations), exchange + buffers
    parts = {
        "data": per("data", iterations),
        "forward": max(0.0, per("forward", samples) - buffers),
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
        throttled: of each step, in which the CPU limit stops the container of the rank, or threads of it.
    """

    rank: int
    part: str
    seconds: float
    step: float
    throttled: float = 0.0

    @property
    def throttled_share(self) -> float | None:
        """Seconds of each second, of all CPUs, for which the limit stops the rank; None unless it is slow for that."""
        return self.throttled / self.step if self.part == "throttled" and self.step > 0 else None

    def message(self, node: int) -> str:
        """Return the verdict as text. node: of the rank."""
        times = f"{1000 * self.seconds:.1f} ms of each step of {1000 * self.step:.1f} ms"
        share = "" if self.throttled_share is None else f" for {self.throttled_share:.2f} s of each second"
        return f"slow: the other ranks wait {times} for rank {self.rank} (node {node}), {PARTS[self.part]}{share}"


def suspect(windows: Mapping[int, Window], nproc: int = 1) -> SlowRank | None:
    """Return the rank that is late in one window, and in which part; None if no rank is.

    Args:
        nproc: ranks of a node.
    """
    if len(windows) < 2:
        return None
    every = [*windows.values()]
    step, error = median(each.step for each in every), median(each.error for each in every)
    limit = max(_LEAST_SHARE * step, _LEAST_SECONDS)

    @cache
    def usual(left_out: int, part: str) -> float:
        """Return the median of a part, or of the wait, without one rank."""
        compared = (each for number, each in windows.items() if number != left_out)
        return median(each.parts[part] if part else each.wait for each in compared)

    def lateness(rank: int) -> tuple[bool, float]:
        """Return whether the wait of the others proves that a rank is late, and by how much; 0 if it is not late.

        A CPU limit stops a rank in few of its iterations, and few of those are measured, so the wait proves little; and
        it may stop the thread that exchanges gradients, for which all ranks wait alike. But the time of the stops is
        counted: it is enough if the thread that trains is stopped, too, and the waits do not contradict it.
        """
        own, left_out = windows[rank], rank if len(every) <= _FEW else -1
        late, chance = usual(left_out, "") - own.wait, math.hypot(own.error, error)
        if late > max(limit, _ERRORS * chance):
            return True, late
        stopped, queued = (own.parts[part] - usual(left_out, part) for part in _NOT_RUN)
        is_stopped = stopped > limit and queued > limit / 2 and late > -_CONTRADICTED * chance
        return False, stopped if is_stopped else 0.0

    late = {rank: found for rank in windows if (found := lateness(rank))[1] > 0}
    if not late:
        return None
    rank = max(late, key=lambda each: late[each])
    node = [each for each in windows if each // nproc == rank // nproc]
    is_node = 1 < len(node) < len(windows) and 2 * len(late.keys() & {*node}) > len(node)
    left_out = {*node} if is_node else {rank}
    others = [each for number, each in windows.items() if number not in left_out]
    (is_proven, longest), rank = late[rank], min(left_out)
    part, seconds = _part(windows[rank], others, longest) if is_proven else ("throttled", longest)
    return SlowRank(rank, part, seconds, step, windows[rank].parts["throttled"]) if seconds > limit else None


def _part(own: Window, others: Sequence[Window], late: float) -> tuple[str, float]:
    """Return the part in which a late rank takes longest, compared with the others, and for how long it is late so."""
    more = {part: max(0.0, own.parts[part] - median(each.parts[part] for each in others)) for part in PARTS}
    queued = more["queue"]
    if queued >= late / 2:
        return ("throttled" if more["throttled"] >= queued / 2 else "queue"), min(late, queued)
    most = max((part for part in PARTS if part not in _WITHIN), key=lambda part: more[part])
    if more[most] <= 0:
        most = "script"
    elif more["collection"] >= more[most] / 2:  # within another part
        most = "collection"
    return most, late - queued


@dataclass
class SlowRanks:
    """The records of all ranks, and the verdict that follows from them.

    Attributes:
        windows: the newest of each rank.
    """

    nproc: int = 1
    windows: dict[int, Window] = field(default_factory=dict)
    verdict: SlowRank | None = None
    _records: dict[int, dict[int, StepSums]] = field(default_factory=dict)
    _last: int = 0  # the iteration at the end of the last window
    _judged: float = 0.0  # when the last window was judged
    _has_new: bool = False
    _suspects: deque[SlowRank | None] = field(default_factory=lambda: deque(maxlen=_WINDOWS_QUEUE))

    def take(self, rank: int, records: Iterable[StepSums]) -> None:
        """Add new records of a rank, in the order of their times. An iteration that is not later begins a training."""
        for sums in records:
            known = self._records.setdefault(rank, {})
            newest = max(known, default=0)
            if known and sums.iteration <= newest and sums.time > known[newest].time:
                self._begin()
                known = self._records.setdefault(rank, {})
            known[sums.iteration] = sums
            for iteration in sorted(known)[:-_KEPT]:
                del known[iteration]
            self._has_new = True

    def leave(self, ranks: Iterable[int]) -> None:
        """Forget ranks that are not connected any more."""
        for rank in ranks:
            self._records.pop(rank, None)
            self.windows.pop(rank, None)

    def turn(self, now: float) -> None:
        """Judge the windows that have become complete. now: monotonic seconds."""
        if self._has_new:
            self._has_new = False
            for begin, end in self._complete():
                self._judged = now
                self._judge(begin, end)
        if self.windows and now - self._judged > _SILENT:
            self.verdict, self.windows = None, {}
            self._suspects.clear()

    def _begin(self) -> None:
        """Forget an earlier training of the same processes."""
        self._records, self._last, self.verdict, self.windows = {}, 0, None, {}
        self._suspects.clear()

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
        late = suspect(self.windows, self.nproc)
        self._suspects.append(late)
        known = self.verdict
        if late is not None and self._is_proven(late):
            if known is None or (known.rank, known.part) != (late.rank, late.part):
                self.verdict = self._proven(late)
        elif known is not None and not self._agreeing(known, _OVER):
            self.verdict = None

    def _agreeing(self, verdict: SlowRank, windows: int) -> list[SlowRank]:
        last = list(self._suspects)[-windows:]
        return [each for each in last if each and (each.rank, each.part) == (verdict.rank, verdict.part)]

    def _is_proven(self, late: SlowRank) -> bool:
        takes_longer = late.part == "queue"
        windows, agreeing = (_WINDOWS_QUEUE, _AGREEING_QUEUE) if takes_longer else (_WINDOWS, _AGREEING)
        return len(self._agreeing(late, windows)) >= agreeing

    def _proven(self, late: SlowRank) -> SlowRank:
        """Return the verdict, which stays as it is while the rank is slow: nothing is written for small changes."""
        agreeing = self._agreeing(late, _WINDOWS_QUEUE)
        times = (median(getattr(each, name) for each in agreeing) for name in ("seconds", "step", "throttled"))
        return SlowRank(late.rank, late.part, *times)
