"""Pure: traces of ``torch.profiler`` of several ranks as one Chrome trace on one clock, and who waits for whom.

Ranks of one node share a clock. The clocks of two nodes are aligned by collectives whose result needs every rank, such
as all_reduce (MPI standard, 6.1: all-to-all): no rank leaves before the last has entered, and then all leave within the
time of a message. So the median difference of the ends is the difference of the clocks. A rank waits in such a
collective from its own begin until the last rank begins.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format); times are
microseconds.
"""

import heapq
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json

_COLLECTIVE = re.compile(r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier)", re.IGNORECASE)
_BACKENDS = ("gloo:", "ucc:", "mpi:", "xccl:", "hccl:")  # nccl: says only when the work was given to the GPU
_KERNEL = "nccl"
_STEP = "ProfilerStep#"
_LOADER = "enumerate(DataLoader)"
_GROUP = ("Process Group Name", "Process Group Ranks")  # arguments of NCCL's kernels; gloo's work has none
_LATEST = 1e18  # microseconds
_MOST_WAITS = 10

Key = tuple[int, str, str, int]
"""A collective on the ranks of a process group: step, group, name, number among those of this name in the step.

The group is empty if the trace does not say it: all such collectives are of all ranks, if no rank has ``left_out``.
"""
Spans = dict[Key, tuple[float, float]]
"""Begin and end of the collectives of a rank."""


@dataclass
class RankTrace:
    """The trace of one rank.

    Args:
        base: what its times count from, in microseconds since 1970.
        first: the number of the first profiled step.

    Attributes:
        steps: (begin, end) of each profiled step. collectives: (begin, end). Times on the clock of the rank's node.
        data: microseconds that it waited for a DataLoader.
        left_out: collectives of groups that are not known are left out.
    """

    rank: int
    node: int
    base: float
    events: list[Json]
    steps: list[tuple[float, float]] = field(default_factory=list)
    collectives: Spans = field(default_factory=dict)
    data: float = 0.0
    left_out: bool = False

    @classmethod
    def of(cls, rank: int, node: int, first: int, content: Json) -> "RankTrace":
        """Return the trace that PyTorch has written. It raises many errors if it is another."""
        base = float(content.get("baseTimeNanoseconds", 0)) / 1000
        if not _is_number(base):
            raise ValueError("its clock has no time")
        events = [event for event in content["traceEvents"] if isinstance(event, dict)]
        timed = [event for event in events if event.get("ph") == "X" and _is_timed(event)]
        made, is_of_all = cls(rank, node, base, events), not has_subgroups(content)
        names = [(str(event["name"]), _span(event, base)) for event in timed]
        made.steps = sorted(span for name, span in names if name.startswith(_STEP))
        made.data = sum(end - begin for name, (begin, end) in names if name.startswith(_LOADER))
        launched = {_argument(event, "correlation"): event["ts"] + base for event in timed if _is_launch(event)}
        numbers: Counter[tuple[int, str, str]] = Counter()
        begins = [begin for begin, _ in made.steps]
        for event in sorted(filter(_is_collective, timed), key=lambda event: float(event["ts"])):
            span = _span(event, base)
            step = first + bisect_right(begins, launched.get(_argument(event, "correlation"), span[0])) - 1
            group = " ".join(str(_argument(event, name) or "") for name in _GROUP).strip()
            if not group and not is_of_all:
                made.left_out = True
                continue
            kind = (step, group, event["name"])
            numbers[kind] += 1
            made.collectives[(*kind, numbers[kind])] = span
        return made

    def shown(self, base: float, offset: float) -> Iterator[Json]:
        """Yield the events as those of a process with the number of the rank.

        Args:
            base: what the times count from, of all ranks.
            offset: microseconds to add to the clock of the node.
        """
        label = {"name": f"rank {self.rank} (node {self.node})"}
        yield {"ph": "M", "name": "process_name", "pid": self.rank, "tid": 0, "ts": 0, "args": label}
        yield {"ph": "M", "name": "process_sort_index", "pid": self.rank, "tid": 0, "args": {"sort_index": self.rank}}
        for event in self.events:
            name = str(event.get("name", ""))
            if not isinstance(event.get("pid"), int) or name.startswith("process_") or not _has_time(event):
                continue  # what PyTorch says of the profile itself
            moved = event | {"pid": self.rank, "ts": float(event["ts"]) + self.base - base + offset}
            yield moved | ({"id": f"{self.rank}.{event['id']}"} if "id" in event else {})


