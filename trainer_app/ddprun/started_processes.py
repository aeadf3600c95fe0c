"""The optimizer's steps in a rank's process, and in those that its script starts itself with multiprocessing.

A process that is forked has the rank's memory and the optimizer's hook. One that begins with an interpreter of its own,
by ``spawn`` or ``forkserver``, gets the descriptors with the data that multiprocessing sends to it, before it imports
the script.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from threading import get_ident
from time import monotonic
from types import ModuleType
from typing import Any

from ddprun import script_interface, step_parts
from ddprun.diagnostics import Diagnostics, dump_stacks_on_signal
from ddprun.distributed.topology import bind, loopback_of
from ddprun.heartbeat import Heartbeat
from ddprun.reporting.progress import ProgressRecord
from ddprun.settings import Settings
from ddprun.step_profile import StepProfiler
from ddprun.turns import BEATS, REPORTS, Turn

_main_thread = threading.main_thread().ident  # asked at each batch; ``threading`` takes 3 µs for it
_OPTIMIZERS = "torch.optim.optimizer"
_DATA = "torch.utils.data.dataloader"
_GRAPHS = "torch.cuda.graphs"
_REPLAY_INTERVAL = 1.0  # seconds between replays that are signs of life
_GROUPS = "torch.distributed.distributed_c10d"
_MEETING = "torch.distributed.rendezvous"
_DESTROYED_GROUPS = 16  # that are kept: each has some threads and connections
kept_groups: list[Any] = []  # until the process ends: with the last one the file of a ``file://`` store is deleted
_STARTS = "multiprocessing.spawn"  # makes the data for a new interpreter, also for one of a fork server
# The new interpreter must run in any case, also one that does not find this package.
_ATTACH = """
try:
    from ddprun.started_processes import attach
    attach(*given)
except Exception:
    pass
