"""Digests of what all ranks of a DistributedDataParallel must have in common, in memory that the launcher reads.

Before a step of an optimizer the parameters are those after its last complete step, with all that the script did after
it. At counts of steps that are multiples of a power of two, a rank records a digest of each tensor of one group; the
group follows from the count alone, so ranks with different paces compare the same tensors at common counts. Their
number is odd, so every pace visits all groups.

A digest is computed where the tensor is, and on a GPU read at a later step: no step waits for it. FSDP, DTensor and
ranks that average models have no equal parameters, and abstain.
"""

import contextlib
import hashlib
import json
import math
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from time import monotonic, thread_time
from typing import Any

MOST = 8  # tensors of a group
_ELEMENTS = 2**20  # of a group; a larger tensor has several parts
_GRADIENTS = 2**16  # elements of a gradient
_KEPT = 32  # records; a launcher reads them once a second
_SHARE = 0.002  # of the time of the steps
_INTERVAL = 0.1  # seconds between records at least
_RANKS = 100  # from which on records are less frequent, for the launcher of node 0
_FIRST, _MOST_STEPS = 1, 2**16  # steps between records: of the first, which is before any change, and at most
_OPTIMIZERS = _KEPT // 2  # that train replicas: their records of one step are all read
_SETTINGS = 4  # param groups whose settings are compared
_NO_SYNC = 1  # of the flags; the bits of parameters outside of DistributedDataParallel follow
_OUTSIDE_AT, _GROUPS_AT = 8, 16


@dataclass(frozen=True, slots=True)
class Digests:
    """What one rank has recorded of one group of tensors.

    Attributes:
        optimizer: its number among those that train replicas. count: its steps in this process.
        time: of CLOCK_MONOTONIC. step: of the training, as the rank reports it.
        layout: digest of the names and shapes of all tensors. group: its number.
        settings: digest of learning rates and the like. gradients: of a part of the gradients; 0 for none.
        flags: see ``is_unsynchronized``, ``is_outside`` and ``groups``.
        values: of each tensor of the group, then zeros.
    """

    optimizer: int = 0
    count: int = 0
    time: float = 0.0
    step: int = 0
    layout: int = 0
    group: int = 0
    settings: int = 0
    gradients: int = 0
    flags: int = 0
    values: tuple[int, ...] = (0,) * MOST

    @classmethod
    def unpacked(cls, fields: Sequence[Any]) -> "Digests":
        return cls(*fields[:_NUMBERS], values=tuple(fields[_NUMBERS:_FIELDS]))  # type: ignore[misc]

    @property
    def is_unsynchronized(self) -> bool:
        """Whether the script has used ``no_sync`` since the last record."""
        return bool(self.flags & _NO_SYNC)

    def is_outside(self, place: int) -> bool:
        """Return whether the tensor is a parameter that is in no DistributedDataParallel."""
        return bool(self.flags >> _OUTSIDE_AT + place & 1)

    @property
    def groups(self) -> int:
        """The number of groups that have tensors, and a group more, never recorded, if a tensor has no digest."""
        return self.flags >> _GROUPS_AT

    def wire(self) -> list[object]:
        *numbers, values = astuple(self)
        return [*numbers, *values]

    @classmethod
    def checked(cls, record: Sequence[Any]) -> "Digests":
        """Return the record in a message. Raises ``ValueError`` or ``TypeError`` if it is none."""
        numbers = [*record[:2], *record[3:]]
        if (
            len(record) != _FIELDS
            or not all(type(each) is int and -(2**63) <= each < 2**63 for each in numbers)
            or type(record[2]) is not float
            or not record[1] > 0
        ):
            raise ValueError("no digests")
        return cls.unpacked(record)


