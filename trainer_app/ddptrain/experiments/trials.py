"""Runs of whole ``ddptrain`` commands, for ``compare`` and ``bench``.

Commands are forked from this process, so that none imports torch again. As in the launcher, this process must therefore
run no tensor operation before its last fork.
"""

import dataclasses
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from ddprun.errors import TrainerError
from ddprun.reporting.metrics import effective_rows
from ddprun.resources import visible_gpus
from ddprun.signals import die_with_parent, stop_signals
from ddptrain.config import Config
from ddptrain.program import preload

# Variables of the caller's environment that would change a trial.
_DROPPED_PREFIXES = ("DDPTRAIN_", "DDPJOB_", "PET_", "TORCHELASTIC_")
_DROPPED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES")

_TAIL = 12  # lines of output quoted for a trial that failed
_TIMEOUT = 3600  # seconds for a cold run
_WARM_UP_STEPS = 20  # not counted in the samples per second


class TrialFailed(TrainerError):  # noqa: N818
    """A trial ended with an unexpected exit code, or did not end."""


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
        """Return the loss of each step."""
        return {row["step"]: row["loss"] for row in effective_rows(self.checkpoints, "train")}


class Trials:
    """Runs commands in folders below ``folder``, one at a time.

    Args:
        main: runs one command line of ddptrain and returns its exit code; called in a forked child.
    """

    def __init__(self, folder: Path, main: Callable[[Sequence[str]], int], env: Mapping[str, str] = os.environ) -> None:
        self.folder, self._main = folder, main
        kept = {k: v for k, v in env.items() if not k.startswith(_DROPPED_PREFIXES) and k not in _DROPPED}
        self.env = kept | {"DDPJOB_TERMINATION_LOG": str(folder / "termination")}
        preload(ddp=True)

    def train(self, name: str, world_size: int, *flags: object, code: int = 0) -> Trial:
        """Train in ``folder/name``, resuming what is there; raises as ``run``."""
        trial = Trial(self.folder / name)
        folders = ["--checkpoint-dir", trial.checkpoints, "--audit", trial.audit]
        self.run([*verb(world_size), *flags, *folders], trial.folder, code=code)
        return trial

    def run(self, argv: Sequence[object], folder: Path, *, code: int = 0) -> tuple[float, float]:
        """Run one command of ``ddptrain`` with its output in ``folder/log``. Returns elapsed seconds and CPU seconds.

        Raises:
            TrialFailed: its exit code is not ``code``; the end of its output is quoted.
        """
        got, *seconds = self._fork(lambda: self._main([str(argument) for argument in argv]), folder)
        if got != code:
            raise _failed(argv, f"ended with {got}, not {code}", (folder / "log").read_text(errors="replace"))
        return seconds[0], seconds[1]

    def run_cold(self, module: str, argv: Sequence[object]) -> tuple[float, str]:
        """Run a module in a new interpreter. Returns the elapsed seconds, imports included, and its output.

        Raises:
            TrialFailed: it failed, or did not end within an hour; the end of its output is quoted.
        """
        command, started = [sys.executable, "-m", module, *map(str, argv)], time.perf_counter()
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_TIMEOUT, env=self.env, check=False
            )
        except subprocess.TimeoutExpired as error:
            output = (error.output or b"").decode(errors="replace")
            raise _failed(argv, f"did not end within {_TIMEOUT} s", output) from error
        if done.returncode != 0:
            raise _failed(argv, f"ended with {done.returncode}, not 0", done.stdout.decode(errors="replace"))
        return time.perf_counter() - started, done.stdout.decode(errors="replace")

    def call(self, work: Callable[[], dict[str, Any]], name: str) -> dict[str, Any]:
        """Return the JSON-able result of ``work``, which runs in a forked process.

        Raises:
            TrialFailed: it raised; the end of its output is quoted.
        """
        folder = self.folder / name

        def child() -> int:
            (folder / "result.json").write_text(json.dumps(work()))
            return 0

        if (code := self._fork(child, folder)[0]) != 0:
            raise _failed([name], f"ended with {code}, not 0", (folder / "log").read_text(errors="replace"))
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return result

    def _fork(self, work: Callable[[], int], folder: Path) -> tuple[int, float, float]:
        """Run ``work`` in a forked child. Returns its exit code, elapsed seconds, and CPU seconds of its processes."""
        folder.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()

        def child() -> NoReturn:
            die_with_parent(parent)
            descriptor = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.environ.clear()
            os.environ.update(self.env)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            sys.exit(work())

        process = multiprocessing.get_context("fork").Process(target=child)
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        # Python drops what a handler raises in the functions that it calls at a fork, and the trials would go on. To
        # block the signals is not enough: another thread may take them.
        came: list[int] = []
        handlers = {number: signal.signal(number, lambda n, _frame: came.append(n)) for number in stop_signals()}
        try:
            try:
                process.start()
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
            for each in came:
                signal.raise_signal(each)
            # It does not reap: the number stays the child's.
            os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOWAIT)
        except BaseException:  # a signal: the folder is about to be removed, so nothing may write to it
            if process.pid is not None:
                process.kill()
                process.join()
            raise
        process.join()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert process.exitcode is not None
        return process.exitcode, time.perf_counter() - started, cpu_seconds


def _failed(argv: Sequence[object], how: str, output: str) -> TrialFailed:
    tail = "\n".join(output.splitlines()[-_TAIL:])
    return TrialFailed(f"`ddptrain {' '.join(map(str, argv))}` {how}:\n{tail}", next_step="run that command alone")


def verb(world_size: int) -> list[object]:
    """Return the start of a command that trains with ``world_size`` ranks on this machine."""
    return ["train"] if world_size == 1 else ["launch", "--nproc-per-node", world_size]


def on_one_device(config: Config, worlds: Sequence[int]) -> Config:
    """Return the config with a device that every trial uses: GPUs only if there is one for each rank.

    With ``--device auto``, a trial with more ranks than GPUs would run on the CPU, and could not be compared.
    """
    if config.device != "auto":
        return config
    enough = torch.version.cuda is not None and visible_gpus() >= max(worlds)
    return dataclasses.replace(config, device="cuda" if enough else "cpu")


def data_flags(config: Config) -> list[object]:
    """Return the flags of the configured data set."""
    return ["--data", config.data, *(["--data-dir", config.data_dir] if config.data_dir else [])]


def speed(path: Path, batch: int) -> float:
    """Return a run's samples per second in the first epoch, from the times of its metrics rows.

    Raises:
        TrialFailed: the epoch has too few steps.
    """
    rows = [row for row in effective_rows(path, "train") if row["epoch"] == 0]
    for counted in (rows[min(_WARM_UP_STEPS, len(rows) // 2) :], rows):
        # Steps whose losses were read together have the same time: those of the first read began before it.
        later = [row for row in counted if row["time"] > counted[0]["time"]]
        if later:
            return len(later) * batch / float(later[-1]["time"] - counted[0]["time"])
    raise TrialFailed("an epoch has too few steps to give a speed", next_step="use a smaller --batch-size")