"""


def _after_fork() -> None:
    global _main_thread  # noqa: PLW0603 - each process has one
    _main_thread = get_ident()


os.register_at_fork(after_in_child=_after_fork)


def connect(
    diagnostics: Diagnostics,
    world_size: int,
    settings: Settings,
    *,
    is_rank: bool = True,
    on_mark: Callable[[str, int], None] | None = None,
) -> tuple[Heartbeat, ProgressRecord]:
    """Make the optimizers' steps in this process, and in those that it starts, steps of the rank.

    Args:
        is_rank: this is the rank's own process.
        on_mark: see ``Heartbeat``.
    """
    beats, reports = (Turn(diagnostics.heartbeat, byte, is_rank=is_rank) for byte in (BEATS, REPORTS))
    progress = ProgressRecord(world_size, diagnostics.progress_text())
    heartbeat = Heartbeat(diagnostics.memory(), on_mark, beats.may_write)
    parts = step_parts.StepTimer(
        diagnostics.parts_memory(), world_size, lambda: heartbeat.waited, beats.may_write, lambda: heartbeat.last.step
    )
    profiler = StepProfiler(diagnostics.profile, heartbeat.touch)
    script_interface.begin(progress, heartbeat, settings, beats=beats, reports=reports, parts=parts, profiler=profiler)
    after_import(_OPTIMIZERS, _count_steps)
    step_parts.measure(parts, after_import)
    after_import(_DATA, lambda module: _time_data(module, heartbeat))
    after_import(_GRAPHS, _notice_replays)
    after_import(_MEETING, _listen_on_loopback)
    if is_rank:
        after_import(_GROUPS, _keep_groups)

    def hand_over(module: Any) -> None:
        of_multiprocessing = module.get_preparation_data

        def get_preparation_data(name: str) -> dict[str, Any]:
            data: dict[str, Any] = of_multiprocessing(name)
            return data | {"ddprun": _Handover(diagnostics, world_size, settings)} if beats.is_open else data

        module.get_preparation_data = get_preparation_data

    after_import(_STARTS, hand_over)
    return heartbeat, progress


class _Handover:
    """Becomes a call of ``attach`` in the process that unpickles it, which has copies of the descriptors."""

    def __init__(self, diagnostics: Diagnostics, world_size: int, settings: Settings) -> None:
        self._diagnostics, self._others = diagnostics, (world_size, settings)

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        try:
            for descriptor in astuple(self._diagnostics):
                os.fstat(descriptor)
            descriptors = tuple(map(DupFd, astuple(self._diagnostics)))
        except (OSError, ValueError):  # the script has closed one, or pickles for another purpose
            return dict, ()
        return exec, (_ATTACH, {"given": (descriptors, *self._others)})


def attach(descriptors: Sequence[Any], world_size: int, settings: Settings) -> None:
    """Connect a process that a rank has started; it is about to import the script."""
    diagnostics = Diagnostics(*(descriptor.detach() for descriptor in descriptors))
    connect(diagnostics, world_size, settings, is_rank=False)
    dump_stacks_on_signal(diagnostics)


def _count_steps(module: ModuleType) -> None:
    """Make each step of an optimizer a heartbeat, and count a step when an optimizer has stepped again."""
    hook: Any = script_interface.stepped
    hook._torchdynamo_disable = True  # where a script compiles the step: else it warns of what it cannot trace
    module.register_optimizer_step_post_hook(hook)


def _time_data(module: ModuleType, heartbeat: Heartbeat) -> None:
    """Add the time of each batch that the main thread takes from a DataLoader to the wait for data.

    PyTorch has no hook for it; a release whose iterators have another class shows no wait.
    """
    iterator = getattr(module, "_BaseDataLoaderIter", None)
    take = getattr(iterator, "__next__", None)
    if iterator is None or take is None:
        return

    def timed(self: Any) -> Any:
        began = monotonic()
        try:
            return take(self)
        finally:
            if get_ident() == _main_thread:
                heartbeat.data_wait += monotonic() - began

    iterator.__next__ = timed


def _notice_replays(module: ModuleType) -> None:
    """Make replays of CUDA graphs signs of life: the step of an optimizer that is recorded calls its hook only once."""
    graph = getattr(module, "CUDAGraph", None)
    replay = getattr(graph, "replay", None)
    if graph is None or replay is None:
        return
    noticed = -_REPLAY_INTERVAL

    def replayed(self: Any) -> None:
        nonlocal noticed
        replay(self)
        if (now := monotonic()) - noticed >= _REPLAY_INTERVAL:
            noticed = now
            script_interface.replayed()

    graph.replay = replayed


def _keep_groups(module: ModuleType) -> None:
    """Keep the process groups that the script has destroyed, so that DDP never has the last reference.

    Its reducer destroys the group while it holds the GIL and waits for gloo's threads, which may wait for the GIL to
    release what they have of the last backward pass: the rank hangs at its end. Under torchrun the constructor of
    DistributedDataParallel imports torch.distributed.nn.functional, whose functions have the default group as the
    default of an argument, and so keep it. A module that was imported before the fork has no group there. The last
    reference of Python itself destroys a group without the GIL.

    A group keeps its store, and with it the addresses of its ranks: each later default group has keys of its own.
    """
    register, rendezvous = (getattr(module, name, None) for name in ("_register_process_group", "rendezvous"))
    if register is None or rendezvous is None:
        return

    def registered(name: str, group: Any) -> None:
        register(name, group)
        destroyed = [old for old in kept_groups if old not in module._world.pg_map]
        if len(destroyed) > _DESTROYED_GROUPS:  # a script that makes and destroys many
            kept_groups.remove(destroyed[0])
        kept_groups.append(group)

    def met(*args: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, size in rendezvous(*args, **options):
            count = store.add(f"ddprun/{rank}", 1)  # of the groups that this rank has made with this store
            yield module.PrefixStore(f"ddprun/{count}", store) if count > 1 else store, rank, size

    module._register_process_group, module.rendezvous = registered, met  # type: ignore[attr-defined]


def _listen_on_loopback(module: ModuleType) -> None:
    """Make the store of a process group whose MASTER_ADDR is a loopback address listen there only.

    PyTorch's listens on all addresses, and every program that reaches it can write its keys.
    """
    store_of_torch = getattr(module, "TCPStore", None)
    if store_of_torch is None:
        return

    def store(*args: Any, **options: Any) -> Any:
        host = loopback_of(str(options.get("host_name")))
        if host and options.get("is_master") and "master_listen_fd" not in options:
            with contextlib.suppress(OSError, OverflowError):  # this process has the store already; else torch says why
                options["master_listen_fd"] = bind(options["port"], host, again=True).detach()
        return store_of_torch(*args, **options)

    module.TCPStore = store  # type: ignore[attr-defined]


def after_import(name: str, work: Callable[[ModuleType], None]) -> None:
    """Call ``work`` with the module ``name``: now if it is imported, else as soon as the script imports it."""
    if name in sys.modules:
        work(sys.modules[name])
        return
    sys.meta_path.insert(0, _AfterImport(name, work))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as Python does, and calls a function when it has been executed."""

    def __init__(self, name: str, work: Callable[[ModuleType], None]) -> None:
        self._name, self._work = name, work

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the other finders give, with a loader that calls the function."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute, work = spec.loader.exec_module, self._work

            def exec_module(module: ModuleType) -> None:
                execute(module)
                work(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
