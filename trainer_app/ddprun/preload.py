"""What the launcher imports before it forks the ranks, and why a fork of it could not do what a rank does.

A forked process inherits locks and half-initialized runtimes, but not the threads that would release them. After one
product of matrices in the launcher, each rank would hang in its first operation on several threads. So a first fork,
the canary, tries such an operation.
"""

import contextlib
import importlib
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddprun import proc
from ddprun.resources import uncollected_imports
from ddprun.signals import die_with_parent

_IDLE = 1.0  # seconds without a running thread after which the canary hangs
_LONGEST = 30.0  # seconds for a canary that still computes, on a busy machine
_INTERVAL = 0.1
# With it torch.cuda.is_available() asks the driver's management library. Otherwise it would initialize CUDA, which a
# fork cannot use, and many libraries call it when they are imported.
_WITHOUT_CUDA = ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Threads whose libraries prepare for a fork: jemalloc, which pyarrow brings, does without its own in the child.
_FIT_FOR_FORKS = {"jemalloc_bg_thd"}


def is_path_safe() -> bool:
    """Return whether the user has excluded the folder of the program from ``sys.path``: -P, -I or PYTHONSAFEPATH."""
    return bool(sys.flags.isolated or getattr(sys.flags, "safe_path", False))  # since Python 3.11


def import_before_fork(modules: Sequence[str], folders: Sequence[str]) -> str:
    """Import the modules. Returns why the ranks must not be forked from this process; empty if they may.

    A module that cannot be imported is no error: the script may not need it, or says so itself.

    Args:
        folders: where Python looks first, as it does for the script.
    """
    before = _opened()
    with uncollected_imports(), _cuda_not_initialized(), _searched_first(folders):
        for name in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    names = ", ".join(modules)
    if opened := sorted(target for target in _opened() - before if target.startswith(("/dev/nvidia", "socket:"))):
        return f"the import of {names} has opened {opened[0].partition(':')[0]}, which a fork would share"
    if "torch" in sys.modules and (reason := _canary()):
        return f"after the import of {names} a forked process {reason}"
    # Counted after a fork, because some pools of threads, such as NumPy's BLAS, end before a fork and begin after it.
    if threads := _threads():
        return f"the import of {names} has started {threads} thread(s), which a fork would not have"
    return ""


def _opened() -> set[str]:
    targets = set[str]()
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        with contextlib.suppress(OSError):  # of the directory itself
            targets.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115 - text only
    return targets


def _threads() -> int:
    names = list[str]()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text().strip())
    return sum(name not in _FIT_FOR_FORKS for name in names) - 1


@contextlib.contextmanager
def _cuda_not_initialized() -> Iterator[None]:
    name, value = _WITHOUT_CUDA
    given = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]
        else:
            os.environ[name] = given


@contextlib.contextmanager
def _searched_first(folders: Sequence[str]) -> Iterator[None]:
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(ValueError):  # a module has changed the list
                sys.path.remove(folder)


def _canary() -> str:
    """Return what goes wrong in a fork that does one operation on several threads; empty if nothing does."""
    parent = os.getpid()
    ended, alive = os.pipe()  # the end of the canary closes ``alive``
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            die_with_parent(parent)
            os.close(ended)
            torch = sys.modules["torch"]
            torch.set_num_threads(max(2, torch.get_num_threads()))
            torch.ones(2**18).add_(1.0)  # large enough for torch to divide it among threads
            code = 0
        finally:
            os._exit(code)
    os.close(alive)
    hangs = not _ends(pid, ended)
    os.close(ended)
    if hangs:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if hangs:
        return "hangs in its first operation on several threads"
    if code:
        return f"cannot compute: it ends with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    return ""


def _ends(pid: int, ended: int) -> bool:
    """Wait for the canary to end. Returns False if all its threads wait for _IDLE seconds, not for a core."""
    idle = 0.0
    for _ in range(int(_LONGEST / _INTERVAL)):
        if select.select([ended], [], [], _INTERVAL)[0]:
            return True
        idle = 0.0 if proc.is_running(pid) else idle + _INTERVAL
        if idle >= _IDLE:
            return False
    return False
