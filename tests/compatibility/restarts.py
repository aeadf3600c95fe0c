"""Kills rank 1 of a program in the middle, and compares the life after that with a new start from the same files."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.compatibility.prepare import Prepared
from tests.compatibility.programs import Program, Restart
from tests.compatibility.runs import RANKS, Start, losses, working_directory

_STEP = 3
_NEXT_LIFE = "rank-*.life-2.log"
_ENVIRONMENT = {"DDPJOB_INPLACE_RESTARTS": "1", "DDPJOB_UID": "compatibility", "DDPJOB_ATTEMPT": "1"}


@dataclass(frozen=True)
class Restarted:
    """What followed the kill.

    Attributes:
        code: the launchers' exit code; None if they were killed when their time was over.
        report: node 0's termination report.
        output: what was printed if the program ended before rank 1 could be killed.
        was_killed: whether rank 1 has made its steps, and was killed.
        has_checkpoint: whether there was one to continue from.
        ran_after, stepped_after: seconds from the kill until the ranks were started, and all had made a step.
        losses: of the next life, sorted.
        new_start: the losses of a new start by torchrun, from the files as the kill left them.
    """

    code: int | None
    report: Mapping[str, Any]
    output: str = ""
    was_killed: bool = True
    has_checkpoint: bool = True
    ran_after: float | None = None
    stepped_after: float | None = None
    losses: Sequence[str] = ()
    new_start: Sequence[str] = ()


def restarted(program: Program, prepared: Prepared, folder: Path, limit: float) -> Restarted:
    """Run the program in the empty ``folder``; each start of it may take ``limit`` seconds."""
    how = program.restart or Restart("", checkpoint="", step=_STEP, count=program.count)
    first = replace(program, arguments=f"{program.arguments} {how.first}")
    program = replace(
        program, arguments=f"{program.arguments.replace(how.without, '')} {how.adds}", count=how.count,
        losses=how.losses or program.losses, endless=program.endless and program.restart is None,
    )  # fmt: skip
    works = _working_directories(program, prepared, folder / "nodes", how)
    if how.first:
        _start_anew(first, prepared, folder / "first", works, limit)
    (folder / "times").mkdir()
    variables = {
        "COMPATIBILITY_FAULT": f"stop:{how.step}", "COMPATIBILITY_TIMES": str(folder / "times"), **_ENVIRONMENT,
    }  # fmt: skip
    flags = (f"--log-dir={folder / 'logs'}",)
    with Start(program, prepared, "ddprun", folder, works, flags=flags, variables=variables) as started:
        found = next((pids for _ in started.until(limit) if (pids := _stopped(started))), None)
        if found is None:
            return Restarted(started.code(), started.report(), started.output(), was_killed=False)
        # Meanwhile the other rank waits for the stopped one: it saves no checkpoint.
        copies = _copied(works, folder / "new")
        killed = time.clock_gettime(time.CLOCK_BOOTTIME)
        _kill(*found)
        _finish(started, program, works[0], _NEXT_LIFE, limit)
        code = started.code()
    ran_after, stepped_after = _times(folder / "times", killed)
    return Restarted(
        code,
        started.report(),
        has_checkpoint=all((copy / how.checkpoint).exists() for copy in copies),
        ran_after=ran_after,
        stepped_after=stepped_after,
        losses=losses(program, works[0], started.logged(_NEXT_LIFE)),
        new_start=_start_anew(program, prepared, folder / "new-start", copies, limit),
    )


def _working_directories(program: Program, prepared: Prepared, folder: Path, how: Restart) -> list[Path]:
    works = []
    for node in range(how.nodes):
        (folder / str(node)).mkdir(parents=True)
        works.append(working_directory(program, prepared, folder / str(node)))
        for name, text in how.files.items():
            (works[-1] / name).write_text(text)
    return works


def _copied(works: Sequence[Path], folder: Path) -> list[Path]:
    """Return copies of the working directories, with what is beside them."""
    for work in works:
        shutil.copytree(work.parent, folder / work.parent.name, symlinks=True)
    return [folder / work.parent.name / work.name for work in works]


def _start_anew(program: Program, prepared: Prepared, folder: Path, works: Sequence[Path], limit: float) -> list[str]:
    """Run the program under torchrun, and return its losses."""
    folder.mkdir()
    with Start(program, prepared, "torchrun", folder, works) as started:
        _finish(started, program, works[0], "std*.log", limit)
    return losses(program, works[0], started.logged("std*.log"))


def _finish(started: Start, program: Program, work: Path, files: str, limit: float) -> None:
    """Wait until the program has ended; stop a program without an end when it has printed enough losses."""
    for _ in started.until(limit):
        if program.endless and len(losses(program, work, started.logged(files))) >= program.count:
            started.stop()


def _stopped(started: Start) -> tuple[int, int] | None:
    """Return the process of a rank, and the stopped process: the rank's own, or a process that it has started."""
    ranks = (rank for launcher in started.launchers for rank in _children(launcher.pid))
    return next(((rank, pid) for rank in ranks for pid in _with_descendants(rank) if _is_stopped(pid)), None)


def _kill(rank: int, stopped: int) -> None:
    """Kill the rank. A process that it has started goes on: while it is stopped, only SIGKILL would end it."""
    os.kill(rank, signal.SIGKILL)
    if stopped != rank:
        os.kill(stopped, signal.SIGCONT)


def _with_descendants(pid: int) -> Iterator[int]:
    yield pid
    for child in _children(pid):
        yield from _with_descendants(child)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _times(folder: Path, killed: float) -> tuple[float | None, float | None]:
    """Return the seconds from the kill until all ranks were started, and until all had made a step."""
    found = [tuple(map(float, path.read_text().split())) for path in folder.iterdir() if not path.suffix]
    if len(found) < RANKS:
        return None, None
    return max(started for started, _ in found) - killed, max(stepped for _, stepped in found) - killed
