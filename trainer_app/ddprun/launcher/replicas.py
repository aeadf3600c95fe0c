"""Whether all ranks have the same parameters: decided from the digests of all ranks at the same count of steps.

A difference counts when a later comparison shows it again. The verdict names the first step that showed it, the tensor,
the rank that differs from most others, and the mistake that explains it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ddprun.replica_audit import MOST, Digests

CAUSES = {
    "noSync": "the gradients differ, and the script uses no_sync: probably in the last backward pass of a step",
    "gradients": "the gradients differ: the script calls the module without DistributedDataParallel, or changes them "
    "on some ranks only",
    "settings": "the learning rate, or another setting of the optimizer, is not the same on all ranks",
    "outside": "it is not in a DistributedDataParallel module",
    "seed": "the ranks have set it to different values after DistributedDataParallel was made, by another seed or "
    "checkpoint on each of them",
    "optimizer": "most tensors differ, and neither gradients nor settings do: a rank has loaded other weights or "
    "another state of the optimizer, has drawn other random numbers in a step, or computes in another way, as another "
    "processor, GPU or release of PyTorch does",
    "memory": "nothing else differs: a bit of this rank's memory has changed, or its code writes to this tensor",
}
"""Likely mistakes, and what is said of a tensor that differs between the ranks."""
_KEPT = 64  # records of a rank that wait for those of other ranks
_SILENT = 300  # turns, of which one is made in a second, until an optimizer without comparisons is forgotten
_SHOWN = 4  # ranks of a message

_Tensor = tuple[int, int, int, int]  # optimizer, layout, group, place


@dataclass(frozen=True)
class Diverged:
    """A verdict.

    Attributes:
        step: of the training, the first that showed the difference. agreed: the last that showed none; None for none.
        ranks: those that differ from most others; empty if no value has a majority.
        tensor: optimizer, layout, group and place.
    """

    step: int
    agreed: int | None
    ranks: tuple[int, ...]
    tensor: _Tensor
    cause: str

    @property
    def suspect(self) -> int | None:
        """The rank whose machine may be the cause; None if a mistake in the script explains the difference."""
        return self.ranks[0] if len(self.ranks) == 1 and self.cause in ("memory", "optimizer") else None

    def message(self, name: str, nproc: int = 1) -> str:
        """Return the verdict as text. name: of the tensor. nproc: ranks of a node."""
        since = f"since step {self.step}" + ("" if self.agreed is None else f" (equal at step {self.agreed})")
        shown = ", ".join(f"rank {rank} (node {rank // nproc})" for rank in self.ranks[:_SHOWN])
        more = f" and {len(self.ranks) - _SHOWN} more" if len(self.ranks) > _SHOWN else ""
        what = f"{name} of {shown}{more} differs from most others" if shown else f"{name} differs between the ranks"
        return f"replicas diverged: {what} {since}; {CAUSES[self.cause]}"


@dataclass(frozen=True)
class _Difference:
    """The first comparison in which a tensor differed: its step and that of the last without, and by rank the values.

    cause: empty if nothing but the tensors differs. is_proven: a later comparison showed it again.
    """

    step: int
    agreed: int | None
    values: dict[int, int]
    cause: str
    is_proven: bool = False


@dataclass
class Replicas:
    """The records of all ranks that are not compared yet, and the verdict that follows from them.

    Attributes:
        agreed: at this step, or later, each tensor was found equal, and none differs; None before all were compared.
        agreed_time: when, by CLOCK_MONOTONIC of rank 0's machine.
    """

    world_size: int
    verdict: Diverged | None = None
    agreed: int | None = None
    agreed_time: float | None = None
    _records: dict[int, dict[tuple[int, int], Digests]] = field(default_factory=dict)
    # By optimizer and layout: the number of groups, and of each the last step that was compared, and its time.
    _compared: dict[tuple[int, int], tuple[int, dict[int, tuple[int, float]]]] = field(default_factory=dict)
    _agreed: dict[_Tensor, int] = field(default_factory=dict)  # the last step
    _differ: dict[_Tensor, _Difference] = field(default_factory=dict)
    _turns: int = 0
    _last: dict[int, int] = field(default_factory=dict)  # by optimizer, the turn of its last comparison

    def take(self, rank: int, records: Iterable[Digests]) -> None:
        """Add new records of a rank, in the order of their times."""
        known = self._records.setdefault(rank, {})
        for record in records:
            known[record.optimizer, record.count] = record
        for key in list(known)[:-_KEPT]:
            del known[key]

    def turn(self) -> None:
        """Compare what all ranks have recorded."""
        if self.world_size < 2 or len(self._records) < self.world_size:
            return
        self._turns += 1
        for key in sorted(set.intersection(*(set(records) for records in self._records.values()))):
            self._compare({rank: records.pop(key) for rank, records in self._records.items()})

    def _compare(self, records: Mapping[int, Digests]) -> None:
        first = records[min(records)]
        if any((one.layout, one.group) != (first.layout, first.group) for one in records.values()):
            return  # the ranks train different models
        self._forget_others(first)
        for tensor, values in _columns(first, records):
            agreed = self._agreed.get(tensor)
            if len(set(values.values())) == 1:
                self._agreed[tensor] = first.step
                self._differ.pop(tensor, None)
            elif first.is_outside(tensor[-1]) and agreed is None:
                continue  # a part of the model that the script divides among the ranks
            elif (before := self._differ.get(tensor)) is None:
                self._differ[tensor] = _Difference(first.step, agreed, values, _cause(tensor[-1], agreed, records))
            elif not before.is_proven:
                self._differ[tensor] = replace(before, is_proven=True)
        proven = [tensor for tensor, each in self._differ.items() if each.is_proven]
        if self.verdict is None or self.verdict.tensor not in proven:
            self.verdict = self._proven(min(proven, key=lambda each: self._differ[each].step)) if proven else None
        _, own = self._compared.setdefault((first.optimizer, first.layout), (first.groups, {}))
        own[first.group] = first.step, first.time
        rounds = self._compared.values()
        if not self._differ and all(len(steps) == groups for groups, steps in rounds):
            oldest = [each for _, groups in rounds for each in groups.values()]
            # A script may report steps that begin again in each epoch.
            self.agreed, self.agreed_time = map(min, zip(*oldest, strict=True))

    def _forget_others(self, first: Digests) -> None:
        """Forget tensors that are not compared any more: of another layout, or of an optimizer that steps no more."""
        now = self._turns
        self._last[first.optimizer] = now
        over = {
            (optimizer, layout)
            for optimizer, layout in self._compared
            if now - self._last[optimizer] > _SILENT or (optimizer == first.optimizer and layout != first.layout)
        }
        known: dict[Any, Any]
        for known in (self._compared, self._agreed, self._differ) if over else ():  # a large model has many tensors
            for key in [*known]:
                if key[:2] in over:
                    del known[key]

    def _proven(self, tensor: _Tensor) -> Diverged:
        difference = self._differ[tensor]
        [(value, count)] = Counter(difference.values.values()).most_common(1)
        has_majority = 2 * count > len(difference.values)
        ranks = tuple(sorted(rank for rank, each in difference.values.items() if each != value)) if has_majority else ()
        is_one_rank = len(ranks) == 1 or len(difference.values) == 2
        cause = difference.cause or ("memory" if is_one_rank else "seed")
        verdict = Diverged(difference.step, difference.agreed, ranks, tensor, cause)
        differing, every = len(self._differ), len(self._differ.keys() | self._agreed.keys())
        are_many = differing > 1 and 2 * differing >= every  # a flipped bit changes one tensor
        return replace(verdict, cause="optimizer") if are_many and not difference.cause else verdict


def _columns(first: Digests, records: Mapping[int, Digests]) -> Iterator[tuple[_Tensor, dict[int, int]]]:
    """Yield the tensors of a group, and by rank the values."""
    for place in range(MOST):
        values = {rank: record.values[place] for rank, record in records.items()}
        if any(values.values()):
            yield (first.optimizer, first.layout, first.group, place), values


def _cause(place: int, agreed: int | None, records: Mapping[int, Digests]) -> str:
    """Return the mistake that explains a difference; empty if only the values of tensors differ."""
    every = [*records.values()]
    if every[0].is_outside(place):
        return "outside"
    if len({one.gradients for one in every}) > 1:
        return "noSync" if any(one.is_unsynchronized for one in every) else "gradients"
    if len({one.settings for one in every}) > 1:
        return "settings"
    return "seed" if agreed is None else ""
