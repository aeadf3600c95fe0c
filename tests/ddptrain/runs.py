"""Builders for the process tests: start ``ddptrain``, watch it, signal it, and read its files."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddprun.checkpoint_files import newest_valid
from tests.metrics import effective_rows
from tests.processes import free_port

PATIENCE = 300.0  # seconds; only a hang takes that long, even on a busy machine


def wait_until(condition: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Wait for the condition's first true value and return it. A condition may be what makes its own progress."""
    end = time.monotonic() + patience
    while not (value := condition()):
        assert time.monotonic() < end, f"timed out after {patience:.0f} s: {what}"
        time.sleep(0.01)
    return value


@dataclass
class Run:
    """One ``ddptrain`` process started by the fork server."""

    pid: int
    log: Path
    termination_log: Path
    progress_port: int

    @property
    def ended(self) -> bool:
        return Path(f"{self.log}.code").exists()

    def wait(self) -> int:
        """Wait for the process to end and return its exit code; negative for a signal."""
        with contextlib.suppress(AssertionError):
            wait_until(lambda: self.ended, "the process to end")
        if not self.ended:
            os.killpg(self.pid, signal.SIGKILL)
            raise AssertionError(f"hung:\n{self.output()}")
        return int(Path(f"{self.log}.code").read_text())

    def stop(self) -> None:
        """Send SIGTERM, as the kubelet does."""
        os.kill(self.pid, signal.SIGTERM)

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def message(self) -> dict[str, Any]:
        """Return the termination message."""
        content = self.termination_log.read_bytes()
        assert len(content) <= 4096
        message: dict[str, Any] = json.loads(content)
        assert message["schema"] == 3
        return message

    def progress(self) -> dict[str, Any] | None:
        """Return the answer to GET /progress; None while the port is closed, and if the answer is cut."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.progress_port}/progress", timeout=2) as answer:
                return dict(json.load(answer))
        except (OSError, HTTPException):
            return None

    def at_step(self, step: int) -> dict[str, Any]:
        """Wait until ``step`` steps are completed and return the progress report."""

        def reached() -> dict[str, Any] | None:
            assert not self.ended, f"ended before step {step}:\n{self.output()}"
            now = self.progress()
            return now if now and now["step"] >= step else None

        return dict(wait_until(reached, f"step {step}"))

    def ranks(self) -> dict[int, int]:
        """Return the pids of the launcher's ranks: unlike its other children they have process groups of their own."""
        children = map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())
        return dict(enumerate(sorted(pid for pid in children if _leads_a_group(pid))))  # forked in order of rank


def _leads_a_group(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid) == pid
    return False


class ForkServer:
    """The fork server's process, which starts commands."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ddptrain.forkserver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        self._runs: list[Run] = []
        self._lock = threading.Lock()
        assert self._readline() == "ready"

    @property
    def pid(self) -> int:
        """The parent of all commands."""
        return self._process.pid

    def start(self, *argv: object, env: Mapping[str, object] | None = None, **options: Any) -> Run:
        """Start ``ddptrain ARGV`` with an environment of ``env`` and the variables that every test needs.

        Threads may call it at the same time.

        Args:
            options: ``first``: Python to execute before the program. ``mutant``: errors of ``mutants`` to inject, with
                commas between them. ``module``: run this module or script as a program, in place of ``ddptrain``.
                ``preload``: modules that the server imports before it forks. ``streams``: the paths of stdout and
                stderr, None for a closed stream; by default both are the run's log.
        """
        log = self._folder / f"{next(self._count)}.log"
        run = Run(0, log, log.with_suffix(".termination"), free_port())
        base: dict[str, object] = {
            "PATH": os.environ["PATH"],
            "TMPDIR": self._folder,  # for the metrics of a run without a checkpoint directory
            "OMP_NUM_THREADS": 1,
            "DDPJOB_TERMINATION_LOG": run.termination_log,
            "DDPJOB_PROGRESS_PORT": run.progress_port,
        }
        merged = {key: str(value) for key, value in (base | dict(env or {})).items()}
        defaults = {"first": "", "mutant": "", "module": "", "preload": [], "streams": []}
        assert options.keys() <= defaults.keys()
        request = {"argv": [str(a) for a in argv], "env": merged, "log": str(log), **defaults, **options}
        request["module"] = str(request["module"])
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            run.pid = int(self._readline())
        self._runs.append(run)
        return run

    def run(self, *argv: object, code: int = 0, env: Mapping[str, object] | None = None, **options: Any) -> Run:
        """Start the command, wait, and assert that its exit code is ``code``. ``options`` are those of ``start``."""
        run = self.start(*argv, env=env, **options)
        got = run.wait()
        assert got == code, f"exit code {got}, wanted {code}:\n{run.output()}"
        return run

    def clean(self) -> None:
        """Kill the process groups that a failed test left running."""
        for run in self._runs:
            if not run.ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)
        self._runs.clear()

    def close(self) -> None:
        self.clean()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _readline(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class Trained(NamedTuple):
    """A training that has ended: its checkpoint directory, and its termination message."""

    folder: Path
    message: dict[str, Any]


Whole = Callable[..., Trained]
Lesson = Callable[..., str]


@contextlib.contextmanager
def fork_server(folder: Path) -> Iterator[ForkServer]:
    server = ForkServer(folder)
    try:
        yield server
    finally:
        server.close()


def final_weights(checkpoint_dir: Path) -> dict[str, torch.Tensor]:
    """Return the model of the newest checkpoint, which must be of a finished run."""
    found = newest_valid(checkpoint_dir, lambda path, reason: None)
    assert found is not None
    assert found[0].manifest["complete"]
    state: dict[str, torch.Tensor] = torch.load(io.BytesIO(found[1]), weights_only=True)["model"]
    return state


def losses(checkpoint_dir: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of every effective step."""
    return [(row["step"], row["loss"]) for row in effective_rows(checkpoint_dir, "train")]


def assert_same_end(one: Path, other: Path) -> None:
    """Assert bit-identical weights and equal losses at every step."""
    mine, theirs = final_weights(one), final_weights(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), f"{name} differs by {(value - theirs[name]).abs().max():g}"
    assert losses(one) == losses(other)
