"""Runs the programs that make the test cluster: always with a time limit and an error that shows their last words."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_TAIL_LINES = 40


class CommandError(RuntimeError):
    """A program failed or ran past its time limit. The message holds the command and the end of what it printed."""


def run(
    command: Sequence[str | Path],
    *,
    timeout: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` and return its outcome; ``env`` is added to this process's environment.

    ``timeout`` is in seconds. Raises CommandError when the time is up, when the program does not exist and, with
    ``check``, when it exits non-zero.
    """
    words = [str(word) for word in command]
    shown = " ".join(words)
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandError(f"{words[0]} is not installed (needed for: {shown})") from error
    except subprocess.TimeoutExpired as error:
        printed = b"\n".join(part for part in (error.stdout, error.stderr) if isinstance(part, bytes))
        raise CommandError(f"no end after {timeout:g} s: {shown}\n{_tail(printed.decode(errors='replace'))}") from error
    if check and done.returncode != 0:
        raise CommandError(f"exit code {done.returncode}: {shown}\n{_tail(done.stdout + done.stderr)}")
    return done


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say on stderr that a long step begins, and how long it took. Stdout is for results."""
    print(f"▸ {what}", file=sys.stderr, flush=True)
    begin = time.monotonic()
    yield
    print(f"  {what}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)


def wait_until(what: str, ready: Callable[[], object], *, timeout: float, interval: float = 0.5) -> None:
    """Call ``ready`` every ``interval`` seconds until it returns something true.

    ``ready`` may raise CommandError, which counts as "not yet". Raises CommandError with its last answer after
    ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    last: object = None
    while True:
        try:
            last = ready()
            if last:
                return
        except CommandError as error:
            last = error
        if time.monotonic() >= deadline:
            raise CommandError(f"not within {timeout:g} s: {what}. Last answer: {last}")
        time.sleep(interval)
