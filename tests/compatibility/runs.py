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
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any, Literal

from tests.compatibility.prepare import INPUTS, PYTHON, checkout
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


def _command(program: Program, launcher: Launcher, folder: Path, *flags: str) -> list[str]:
    source = program.source
    if launcher == "torchrun":  # a file for each rank, because the lines of two ranks can mix on one stream
        flags = ("--standalone", "--redirects=3", f"--log-dir={folder / 'logs'}", *flags)
    start = [str(checkout(source) / source.script)] if isinstance(source, Checkout) else ["-m", source.module]
    module = {"torchrun": "torch.distributed.run", "ddprun": "ddprun"}[launcher]
    ranks, arguments = f"--nproc-per-node={RANKS}", shlex.split(program.arguments)
    return [str(PYTHON), "-m", module, ranks, *flags, *start, *arguments]


def run(program: Program, launcher: Launcher, folder: Path, *flags: str, fault: str) -> Outcome:
    """Run the program in the empty ``folder`` until it ends, has printed enough losses, or the seconds are over."""
    work, port, report = working_directory(folder), free_port(), folder / "end"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DDP", "PET_", "TORCH"))}
    env |= {
        "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "huggingface"), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
        "DDPJOB_PROGRESS_PORT": str(port), "DDPJOB_TERMINATION_LOG": str(report),
        "COMPATIBILITY_FAULT": fault, **program.variables,
    }  # fmt: skip
    shown, until = 0, time.monotonic() + _LIMIT
    process = spawn(["env", "-C", str(work), *_command(program, launcher, folder, *flags)], folder / "log", env)
    try:
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_INTERVAL)
            shown = max(shown, _shown_step(port) if launcher == "ddprun" else 0)
            if program.endless and not fault and len(losses(program, work, _output(folder))) >= program.count:
                process.terminate()
                process.wait(_GRACE)
        code = process.poll()
    finally:
        end(process, _GRACE)
    output = _output(folder)
    said = dict(json.loads(report.read_text())) if report.exists() else {}
    return Outcome(code, losses(program, work, output), said, shown, output)


def _output(folder: Path) -> str:
    """Return what the launcher and, of torchrun, the ranks have printed."""
    paths = [folder / "log", *sorted((folder / "logs").rglob("std*.log"))]
    return "".join(path.read_text(errors="replace") for path in paths)


def losses(program: Program, work: Path, output: str) -> list[str]:
    """Return the losses in the output, or in the newest file that the program has written for them, sorted."""
    files = sorted(work.glob(program.losses_file)) if program.losses_file else []
    text = output if not program.losses_file else files[-1].read_text() if files else ""
    return sorted(re.findall(program.losses, text))


def working_directory(folder: Path) -> Path:
    """Return a new working directory with the inputs; the data is beside it, too, where some programs look for it."""
    work = folder / "work"
    work.mkdir()
    for path in INPUTS.iterdir():
        (work / path.name).symlink_to(path)
    (folder / "data").symlink_to(INPUTS / "data")
    return work


def _shown_step(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=2) as answer:
            return int(json.load(answer).get("step") or 0)
    except (OSError, HTTPException):  # it is not open yet, or no longer
        return 0
