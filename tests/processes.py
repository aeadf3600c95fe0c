"""Start, stop and wait for programs in tests. Every program is killed by the kernel if the test run dies."""

import asyncio
import contextlib
import ipaddress
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ddpjob.local.shim import die_with_parent
from ddprun.distributed import topology

__all__ = ["die_with_parent", "end", "eventually", "free_port", "listening", "spawn", "tail"]
T = TypeVar("T")
_HELD_PORTS: deque[socket.socket] = deque()
_MOST_HELD = 200


def free_port() -> int:
    """Return a port for a server of a test. No other program can take it, except a server that binds to it by number.

    This process keeps a socket bound to each of the last 200 ports. It does not listen, and allows that a server does.
    """
    while True:
        port, held = topology.free_port(), socket.socket()
        try:
            held.bind(("", port))  # before the option is set, so that it fails if another test run holds the port
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # servers set it too
        _HELD_PORTS.append(held)
        if len(_HELD_PORTS) > _MOST_HELD:
            _HELD_PORTS.popleft().close()
        return port


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
    """Return the first true value of ``probe``. Raises AssertionError with ``what`` after ``timeout`` seconds.

    It waits longer than the probe took, and longer while it has waited for long: what polls shares the CPUs with what
    it waits for.
    """
    began = time.monotonic()
    while True:
        asked = time.monotonic()
        value = probe()
        if value:
            return value
        if asked > began + timeout:
            raise AssertionError(f"timed out after {timeout:g} s: {what} (last value: {value!r})")
        time.sleep(_pause(interval, began, asked))


async def eventually_async(what: str, probe: Callable[[], object], *, timeout: float = 60.0) -> None:  # noqa: ASYNC109
    """Do the same as ``eventually`` without blocking the event loop."""
    began = asked = time.monotonic()
    while not probe():
        if asked > began + timeout:
            raise AssertionError(f"timed out after {timeout:g} s: {what}")
        await asyncio.sleep(_pause(0.01, began, asked))
        asked = time.monotonic()


def _pause(interval: float, began: float, asked: float) -> float:
    """Return the seconds until the next probe. asked: when the last one began."""
    now = time.monotonic()
    return max(interval, min(1.0, max(3 * (now - asked), 0.02 * (now - began))))


def tail(log: Path, lines: int = 30) -> str:
    """Return the last lines of a program's output, for an error message."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "(no output)"


def listening(pid: int) -> dict[int, set[str]]:
    """Return the addresses on which a process and its descendants listen, by TCP port, as the kernel shows them."""
    family, parents = {pid}, dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    inodes: set[str] = set()
    for descriptor in (found for member in family for found in Path(f"/proc/{member}/fd").glob("*")):
        with contextlib.suppress(OSError):
            inodes.add(descriptor.readlink().name.removeprefix("socket:[").removesuffix("]"))
    found: dict[int, set[str]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                host, _, port = fields[1].rpartition(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                found.setdefault(int(port, 16), set()).add(str(ipaddress.ip_address(b"".join(words))))
    return found
