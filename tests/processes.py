"""Start, stop and wait for programs in tests. Every program is killed by the kernel if the test run dies."""

import asyncio
import ctypes
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ddptrain.distributed.topology import free_port

__all__ = ["end", "eventually", "free_port", "spawn", "tail"]
T = TypeVar("T")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: a forked child must not take the loader's lock


def die_with_parent() -> None:
    """Make the kernel kill this child when its parent dies, even by SIGKILL. Called between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program with its output appended to ``log``."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if env is None else dict(env),
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one call into the kernel, no locks taken
        )


def end(process: subprocess.Popen[bytes], grace: float = 10.0) -> None:
    """Send SIGTERM, then SIGKILL after ``grace`` seconds, and reap the process."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def eventually(what: str, probe: Callable[[], T | None], *, timeout: float = 60.0, interval: float = 0.02) -> T:
    """Return the first true value of ``probe``. Raises AssertionError with ``what`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out after {timeout:g} s: {what} (last value: {value!r})")
        time.sleep(interval)


async def eventually_async(what: str, probe: Callable[[], object], *, timeout: float = 60.0) -> None:  # noqa: ASYNC109
    """Do the same as ``eventually`` without blocking the event loop."""
    deadline = time.monotonic() + timeout
    while not probe():
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out after {timeout:g} s: {what}")
        await asyncio.sleep(0.01)


def tail(log: Path, lines: int = 30) -> str:
    """Return the last lines of a program's output, for an error message."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no output)"
