"""Run the programs that build the test cluster, each with a time limit, and report progress on stderr."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.processes import die_with_parent

_TAIL_LINES = 40
_PROGRESS_SECONDS = 30.0


class CommandError(RuntimeError):
    """A program failed or ran out of time. The message holds the command and the end of its output."""


def run(
    command: Sequence[str | Path],
    *,
    timeout: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` and return the completed process; ``env`` is added to this process's environment.

    ``timeout`` is in seconds. Raises CommandError on a timeout, if the program does not exist and, with ``check``, on
    a non-zero exit code.
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
            preexec_fn=die_with_parent,  # a build must not go on, unlocked, after this process was killed
        )
    except FileNotFoundError as error:
        raise CommandError(f"{words[0]} is not installed (needed for: {shown})") from error
    except subprocess.TimeoutExpired as error:
        printed = b"\n".join(part for part in (error.stdout, error.stderr) if isinstance(part, bytes))
        raise CommandError(
            f"timed out after {timeout:g} s: {shown}\n{_tail(printed.decode(errors='replace'))}"
        ) from error
    if check and done.returncode != 0:
        raise CommandError(f"exit code {done.returncode}: {shown}\n{_tail(done.stdout + done.stderr)}")
    return done


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])


@contextmanager
def step(what: str) -> Iterator[None]:
    """Report a long step on stderr: its start, the time so far every 30 seconds, and how long it took.

    Stdout is for results.
    """
    print(f"▸ {what}", file=sys.stderr, flush=True)
    begin = time.monotonic()
    finished = threading.Event()

    def report() -> None:
        while not finished.wait(_PROGRESS_SECONDS):
            print(f"  {what}: {time.monotonic() - begin:.0f} s so far", file=sys.stderr, flush=True)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    outcome = "stopped"
    try:
        yield
        outcome = "done"
    finally:
        finished.set()
        reporter.join()
        print(f"  {what}: {outcome} after {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)


def wait_until(what: str, ready: Callable[[], object], *, timeout: float, interval: float = 0.5) -> None:
    """Call ``ready`` every ``interval`` seconds until it returns a true value.

    A CommandError from ``ready`` counts as "not yet". Raises CommandError with the last result after ``timeout``
    seconds.
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
            raise CommandError(f"timed out after {timeout:g} s: {what}. Last result: {last}")
        time.sleep(interval)
