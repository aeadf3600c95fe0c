"""Where the time of a rank's steps goes, in memory that its launcher reads: no collective, no line in the script.

DistributedDataParallel makes the steps of all ranks equally long, because each waits for the slowest. What differs is
the wait: the reducer of PyTorch measures it (``_get_ddp_logging_data``, in nanoseconds) for one of several iterations,
as well as the forward and the backward pass. It is a prototype interface; without it, nothing is measured. Hooks of
this process time the rest.

The numbers are sums that only grow. The rank records them when the number of iterations passes a multiple of a power of
two, so the launchers can compare all ranks between the same two iterations.
"""

import contextlib
import functools
import gc
import math
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from threading import get_ident
from time import monotonic
from types import ModuleType
from typing import Any

from ddprun import replica_audit
from ddprun.replica_audit import ReplicaAudit
from ddprun.resources import throttled_seconds

_KEPT = 32  # records; a launcher reads them once a second
_WARM_UP = 16  # iterations that are not measured: the reducer still groups its buckets
_SAMPLED, _SAMPLED_CUDA = 0.1, 1.0  # seconds between iterations that the reducer measures; it then waits for the GPU
_WINDOW = 2.0  # seconds between records at most, unless that is less than _FEWEST measured iterations
_FEWEST = 8  # measured iterations between records
_LONGEST_IDLE = 64  # steps between calls while nothing is measured
_OTHERS = 16  # looks without an iteration of the module that is followed, until another one is
_MANY = 1024  # ranks from which on records are less frequent, for the launcher of node 0
_AVERAGED = "the ranks average their parameters from time to time"
_UNTOUCHED_CUDA = 128  # iterations on a GPU at PyTorch's own rate: a script may capture a CUDA graph in the first ones


@dataclass(frozen=True, slots=True)
class StepSums:
    """The sums of one rank at an iteration; times in seconds.

    Attributes:
        iteration: of DistributedDataParallel, in which the ranks exchange gradients; a multiple of a power of two.
        time: of CLOCK_MONOTONIC.
        samples: measured iterations; the sums until ``hook`` are of these only, the others of all iterations.
        wait, wait_squares: from the end of this rank's own work until all gradients are exchanged.
        forward: in the call of the module. backward: from its end, so with the loss, this rank's own work.
        buffers: of all iterations, as what follows: the broadcast of buffers, where all ranks wait for rank 0.
        hook: in the communication hook that the script has registered.
        data: of a DataLoader. optimizer: its steps. collection: Python's collection of garbage.
        queued: time in which the thread that trains could run and the kernel did not run it.
        throttled: of the container, by its CPU limit.
    """

    iteration: int = 0
    time: float = 0.0
    samples: float = 0.0
    wait: float = 0.0
    wait_squares: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    buffers: float = 0.0
    hook: float = 0.0
    data: float = 0.0
    optimizer: float = 0.0
    collection: float = 0.0
    queued: float = 0.0
    throttled: float = 0.0

    @classmethod
    def checked(cls, record: Sequence[object]) -> "StepSums":
        """Return the sums in a message. Raises ``ValueError`` or ``TypeError`` if they are none."""
        iteration, *times = record
        if (
            len(record) != len(cls.__slots__)
            or type(iteration) is not int
            or not 0 < iteration < 2**53
            or not all(type(each) is float for each in times)
        ):
            raise ValueError("no sums of steps")
        found = cls(iteration, *times)  # type: ignore[arg-type]
        if not all(map(math.isfinite, times)):  # type: ignore[arg-type]
            raise ValueError("a sum of steps is not finite")
        return found


_RECORD = struct.Struct("=q13dq")  # the iteration again at the end: a reader takes only whole records
AUDIT_AT = _KEPT * _RECORD.size
SIZE = AUDIT_AT + replica_audit.SIZE


