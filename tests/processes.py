"""Child processes of a test run: real programs that end with it, whatever ends it."""

import asyncio
import ctypes
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In a child, before exec: the kernel kills it when the test run dies, even of SIGKILL."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def spawn(command: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a program whose output goes to ``log``."""
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
    """Ask a program to end, insist after ``grace`` seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(what: str, probe: Callable[[], T | None], *, timeout: float = 60.0, interval: float = 0.02) -> T:
    """The first true value that ``probe`` returns; AssertionError that names ``what`` after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what} (last answer: {value!r})")
        time.sleep(interval)


async def eventually_async(what: str, probe: Callable[[], object], *, timeout: float = 60.0) -> None:  # noqa: ASYNC109
    """The same on an event loop that has to turn meanwhile."""
    deadline = time.monotonic() + timeout
    while not probe():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what}")
        await asyncio.sleep(0.01)


def tail(log: Path, lines: int = 30) -> str:
    """The end of a program's output, for an error message."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no output)"
