"""Whole runs of ``ddptrain`` as experiments: real commands in real processes, forked so that none imports torch anew.

``compare`` and ``bench`` start them and read what they leave in their directories. As in ``launch``, the process that
forks must run no tensor operation before it has forked for the last time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ddptrain import exit_codes
from ddptrain.errors import TrainerError
from ddptrain.launcher.launcher import preload
from ddptrain.reporting.metrics import FILE_NAME, effective_rows
from ddptrain.signals import die_with_parent

# What would change a trial behind its command's back.
_FOREIGN = ("DDPTRAIN_", "DDPJOB_", "PET_", "TORCHELASTIC_")
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES")

_TAIL = 12  # lines of its output that tell why a trial failed
_LONGEST = 3600  # seconds; a trial that hangs must fail
_UNCOUNTED = 20  # first steps of a run that its samples per second leave out


class TrialFailed(TrainerError):  # noqa: N818
    """A trial ended otherwise than it should."""


@dataclass(frozen=True)
class Cost:
    """What a trial took: seconds by the clock, and of processors, its ranks' included."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Trial:
    """One run's directory: its checkpoints, metrics and audit."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def audit(self) -> Path:
        return self.folder / "audit"

    def losses(self) -> dict[int, float]:
        """Step to loss."""
        return {row["step"]: row["loss"] for row in effective_rows(self.checkpoints / FILE_NAME, "train")}


class Trials:
    """Runs commands below ``folder``, one at a time.

    Args:
        main: runs one command line of ddptrain and returns its exit code; called in a forked child.
    """

    def __init__(self, folder: Path, main: Callable[[Sequence[str]], int], env: Mapping[str, str] = os.environ) -> None:
        self._folder, self._main = folder, main
        kept = {k: v for k, v in env.items() if not k.startswith(_FOREIGN) and k not in _RANK_VARIABLES}
        self.env = kept | {"DDPJOB_TERMINATION_LOG": str(folder / "termination")}
        preload()

    def train(self, name: str, world_size: int, *flags: object, code: int = 0) -> Trial:
        """Train in ``folder/name``; a trial that is there already goes on.

        Args:
            code: the exit code that it must have.
        Raises:
            TrialFailed: another one; the end of its output is quoted.
        """
        trial = Trial(self._folder / name)
        verb = ["train"] if world_size == 1 else ["launch", "--nproc-per-node", world_size]
        places = ["--checkpoint-dir", trial.checkpoints, "--audit", trial.audit]
        self.run([*verb, *flags, *places], trial.folder, code=code)
        return trial

    def run(self, argv: Sequence[object], folder: Path, *, code: int = 0) -> Cost:
        """Run one command of ``ddptrain`` with its output in ``folder/log``."""

        def command() -> int:
            return self._main([str(word) for word in argv])

        got, cost = self._fork(command, folder)
        if got != code:
            raise _failed(argv, f"ended with {got}, not {code}", (folder / "log").read_text(errors="replace"))
        return cost

    def run_cold(self, argv: Sequence[object]) -> float:
        """Seconds of one command of ``ddptrain`` in a fresh interpreter, which has everything to import.

        Raises:
            TrialFailed: it failed, or did not end within the hour; the end of its output is quoted.
        """
        command, started = [sys.executable, "-m", "ddptrain", *map(str, argv)], time.perf_counter()
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_LONGEST, env=self.env, check=False
            )
        except subprocess.TimeoutExpired as error:
            said = (error.output or b"").decode(errors="replace")
            raise _failed(argv, f"did not end within {_LONGEST} s", said) from error
        if done.returncode != 0:
            raise _failed(argv, f"ended with {done.returncode}, not 0", done.stdout.decode(errors="replace"))
        return time.perf_counter() - started

    def call(self, work: Callable[[], dict[str, Any]], name: str) -> dict[str, Any]:
        """What ``work`` returns, a JSON-able dict, from a process of its own.

        Raises:
            TrialFailed: it raised; the end of its output is quoted.
        """
        folder = self._folder / name

        def child() -> int:
            (folder / "result.json").write_text(json.dumps(work()))
            return 0

        if self._fork(child, folder)[0] != 0:
            raise TrialFailed(f"{name} failed:\n{_tail((folder / 'log').read_text(errors='replace'))}")
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result

    def _fork(self, work: Callable[[], int], folder: Path) -> tuple[int, Cost]:
        """The exit code of ``work`` in a child, and what it cost."""
        folder.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        parent, started = os.getpid(), time.perf_counter()
        pid = os.fork()
        if pid == 0:
            self._become(work, folder / "log", parent)
        try:
            _, status, used = os.wait4(pid, 0)
        except BaseException:  # a signal: nothing must write on into a folder that is about to be removed
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        cost = Cost(time.perf_counter() - started, used.ru_utime + used.ru_stime)
        return os.waitstatus_to_exitcode(status), cost

    def _become(self, work: Callable[[], int], log: Path, parent: int) -> NoReturn:
        code = exit_codes.USER_ERROR
        try:
            die_with_parent(parent)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.environ.clear()
            os.environ.update(self.env)
            code = work()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _failed(argv: Sequence[object], how: str, output: str) -> TrialFailed:
    return TrialFailed(
        f"`ddptrain {' '.join(map(str, argv))}` {how}:\n{_tail(output)}", next_step="run that command by itself"
    )


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_TAIL:])


def speed(path: Path, batch: int) -> float:
    """Samples per second between two steps of a run, what lies between steps included.

    The first epoch alone: at its end lies an evaluation.
    """
    rows = [row for row in effective_rows(path, "train") if row["epoch"] == 0]
    counted = rows[min(_UNCOUNTED, len(rows) // 2) :]
    seconds = float(counted[-1]["time"] - counted[0]["time"])
    return (len(counted) - 1) * batch / max(seconds, 0.001)  # the rows' times have milliseconds
