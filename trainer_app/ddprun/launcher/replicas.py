"""Whether all ranks have the same parameters: decided from the digests of all ranks at the same count of steps.

A difference counts when a later comparison shows it again. The verdict names the first step that showed it, the tensor,
the rank that differs from most others, and the mistake that explains it.

Some buffers, such as those of a BatchNorm, differ between ranks by design. A buffer counts only if all ranks once had
the same value, one of them still has it, and the value of another has changed once and not again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

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
    "another state of the optimizer, or drawn other random numbers in a step",
    "memory": "nothing else differs: a bit of this rank's memory has changed, or its code writes to this tensor",
}
"""Likely mistakes, and what is said of a tensor that differs between the ranks."""
_KEPT = 64  # records of a rank that wait for those of other ranks
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

    cause: empty if nothing but the tensors differs.
    """

    step: int
    agreed: int | None
    values: dict[int, int]
    cause: str


@dataclass
class Replicas:
    """The records of all ranks that are not compared yet, and the verdict that follows from them.

    Attributes:
        agreed: at this step, or later, each tensor was found equal, and none differs; None before all were compared.
    """

    world_size: int
    verdict: Diverged | None = None
    agreed: int | None = None
    _records: dict[int, dict[tuple[int, int], Digests]] = field(default_factory=dict)
    # By optimizer and layout: the last step of each group.
    _compared: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    _agreed: dict[_Tensor, tuple[int, int]] = field(default_factory=dict)  # the last step, and the value
    _differ: dict[_Tensor, _Difference] = field(default_factory=dict)

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
        for key in sorted(set.intersection(*(set(records) for records in self._records.values()))):
            self._compare({rank: records.pop(key) for rank, records in self._records.items()})

    def _compare(self, records: Mapping[int, Digests]) -> None:
        first = records[min(records)]
        if any((one.layout, one.group) != (first.layout, first.group) for one in records.values()):
            return  # the ranks train different models
        for tensor, values in _columns(first, records):
            if len(set(values.values())) == 1:
                self._agreed[tensor] = first.step, values[min(values)]
                self._differ.pop(tensor, None)
                if self.verdict is not None and self.verdict.tensor == tensor:
                    self.verdict = None
                continue
            before = self._differ.get(tensor)
            if first.is_buffer(tensor[-1]) and not self._counts(tensor, values, before):
                self._differ.pop(tensor, None)
                self._agreed.pop(tensor, None)
            elif before is None:
                agreed, _ = self._agreed.get(tensor, (None, 0))
                self._differ[tensor] = _Difference(first.step, agreed, values, _cause(tensor[-1], agreed, records))
            elif self.verdict is None:
                self.verdict = self._proven(tensor, before)
        self._compared.setdefault((first.optimizer, first.layout), {})[first.group] = first.step
        own = self._compared[first.optimizer, first.layout]
        if len(own) == first.groups and not self._differ:
            rounds = [steps.values() for steps in self._compared.values()]
            recent = [steps for steps in rounds if max(steps) >= min(own.values())]  # earlier models are not trained
            self.agreed = min(map(min, recent))

    def _counts(self, tensor: _Tensor, values: Mapping[int, int], before: _Difference | None) -> bool:
        """Return whether the difference of a buffer is none by design."""
        if before is not None:
            return values == before.values
        known = self._agreed.get(tensor)
        return known is not None and known[1] in values.values()

    def _proven(self, tensor: _Tensor, difference: _Difference) -> Diverged:
        """Return the verdict: of the tensors that differ, the one that did first."""
        first = min(self._differ, key=lambda each: self._differ[each].step)
        if self._differ[first].step < difference.step:
            tensor, difference = first, self._differ[first]
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
    if every[0].is_buffer(place):
        return "memory"
    if len({one.gradients for one in every}) > 1:
        return "noSync" if any(one.is_unsynchronized for one in every) else "gradients"
    if len({one.settings for one in every}) > 1:
        return "settings"
    return "seed" if agreed is None else ""
