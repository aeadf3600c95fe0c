"""For the launcher: work on a volume that may never answer, done by another process, for so many seconds at most.

A file system whose server is gone blocks whoever touches it, in the kernel, where no timeout of ours reaches. The
launcher must still kill, pass signals on and report; it may start no thread, but it may fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

_CHUNK = 65536


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What ``work`` returns, which must be JSON-able; None if it fails, or takes longer.

    It runs in a child: what it changes in memory is lost. A child that does not answer is killed; where even that
    must wait for the volume, it is left behind.
    """
    parent, (ours, theirs) = os.getpid(), os.pipe()
    with os.fdopen(ours, "rb", buffering=0) as answer, contextlib.suppress(OSError, ValueError):
        try:
            pid = os.fork()
            if pid == 0:
                _answer(work, theirs, parent)
        finally:
            os.close(theirs)
        content = _read(answer.fileno(), time.monotonic() + seconds)
        _end(pid, killed=content is None)
        return json.loads(content) if content else None
    return None


def _read(descriptor: int, deadline: float) -> bytes | None:
    """All that comes until the other end closes; None if it does not in time."""
    content = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(descriptor, _CHUNK)
        if not part:
            return content
        content += part
    return None


def _end(pid: int, *, killed: bool) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        if killed:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)  # else the supervisor's loop, or init, collects it
        else:
            os.waitpid(pid, 0)


def _answer(work: Callable[[], Any], pipe: int, parent: int) -> NoReturn:
    from ddptrain.children import die_with

    try:
        signal.set_wakeup_fd(-1)
        die_with(parent)
        with os.fdopen(pipe, "wb") as stream:
            stream.write(json.dumps(work()).encode())
    finally:
        os._exit(0)
