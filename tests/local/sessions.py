"""Sessions in this process, and in a separate process that can be killed: ``python -m tests.local.sessions``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob.api.objects import Json
from ddpjob.local.admission import admit
from ddpjob.local.pod_process import Machine
from ddpjob.local.references import References
from ddpjob.local.session import Session
from ddpjob.local.state import HostPaths, JobFolder, StateFolder
from tests import processes
from tests.local.bench import marked
from tests.processes import eventually_async, spawn

PATIENCE = 120.0


@dataclass
class Run:
    """A running session and what it showed."""

    task: asyncio.Task[Json]
    session: Session
    said: list[str]
    shown: list[tuple[Json, Sequence[Json]]]
    folder: JobFolder

    @property
    def status(self) -> Json:
        """The status that was shown last."""
        status: Json = (self.shown[-1][0].get("status") or {}) if self.shown else {}
        return status

    def log(self, attempt: int, rank: int = 0) -> str:
        found = list(self.folder.path.glob(f"pods/*-{attempt}-{rank}/trainer.log"))
        return found[0].read_text() if found else ""

    async def until(self, what: str, holds: Callable[[], object]) -> None:
        """Wait until ``holds``; fail if the session ends before."""
        await eventually_async(what, lambda: holds() or self.task.done(), timeout=PATIENCE)
        if not holds():
            raise AssertionError(f"ended before {what}: {self.task.result()}")

    async def result(self) -> Json:
        return await asyncio.wait_for(self.task, PATIENCE)


@dataclass
class Place:
    """Sessions on one state folder, in this process. others: Secrets and ConfigMaps beside the jobs."""

    root: Path
    others: list[Json] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def begin(self, job: Json, *, volumes: Mapping[str, Path] | None = None, fresh: bool = False) -> Run:
        """Start a session."""
        said: list[str] = []
        shown: list[tuple[Json, Sequence[Json]]] = []
        admitted = admit(job)
        paths = HostPaths(admitted.job, StateFolder(self.root), volumes or {})
        session = Session(
            admitted=admitted,
            machine=Machine(paths, References(self.others, admitted.job.namespace)),
            on_change=lambda seen, pods: shown.append((seen, pods)),
            say=said.append,
            fresh=fresh,
        )
        self.runs.append(Run(asyncio.create_task(session.run()), session, said, shown, paths.record))
        return self.runs[-1]

    async def finish(self, job: Json, **options: Any) -> Run:
        """Run a session to its end."""
        run = self.begin(job, **options)
        await run.result()
        return run

    def let_go(self, job: str = "tiny") -> None:
        claim = StateFolder(self.root).volume("default", f"{job}-checkpoints")
        claim.mkdir(parents=True, exist_ok=True)
        (claim / "go").touch()


async def end(runs: Sequence[Run]) -> None:
    """Cancel the runs that have not ended."""
    for run in runs:
        run.task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait([run.task])


@contextmanager
def apart(state: Path, job: Json, mark: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job in a separate process; what it leaves behind, with ``mark`` in its environment, is killed at the end.

    Its output is ``session.log`` beside the state folder.
    """
    command = [sys.executable, "-m", "tests.local.sessions", str(state), json.dumps(job)]
    process = spawn(command, state.parent / "session.log")
    try:
        yield process
    finally:
        processes.end(process)
        for pid in marked(str(mark)):
            with suppress(ProcessLookupError):  # it ended by itself
                os.kill(pid, signal.SIGKILL)


def main(root: str, job: str) -> None:
    """Run a job given as JSON in the foreground; SIGINT stops it."""

    async def run() -> None:
        begun = Place(Path(root)).begin(json.loads(job))
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, begun.session.stop)
        await begun.task

    asyncio.run(run())


if __name__ == "__main__":
    main(*sys.argv[1:])
