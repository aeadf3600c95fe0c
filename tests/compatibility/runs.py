"""Runs a program with two ranks under torchrun or ddprun, in a working directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
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


def command(program: Program, prepared: Prepared, launcher: Launcher, *flags: str) -> list[str]:
    """Return the command line of the program."""
    source = program.source
    if isinstance(source, Checkout):
        start = [source.script if program.in_checkout else str(prepared.checkout(source) / source.script)]
    else:
        start = ["-m", source.module]
    module = {"torchrun": "torch.distributed.run", "ddprun": "ddprun"}[launcher]
    ranks = [f"--nproc-per-node={RANKS}", *flags]
    return [str(prepared.python), "-m", module, *ranks, *start, *shlex.split(program.arguments)]


def run(
    program: Program, prepared: Prepared, launcher: Launcher, folder: Path, *flags: str, fault: str = "", limit: float
) -> Outcome:
    """Run the program in the empty ``folder`` until it ends, has printed enough losses, or the seconds are over."""
    work, logs = _working_directory(program, prepared, folder), folder / "logs"
    report, port = folder / "termination", free_port()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DDP", "PET_", "TORCH"))}
    env |= {
        "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "huggingface"), "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1", "DDPJOB_TERMINATION_LOG": str(report), "DDPJOB_PROGRESS_PORT": str(port),
        "COMPATIBILITY_FAULT": fault, **program.variables,
    }  # fmt: skip
    if launcher == "torchrun":  # a file for each rank, because the lines of two ranks can mix on one stream
        flags = ("--standalone", "--redirects=3", f"--log-dir={logs}", *flags)
    log = folder / "output.log"
    process = spawn(["env", "-C", str(work), *command(program, prepared, launcher, *flags)], log, env)

    def output() -> str:
        return "".join(path.read_text(errors="replace") for path in (log, *sorted(logs.rglob("std*.log"))))

    def losses() -> list[str]:
        found = work / program.losses_file
        text = output() if not program.losses_file else found.read_text() if found.exists() else ""
        return sorted(re.findall(program.losses, text))

    shown = 0
    try:
        for _ in _until(process, limit):
            shown = max(shown, _shown_step(port) if launcher == "ddprun" else 0)
            if program.endless and not fault and len(losses()) >= program.count:
                process.terminate()
                process.wait(_GRACE)
        ended = process.poll() is not None
    finally:
        end(process, _GRACE)
    content = json.loads(report.read_text()) if launcher == "ddprun" and report.exists() else {}
    return Outcome(process.returncode if ended else None, losses(), content, shown, output())


def _working_directory(program: Program, prepared: Prepared, folder: Path) -> Path:
    """Return a new working directory with the inputs; the data is beside it, too, where some programs look for it."""
    work = folder / "work"
    if program.in_checkout and isinstance(program.source, Checkout):
        shutil.copytree(prepared.checkout(program.source), work, ignore=shutil.ignore_patterns(".git"))
        for path in (prepared.inputs / "shakespeare_char").iterdir():
            shutil.copy(path, work / "data" / "shakespeare_char")
        return work
    work.mkdir()
    for path in prepared.inputs.iterdir():
        (work / path.name).symlink_to(path)
    (folder / "data").symlink_to(prepared.inputs / "data")
    return work


def _until(process: subprocess.Popen[bytes], limit: float) -> Iterator[None]:
    """Yield a few times a second until the process has ended or the time is over."""
    until = time.monotonic() + limit
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_INTERVAL)
        yield


def _shown_step(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/progress", timeout=2) as answer:
            return int(json.load(answer).get("step") or 0)
    except (OSError, HTTPException):  # it is not open yet, or no longer
        return 0
