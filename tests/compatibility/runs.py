"""Runs a program with two ranks under torchrun or ddprun, in a working directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

from tests.compatibility.prepare import Prepared
from tests.compatibility.programs import Checkout, Program
from tests.processes import end, free_port, spawn

RANKS = 2
_INTERVAL = 0.2
_GRACE = 60.0
_LIMIT = 600.0
"""Seconds for one run."""
Launcher = Literal["torchrun", "ddprun"]


@dataclass
class Outcome:
    """What one run did.

    Attributes:
        code: the exit code of the launcher; None if the run was killed when its time was over.
        losses: all that match, sorted, because two ranks print in any order.
        report: the termination report; empty under torchrun.
        shown: the largest step that GET /progress has shown.
    """

    code: int | None
    losses: list[str] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    shown: int = 0
    output: str = ""


class Start:
    """A start of a program in a working directory.

    Attributes:
        port: of GET /progress.
    """

    def __init__(self, command: Sequence[str], folder: Path, work: Path, variables: Mapping[str, str]) -> None:
        self.port, self._folder = free_port(), folder
        env = {name: value for name, value in os.environ.items() if not name.startswith(("DDP", "PET_", "TORCH"))}
        env |= {
            "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "huggingface"), "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1", "DDPJOB_PROGRESS_PORT": str(self.port),
            "DDPJOB_TERMINATION_LOG": str(folder / "end"), **variables,
        }  # fmt: skip
        self.launcher = spawn(["env", "-C", str(work), *command], folder / "log", env)

    def __enter__(self) -> Start:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.launcher, _GRACE)

    def stop(self) -> None:
        """Stop the launcher by SIGTERM."""
        self.launcher.terminate()
        self.launcher.wait(_GRACE)

    def until(self, limit: float) -> Iterator[None]:
        """Yield a few times a second until the launcher has ended or the seconds are over."""
        until = time.monotonic() + limit
        while self.launcher.poll() is None and time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.launcher.wait(_INTERVAL)
            yield

    def output(self) -> str:
        """Return what the launcher and, of torchrun, the ranks have printed."""
        paths = [self._folder / "log", *sorted((self._folder / "logs").rglob("std*.log"))]
        return "".join(path.read_text(errors="replace") for path in paths)

    def report(self) -> dict[str, Any]:
        """Return the termination report; empty under torchrun."""
        path = self._folder / "end"
        return dict(json.loads(path.read_text())) if path.exists() else {}


def _command(program: Program, prepared: Prepared, launcher: Launcher, folder: Path, *flags: str) -> list[str]:
    source = program.source
    if launcher == "torchrun":  # a file for each rank, because the lines of two ranks can mix on one stream
        flags = ("--standalone", "--redirects=3", f"--log-dir={folder / 'logs'}", *flags)
    start = [str(prepared.checkout(source) / source.script)] if isinstance(source, Checkout) else ["-m", source.module]
    module = {"torchrun": "torch.distributed.run", "ddprun": "ddprun"}[launcher]
    ranks, arguments = f"--nproc-per-node={RANKS}", shlex.split(program.arguments)
    return [str(prepared.python), "-m", module, ranks, *flags, *start, *arguments]


def run(program: Program, prepared: Prepared, launcher: Launcher, folder: Path, *flags: str, fault: str) -> Outcome:
    """Run the program in the empty ``folder`` until it ends, has printed enough losses, or the seconds are over."""
    work, shown = working_directory(prepared, folder), 0
    command = _command(program, prepared, launcher, folder, *flags)
    with Start(command, folder, work, {"COMPATIBILITY_FAULT": fault, **program.variables}) as started:
        for _ in started.until(_LIMIT):
            shown = max(shown, _shown_step(started.port) if launcher == "ddprun" else 0)
            if program.endless and not fault and len(losses(program, work, started.output())) >= program.count:
                started.stop()
        code = started.launcher.poll()
    output = started.output()
    return Outcome(code, losses(program, work, output), started.report(), shown, output)


def losses(program: Program, work: Path, output: str) -> list[str]:
    """Return the losses in the output, or in the newest file that the program has written for them, sorted."""
    files = sorted(work.glob(program.losses_file)) if program.losses_file else []
    text = output if not program.losses_file else files[-1].read_text() if files else ""
    return sorted(re.findall(program.losses, text))


def working_directory(prepared: Prepared, folder: Path) -> Path:
    """Return a new working directory with the inputs; the data is beside it, too, where some programs look for it."""
    work = folder / "work"
    work.mkdir()
    for path in prepared.inputs.iterdir():
        (work / path.name).symlink_to(path)
    (folder / "data").symlink_to(prepared.inputs / "data")
    return work


def _shown_step(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=2) as answer:
            return int(json.load(answer).get("step") or 0)
    except (OSError, HTTPException):  # it is not open yet, or no longer
        return 0