_NUMBERS = 9
_FIELDS = _NUMBERS + MOST
_RECORD = struct.Struct(f"=dqqd6q{MOST}qd")  # the time at both ends: a reader takes only whole records
RING = _KEPT * _RECORD.size
_HEAD = struct.Struct("=II")  # length and checksum of the names
_NAMES = 2**18
SHORT = 512  # bytes from the end of the records, which have the reason of a rank that abstains
SIZE = RING + _NAMES


def read(memory: bytes) -> list[Digests]:
    """Return the records in the order of their times."""
    found = (_RECORD.unpack_from(memory, number * _RECORD.size) for number in range(_KEPT))
    return sorted(
        (Digests.unpacked(one[1:]) for one in found if one[0] > 0 and one[0] == one[-1]), key=lambda each: each.time
    )


def read_names(memory: bytes) -> dict[str, Any]:
    """Return the names of the tensors, by layout and group, and why a rank abstains ("abstains"); empty for nothing.

    memory: from the end of the records.
    """
    length, checksum = _HEAD.unpack_from(memory)
    text = memory[_HEAD.size : _HEAD.size + min(length, _NAMES)]
    found = json.loads(text) if length and zlib.crc32(text) == checksum else {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor, or a part of it."""

    name: str
    tensor: Any
    is_outside: bool = False
    index: tuple[Any, ...] = ()  # of the part

    def elements(self) -> Any:
        """Return the elements without their history; the script may have given the parameter others."""
        whole = self.tensor.detach()
        return whole[self.index] if self.index else whole

    def parts(self) -> Iterator["_Tensor"]:
        """Yield the parts that have digests; none for no elements."""
        if self.tensor.numel():
            yield from (replace(self, index=index) for index in _indexes(tuple(self.tensor.shape)))

    def has_digest(self) -> bool:
        """Return whether its bits can be read as integers. A sparse tensor, or complex128, has none."""
        import torch

        return self.tensor.layout is torch.strided and self.tensor.element_size() in _integers(torch)


def _indexes(shape: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield parts of a tensor, in any order of its memory, that have no more than the elements of a group."""
    if math.prod(shape) <= _ELEMENTS:
        yield ()
    elif (row := math.prod(shape[1:])) <= _ELEMENTS:
        rows = _ELEMENTS // row
        yield from ((slice(begin, begin + rows),) for begin in range(0, shape[0], rows))
    else:
        yield from ((place, *rest) for place in range(shape[0]) for rest in _indexes(shape[1:]))


def _integers(torch: Any) -> dict[int, Any]:
    """Return the integers by their size in bytes. With a sign: there is no ``hash_tensor`` of others on a GPU."""
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class _Optimizer:
    """An optimizer of the script, and its place in the audit; without a number it is not audited."""

    optimizer: "weakref.ref[Any]"
    number: int = 0
    count: int = 0
    every: int = _FIRST  # the pace, a power of two
    ahead: int = _FIRST  # steps from the last look to the next
    due: int = _FIRST
    key: object = None  # a change of it makes other groups
    layout: int = 0
    groups: list[list[_Tensor]] = field(default_factory=list)
    is_partial: bool = False  # a tensor has no digest
    modules: list["weakref.ref[Any]"] = field(default_factory=list)
    looked: tuple[int, float] | None = None  # count and time
    seconds: float = 0.0  # of a step
    cost: float = 0.0  # seconds of a record


class ReplicaAudit:
    """Records the digests of this process.

    Args:
        memory: SIZE bytes shared with the launcher.
        modules: returns the DistributedDataParallel modules of the script.
        may_write: whether this process is the one whose steps are the rank's.
        step: returns the number of completed steps of the training.
    """

    def __init__(
        self,
        memory: memoryview,
        world_size: int,
        modules: Callable[[], Sequence[Any]],
        may_write: Callable[[], bool],
        step: Callable[[], int],
    ) -> None:
        self._memory, self._world_size, self._modules = memory, world_size, modules
        self._may_write, self._step = may_write, step
        self._interval = _INTERVAL * max(1.0, world_size / _RANKS)
        self._known: dict[int, _Optimizer] = {}
        self._added, self._number = 0, 0
        self._names: dict[str, Any] = {}
        self._unread: list[tuple[list[int], Any, Any]] = []  # of a GPU: numbers of the record, digests there, event
        self._has_no_sync = False
        self._is_off = world_size < 2  # also after an error: it must not end a step of the script

    def begin_step(self, optimizer: Any) -> None:
        """Count a step that begins, and record a group if it is time."""
        known = self._known.get(id(optimizer))
        if known is None:
            known = self._add(optimizer)
        known.due -= 1
        if known.due <= 0:
            self._look(known)

    def abstain(self, reason: str) -> None:
        """Record nothing from now on, because the parameters of the ranks are not to be equal; the launcher says it."""
        if not self._is_off:
            self._is_off, self._names = True, {"abstains": reason}
            self._write_names()

    def without_synchronization(self) -> None:
        """Take note that the script uses ``no_sync``."""
        self._has_no_sync = True

    def _add(self, optimizer: Any) -> _Optimizer:
        key, known = id(optimizer), self._known
        added = known[key] = _Optimizer(weakref.ref(optimizer, lambda _: known.pop(key, None)))
        return added

    def _look(self, known: _Optimizer) -> None:
        known.count += known.ahead
        optimizer, now = known.optimizer(), monotonic()
        try:
            if not self._is_off and optimizer is not None and self._may_write():
                self._record(known, optimizer)
        except Exception as error:  # what the script does with its tensors cannot be foreseen
            self.abstain(f"an error, {type(error).__name__}")
        known.ahead = known.due = _MOST_STEPS if self._is_off else self._steps_ahead(known, now)

    def _steps_ahead(self, known: _Optimizer, now: float) -> int:
        """Return the steps until the next count that is a multiple of the pace, a power of two."""
        before, known.looked = known.looked, (known.count, now)
        if before is not None and known.count > before[0]:
            seconds = max(1e-6, (now - before[1]) / (known.count - before[0]))
            known.seconds = min(seconds, 1.25 * known.seconds) if known.seconds else seconds  # a pause is no slow step
            # All optimizers share the time, and the records that the launcher reads at once.
            wanted = max(known.cost / _SHARE, self._interval) * len(self._known) / known.seconds
            known.every = min(1 << max(0, math.ceil(wanted) - 1).bit_length(), _MOST_STEPS)
        return known.every - known.count % known.every

    def _record(self, known: _Optimizer, optimizer: Any) -> None:
        import torch

        modules = self._modules()
        if any(getattr(getattr(module, "_join_config", None), "enable", False) for module in modules):
            self.abstain("the script uses join, so the ranks make different numbers of steps")
            return
        key = ([len(group["params"]) for group in optimizer.param_groups], [id(module) for module in modules])
        if key != known.key:
            known.key = key
            self._arrange(known, optimizer, modules)
        began = thread_time()  # a thread that waits for a core costs the script nothing
        tensors = known.groups[known.count % len(known.groups)] if known.groups else []
        is_on_gpu = bool(self._unread) or any(each.tensor.is_cuda for each in tensors)
        if not tensors or (is_on_gpu and torch.cuda.is_current_stream_capturing()):
            return  # a graph that is captured would have the digests in it, and allows no query of an event
        self._read()
        digests = [*_digested(torch, tensors), _gradients(torch, tensors)]
        is_unsynchronized = self._has_no_sync or not all(
            module.require_backward_grad_sync for each in known.modules if (module := each()) is not None
        )
        self._has_no_sync = False
        groups = sum(map(bool, known.groups)) + known.is_partial << _GROUPS_AT
        numbers: list[Any] = [  # on a GPU, the values may be read much later
            monotonic(), known.number, known.count, self._step(), known.layout, known.count % len(known.groups),
            _settings(optimizer), is_unsynchronized * _NO_SYNC | _masks(tensors) | groups,
        ]  # fmt: skip
        found = torch.stack([digest.view(torch.int64) for digest in digests])
        if found.is_cuda:
            host = torch.empty(found.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            host.copy_(found, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(found.device))
            self._unread.append((numbers, host, event))
        else:
            self._write(numbers, found.tolist())
        spent = thread_time() - began
        known.cost = spent if not known.cost else known.cost + (spent - known.cost) / 4

    def _read(self) -> None:
        """Write the records whose digests the GPU has sent."""
        while self._unread and self._unread[0][2].query():
            numbers, host, _ = self._unread.pop(0)
            self._write(numbers, host.tolist())

    def _write(self, numbers: Sequence[Any], found: Sequence[int]) -> None:
        """found: two digests of each tensor, and that of the gradients."""
        at, optimizer, count, step, layout, group, settings, flags = numbers
        *digests, gradients = found
        values = [_combined(*pair) for pair in zip(digests[::2], digests[1::2], strict=True)]
        values += [0] * (MOST - len(values))
        self._number += 1
        place = self._number % _KEPT * _RECORD.size
        _RECORD.pack_into(
            self._memory, place, at, optimizer, count, at, step, layout, group, settings, gradients, flags, *values, at,
        )  # fmt: skip

    def _arrange(self, known: _Optimizer, optimizer: Any, modules: Sequence[Any]) -> None:
        """Make the groups of the tensors that belong to an optimizer; none if it trains no replica."""
        known.groups, known.modules = [], []
        own = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        if any(getattr(each.optimizer(), "optim", None) is optimizer for each in [*self._known.values()]):
            return  # the part of a ZeroRedundancyOptimizer that is this rank's
        trained = [module for module in modules if any(id(each) in own for each in module.module.parameters())]
        if not trained:
            return
        if reason := _reason(optimizer, trained, self._world_size):
            self.abstain(reason)
            return
        if not known.number:  # by it the ranks are compared, and one may have an optimizer of its own
            self._added += 1
            known.number = self._added
        if sum(each.number > 0 for each in [*self._known.values()]) > _OPTIMIZERS:
            self.abstain(f"the script has more than {_OPTIMIZERS} optimizers")
            return
        known.modules = [weakref.ref(module) for module in trained]
        found = list(_tensors(optimizer, trained))
        able = [each for each in found if each.has_digest()]
        known.is_partial = len(able) < len(found)
        known.groups = grouped([part for each in able for part in each.parts()])
        names = [[tensor.name for tensor in group] for group in known.groups]
        shapes = [[(str(each.tensor.dtype), list(each.tensor.shape)) for each in group] for group in known.groups]
        content = json.dumps(
            [names, shapes, list(map(_masks, known.groups)), [modules.index(each) for each in trained]]
        )
        known.layout = int.from_bytes(hashlib.blake2b(content.encode(), digest_size=7).digest(), "big")
        self._names[str(known.layout)] = names
        self._write_names()

    def _write_names(self) -> None:
        text = json.dumps(self._names).encode()
        if len(text) <= _NAMES - _HEAD.size:  # else messages have numbers
            self._memory[RING + _HEAD.size : RING + _HEAD.size + len(text)] = text
            _HEAD.pack_into(self._memory, RING, len(text), zlib.crc32(text))


def _reason(optimizer: Any, modules: Sequence[Any], world_size: int) -> str:
    """Return why the parameters of an optimizer are not to be equal on all ranks; empty if they are."""
    import torch

    if not hasattr(torch, "hash_tensor"):
        return "this release of PyTorch has no torch.hash_tensor"
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if hasattr(tensor, "_local_tensor") or getattr(tensor, "_is_flat_param", False):
                return "the parameters are sharded"
            if hasattr(tensor, "_in_backward_optimizers"):
                return "the optimizers step during the backward pass"
    if any(module.process_group.size() != world_size for module in modules):
        return "a DistributedDataParallel has not all ranks"
    if getattr(optimizer, "_overlap_with_ddp", False):
        return "a ZeroRedundancyOptimizer sends parameters during the backward pass"
    return ""


def _tensors(optimizer: Any, modules: Sequence[Any]) -> Iterator[_Tensor]:
    """Yield the parameters of the modules, then those of the optimizer that are in none.

    No buffers: those that DistributedDataParallel sends are equal by that, and others may differ by design.
    """
    seen = set[int]()
    for module in modules:
        prefix = f"{type(module.module).__name__}." if len(modules) > 1 else ""
        ignored = getattr(module, "parameters_to_ignore", ())
        for name, tensor in module.module.named_parameters():
            seen.add(id(tensor))
            if name not in ignored:
                yield _Tensor(prefix + name, tensor)
    for number, group in enumerate(optimizer.param_groups):
        for place, tensor in enumerate(group["params"]):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                shape = "×".join(map(str, tensor.shape)) or "scalar"
                yield _Tensor(f"param_groups[{number}] params[{place}] ({shape})", tensor, is_outside=True)


def grouped(tensors: Sequence[_Tensor]) -> list[list[_Tensor]]:
    """Return groups of limited size, an odd number of them; each of one device, so that it is read at once."""
    groups: list[list[_Tensor]] = []
    size, devices = 0, list(dict.fromkeys(each.tensor.device for each in tensors))
    for each in sorted(tensors, key=lambda each: devices.index(each.tensor.device)):
        elements, device = each.elements().numel(), each.tensor.device
        is_other = not groups or groups[-1][0].tensor.device != device
        if is_other or len(groups[-1]) == MOST or size + elements > _ELEMENTS:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += elements
    groups = groups if len(groups) % 2 else [*groups, []] if groups else []
    if outside := [place for place, group in enumerate(groups) if any(each.is_outside for each in group)]:
        groups.insert(1, groups.pop(outside[-1]))  # the first that is recorded, so it is known whether they began equal
    return groups


def _digested(torch: Any, tensors: Sequence[_Tensor]) -> Iterator[Any]:
    """Yield two digests of each tensor: of all elements, and of the first.

    The first alone shows a change of all elements together if they are equal and even in number.
    """
    for each in tensors:
        elements = each.elements()
        elements = elements.view(_integers(torch)[elements.element_size()])
        yield torch.hash_tensor(elements)
        yield torch.hash_tensor(elements.as_strided((), ()))


def _combined(every: int, first: int) -> int:
    """Return one digest, of 64 bits with a sign, of both."""
    number = (every * 0x9E3779B97F4A7C15 + first + 1) & (2**64 - 1)  # 1, because 0 stands for no tensor
    return number - 2**64 if number >= 2**63 else number


def _gradients(torch: Any, tensors: Sequence[_Tensor]) -> Any:
    """Return the digest of a part of a gradient that DistributedDataParallel exchanges; 0 if there is none."""
    for each in tensors:
        gradient = None if each.is_outside else each.tensor.grad
        if gradient is not None and gradient.layout is torch.strided and gradient.is_contiguous() and gradient.numel():
            with contextlib.suppress(RuntimeError):  # a type without digest
                return torch.hash_tensor(gradient.detach().view(-1)[:_GRADIENTS])
    return torch.zeros((), dtype=torch.int64, device=tensors[0].tensor.device)


def _settings(optimizer: Any) -> int:
    """Return the digest of the first param groups' settings; of those that need no GPU to be read."""
    values = [
        [value for name, value in group.items() if name != "params" and type(value) in (float, int, bool, tuple)]
        for group in optimizer.param_groups[:_SETTINGS]
    ]
    return zlib.crc32(repr(values).encode())


def _masks(tensors: Sequence[_Tensor]) -> int:
    """Return which tensors of a group are outside of DistributedDataParallel, as flags."""
    return sum(each.is_outside << place for place, each in enumerate(tensors)) << _OUTSIDE_AT