def has_subgroups(content: Json) -> bool:
    """Return whether the rank of a trace is in process groups of different ranks; those of itself alone are none."""
    info = content.get("distributedInfo")
    configured = info.get("pg_config") if isinstance(info, dict) else None
    configs = [each for each in configured if isinstance(each, dict)] if isinstance(configured, list) else []
    ranks = (each.get("ranks") for each in configs)
    return len({str(sorted(each)) for each in ranks if isinstance(each, list) and len(each) != 1}) > 1


def _is_timed(event: Json) -> bool:
    duration = event.get("dur")
    return _has_time(event) and _is_number(duration) and "name" in event


def _has_time(event: Json) -> bool:
    return _is_number(event.get("ts"))


def _is_number(value: object) -> bool:
    """Whether it is one with which floats can count."""
    return isinstance(value, int | float) and abs(value) < _LATEST


def _span(event: Json, base: float) -> tuple[float, float]:
    return event["ts"] + base, event["ts"] + base + event["dur"]


def _argument(event: Json, name: str) -> object:
    found = event.get("args")
    return str(found[name]) if isinstance(found, dict) and name in found else None


def _is_launch(event: Json) -> bool:
    return event.get("cat") == "cuda_runtime" and _argument(event, "correlation") is not None


def _is_collective(event: Json) -> bool:
    name = str(event["name"])
    is_kernel = event.get("cat") == "kernel" and name.startswith(_KERNEL)
    is_work = event.get("cat") == "user_annotation" and name.startswith(_BACKENDS)
    return (is_kernel or is_work) and bool(_COLLECTIVE.search(name))


def clock_offset(
    reference: Mapping[Key, tuple[float, float]], other: Mapping[Key, tuple[float, float]]
) -> float | None:
    """Return what to add to times of ``other``, in microseconds; None if both have no collective in common."""
    common = reference.keys() & other.keys()
    return median(reference[key][1] - other[key][1] for key in common) if common else None


class Wait(WireModel):
    """A wait of a rank for another one."""

    rank: int
    """The rank that waits."""
    seconds: float
    """From its begin of the collective until the other has begun it."""
    collective: str
    """Name of the collective in the trace."""
    step: int
    """Number of the step."""
    for_rank: int
    """The rank that was the last to begin it."""


def waits(ranks: Mapping[int, Spans]) -> tuple[list[Wait], dict[int, float], dict[int, Counter[int]]]:
    """Return the longest waits, the longest first; of each rank, for how many seconds it waits, and for which ranks.

    Args:
        ranks: the collectives of each rank, on one clock.
    """
    begun: dict[Key, dict[int, tuple[float, float]]] = defaultdict(dict)
    for rank, collectives in ranks.items():
        for key, span in collectives.items():
            begun[key][rank] = span
    longest: list[tuple[float, int, int, Key]] = []
    times = {rank: list[tuple[float, float]]() for rank in ranks}
    blamed = {rank: Counter[int]() for rank in ranks}
    for key, spans in begun.items():
        last = max(spans, key=lambda rank: spans[rank][0])
        for rank, (begin, end) in spans.items():
            until = min(spans[last][0], end)
            if until > begin:
                times[rank].append((begin, until))
                blamed[rank][last] += until - begin  # type: ignore[assignment]  # a Counter counts floats, too
                heapq.heappush(longest, (until - begin, rank, last, key))
                if len(longest) > _MOST_WAITS:
                    heapq.heappop(longest)
    found = [
        Wait(rank=rank, seconds=length / 1e6, collective=name, step=step, for_rank=last)
        for length, rank, last, (step, _, name, _) in sorted(longest, reverse=True)
    ]
    return found, {rank: _covered(spans) / 1e6 for rank, spans in times.items()}, blamed


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of what at least one of the spans covers."""
    total, end = 0.0, -math.inf
    for begin, until in sorted(spans):
        total += max(0.0, until - max(end, begin))
        end = max(end, until)
    return total