def read(memory: bytes) -> list[StepSums]:
    """Return the records in the order of their times."""
    records = (_RECORD.unpack_from(memory, number * _RECORD.size) for number in range(_KEPT))
    whole = (StepSums(*record[:-1]) for record in records if record[0] > 0 and record[0] == record[-1])
    return sorted(whole, key=lambda sums: sums.time)


def power_of_two(limit: float) -> int:
    """Return the largest power of two that is not above the limit; 1 if there is none."""
    return 1 << max(0, int(limit).bit_length() - 1)


class StepTimer:
    """Measures the steps of this process.

    Args:
        memory: SIZE bytes shared with the launcher.
        world_size: of the group.
        data_wait: returns the seconds that this process has waited for data in all.
        may_write: whether this process is the one whose steps are the rank's.
        step: returns the number of completed steps of the training.

    Attributes:
        audit: compares the parameters of the ranks.
        due: steps until ``look`` is to be called; the caller counts them down.
    """

    def __init__(
        self,
        memory: memoryview,
        world_size: int,
        data_wait: Callable[[], float],
        may_write: Callable[[], bool] = lambda: True,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        self.audit = ReplicaAudit(memory[AUDIT_AT:], world_size, self._alive, may_write, step)
        self._window = _WINDOW * max(1.0, world_size / _MANY)
        self._memory, self._data_wait, self._may_write = memory, data_wait, may_write
        self._modules: list[_Module] = []
        self._is_off = False  # after an error: it must not end a step of the script
        self._every, self._between = 1, _FEWEST
        self.due, self._idle = 1, 1
        self._began_step = self._began_collection = 0.0
        self._buffers = self._hook = self._optimizer = self._collection = 0.0
        self._sampled = [0.0] * 5  # samples, wait, wait_squares, forward, backward
        self._recorded = self._number = 0  # the newest iteration with a record; the number of records
        self._newest: _Module | None = None
        self._others = 0  # looks since only other modules have advanced
        self._paced: tuple[int, float] | None = None  # iteration and time
        self._main_thread = threading.main_thread().ident

    def begin_step(self, optimizer: object, *_: object) -> None:
        """Take note that an optimizer begins its step: what the one before has made is complete."""
        self.audit.begin_step(optimizer)
        self._began_step = monotonic()

    # A compiled step would warn of what it cannot trace.
    begin_step._torchdynamo_disable = True  # type: ignore[attr-defined]

    def look(self, now: float) -> None:
        """Take what was measured, when the step of an optimizer has ended. now: CLOCK_MONOTONIC, in seconds."""
        if not self._modules or self._is_off or not self._may_write():
            self.due = self._idle = min(2 * self._idle, _LONGEST_IDLE)
            return
        self._idle = 1
        if self._began_step:
            self._optimizer += (now - self._began_step) * self._every  # one step for all since the last call
            self._began_step = 0.0
        try:
            self._look(now)
        except Exception:  # a prototype interface, which another release may change
            self._is_off = True
        self.due = self._every

    def follow(self, module: Any) -> None:
        """Measure the iterations of a new DistributedDataParallel."""
        self._modules = [each for each in self._modules if each.module() is not None]
        self._modules.append(_Module(weakref.ref(module)))
        self._every = self.due = 1  # its steps may be slower

    def timed_buffers(self, broadcast: Callable[..., None]) -> Callable[..., None]:
        """Return the function of PyTorch that broadcasts the buffers of a module as one whose calls are timed."""

        @functools.wraps(broadcast)
        def timed(*args: Any, **options: Any) -> None:
            began = monotonic()
            try:
                broadcast(*args, **options)
            finally:
                self._buffers += monotonic() - began

        # Else torch.compile compiles it when a compiled module calls it, and warns of what it cannot trace. This is
        # what ``torch.compiler.disable`` does to one function; the import of its module takes seconds.
        try:
            dynamo = sys.modules["torch"]._C._dynamo.eval_frame
            skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)
            dynamo.set_code_exec_strategy(timed.__code__, skip)  # type: ignore[attr-defined]
        except Exception:  # private names
            return broadcast
        return timed

    def timed_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return the communication hook of a script as one whose calls are timed."""

        @functools.wraps(hook)
        def timed(*args: Any) -> Any:
            began = monotonic()
            try:
                return hook(*args)
            finally:
                self._hook += monotonic() - began

        return timed

    def collected(self, phase: str, _: object) -> None:
        """Take note of a collection of garbage, as a member of ``gc.callbacks``."""
        if get_ident() != self._main_thread:
            return
        if phase == "start":
            self._began_collection = monotonic()
        elif self._began_collection:
            self._collection += monotonic() - self._began_collection
            self._began_collection = 0.0

    def _alive(self) -> list[Any]:
        return [module for each in self._modules if (module := each.module()) is not None]

    def _look(self, now: float) -> None:
        """Take what the reducers have measured, and record the sums if it is time.

        The iterations are those of one module: a script may train several in turn, or one after the other.
        """
        advanced = [each for each in self._modules if each.look()]
        if not advanced:
            return
        for each in advanced:
            if each.rate == 0 and each is not self._newest and each.seen > _WARM_UP // 2:
                each.set_rate(self._every)  # else it is measured seldom after its first iterations
        if self._newest not in advanced:
            self._others += 1
            if self._newest is not None and self._others < _OTHERS:
                return
            self._newest, self._recorded, self._paced = advanced[-1], 0, None
            for each in self._modules:
                each.counted = each.seen
        newest, self._others = self._newest, 0
        if newest.seen > _WARM_UP:
            self._add(newest)
        boundary = newest.seen - newest.seen % self._between
        if boundary > max(self._recorded, _WARM_UP):
            self._recorded = boundary
            self._record(boundary, now)
            self._set_pace(newest, now)
        elif newest.rate == 0 and newest.seen > _WARM_UP // 2:
            self._set_pace(newest, now)

    def _add(self, newest: "_Module") -> None:
        """Add what an iteration took: of a module with fewer or more iterations that part which belongs to one."""
        iterations, times = newest.seen - newest.counted, [0.0] * 3
        for each in self._modules:
            share = (each.seen - each.counted) / iterations if iterations > 0 else float(each is newest)
            times = [total + share * value for total, value in zip(times, each.times, strict=True)]
            each.counted = each.seen
        wait, forward, backward = times
        for place, value in enumerate((1.0, wait, wait * wait, forward, backward)):
            self._sampled[place] += value

    def _record(self, iteration: int, now: float) -> None:
        samples, wait, wait_squares, forward, backward = self._sampled
        sums = StepSums(
            iteration, now, samples, wait, wait_squares, forward, backward, self._buffers,
            self._hook, self._data_wait(), self._optimizer, self._collection, _queued_seconds(), throttled_seconds(),
        )  # fmt: skip
        self._number += 1
        place = self._number % _KEPT * _RECORD.size
        struct.pack_into("=q", self._memory, place, 0)
        _RECORD.pack_into(self._memory, place, *astuple(sums), iteration)

    def _set_pace(self, newest: "_Module", now: float) -> None:
        """Choose how many iterations are measured and recorded, by the time that one has taken since the last call."""
        before, self._paced = self._paced, (newest.seen, now)
        module = newest.module()
        if module is None or before is None or newest.seen <= before[0]:
            return
        is_on_gpu = _is_on_gpu(module)
        seconds = (now - before[1]) / (newest.seen - before[0])
        self._every = power_of_two((_SAMPLED_CUDA if is_on_gpu else _SAMPLED) / seconds)
        self._between = max(_FEWEST * self._every, power_of_two(self._window / seconds))
        for each in self._modules:
            each.set_rate(self._every)


@dataclass(eq=False)
class _Module:
    """A DistributedDataParallel.

    Attributes:
        seen: the iteration that was measured last. times: its wait, forward and backward pass, in seconds.
        counted: the iterations whose times are in the sums.
        rate: that was set; 0 for none.
    """

    module: Callable[[], Any]
    seen: int = 0
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    counted: int = 0
    rate: int = 0

    def look(self) -> bool:
        """Take what the reducer has measured; return whether it is another iteration than before."""
        module = self.module()
        found: dict[str, Any] = {} if module is None else module._get_ddp_logging_data()
        iteration = int(found.get("iteration", 0))
        if iteration <= self.seen:
            return False
        self.seen = iteration
        total, overlap = found.get("backward_comm_time", 0), found.get("backward_compute_comm_overlap_time", 0)
        forward, backward = (found.get(name, 0) / 1e9 for name in ("forward_compute_time", "backward_compute_time"))
        self.times = max(0, total - overlap) / 1e9, forward, backward
        return True

    def set_rate(self, every: int) -> None:
        """Let the reducer measure one of so many iterations."""
        module = self.module()
        if module is None or self.rate == every or (_is_on_gpu(module) and self.seen < _UNTOUCHED_CUDA):
            return
        self.rate = every
        module._set_ddp_runtime_logging_sample_rate(every)


def _is_on_gpu(module: Any) -> bool:
    return getattr(module, "device_type", "cpu") != "cpu"


def _queued_seconds() -> float:
    """Return for how long this thread could run while the kernel ran others, or its container was throttled.

    By proc(5), if the kernel was built with it.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def measure(parts: StepTimer, after_import: Callable[[str, Callable[[ModuleType], None]], None]) -> None:
    """Put the hooks into PyTorch as the script imports it.

    Args:
        after_import: calls a function with a module when that has been imported.
    """

    def optimizers(module: ModuleType) -> None:
        if add := getattr(module, "register_optimizer_step_pre_hook", None):
            add(parts.begin_step)

    def data_parallel(module: ModuleType) -> None:
        wrapped: Any = getattr(module, "DistributedDataParallel", None)
        names = (
            "_get_ddp_logging_data", "_set_ddp_runtime_logging_sample_rate", "_ddp_init_helper", "register_comm_hook",
            "no_sync",
        )  # fmt: skip
        if not all(hasattr(wrapped, name) for name in names):
            return
        begin, register, no_sync = wrapped._ddp_init_helper, wrapped.register_comm_hook, wrapped.no_sync

        @functools.wraps(begin)
        def begun(self: Any, *args: Any, **options: Any) -> None:
            begin(self, *args, **options)
            parts.follow(self)

        @functools.wraps(register)
        def registered(self: Any, state: object, hook: Any) -> None:
            if getattr(hook, "__name__", "") == "post_localSGD_hook":
                parts.audit.abstain(_AVERAGED)
            register(self, state, parts.timed_hook(hook) if callable(hook) else hook)
            with contextlib.suppress(AttributeError, IndexError):  # what is pickled with the module is the script's own
                self._comm_hooks[-1] = (hook, state)

        @functools.wraps(no_sync)
        def unsynchronized(self: Any) -> Any:
            parts.audit.without_synchronization()
            return no_sync(self)

        wrapped._ddp_init_helper, wrapped.register_comm_hook = begun, registered
        wrapped.no_sync = unsynchronized
        if (group := getattr(module, "dist", None)) and (broadcast := getattr(group, "_broadcast_coalesced", None)):
            group._broadcast_coalesced = parts.timed_buffers(broadcast)

    def averagers(module: ModuleType) -> None:
        averager = module.ModelAverager
        begin = averager.__init__

        @functools.wraps(begin)
        def begun(self: Any, *args: Any, **options: Any) -> None:
            parts.audit.abstain(_AVERAGED)
            begin(self, *args, **options)

        averager.__init__ = begun

    after_import("torch.optim.optimizer", optimizers)
    after_import("torch.distributed.algorithms.model_averaging.averagers", averagers)
    after_import("torch.nn.parallel.distributed", data_parallel)
    gc.callbacks.append(parts.collected)
