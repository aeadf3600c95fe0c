"""Carries out ``ddpjob run``: prepares the job, runs a session, and reports it. Imported only when a job runs."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from ddpjob.api.objects import Json
from ddpjob.cli.jobfile import dump_yaml
from ddpjob.cli.logs import LogReader
from ddpjob.cli.options import Request
from ddpjob.cli.output import Display, JsonDisplay, PlainDisplay, guarded
from ddpjob.cli.prepare import Prepared, differences, digits_if_offline, prepare, require_programs, runs_ddptrain
from ddpjob.cli.snapshot import take_snapshot
from ddpjob.cli.summary import RunResult
from ddpjob.cli.text import one_line
from ddpjob.local.pod_process import Machine
from ddpjob.local.references import References
from ddpjob.local.session import Session

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUT_SECONDS = 0.2


def execute(request: Request) -> int:
    """Run the job, or with ``dry_run`` only print it. Return the exit code. Raises ``LocalError``."""
    prepared = prepare(request)
    if request.dry_run:
        return _dry_run(request, prepared)
    require_programs(prepared.admitted)
    stop = _Stop()
    stdout = guarded(sys.stdout, lambda: stop.request(signal.SIGPIPE))
    begin = time.monotonic()
    with _display(request.output, stdout) as display:
        stop.say = display.note
        job = _run(request, prepared, stop, display)
        result = RunResult(job, prepared.paths, time.monotonic() - begin, request.again, stop.number)
        display.end(result)
    if request.output == "yaml":
        print(dump_yaml(job), end="", file=stdout)
    stdout.flush()
    return result.exit_code


def _run(request: Request, prepared: Prepared, stop: "_Stop", display: Display) -> Json:
    """Run the job until it has ended; return it."""

    def warn(line: str) -> None:
        display.note(line, loud=True)

    for note in prepared.notes:
        display.note(note)
    for warning in prepared.warnings:
        warn(warning)
    admitted, paths = prepared.admitted, prepared.paths
    if request.digits_if_offline:
        admitted = digits_if_offline(admitted, paths, fresh=request.fresh, say=display.note, warn=warn)
    output = LogReader(paths.record, lambda rank, line: display.output(line), node=0)
    job_runs = asyncio.Event()  # until then the record is that of an earlier run

    def on_change(job: Json, pods: Sequence[Json]) -> None:
        display.show(take_snapshot(job, pods))
        job_runs.set()

    async def show_output() -> None:
        await job_runs.wait()
        while True:
            output.read()
            await asyncio.sleep(_OUTPUT_SECONDS)

    async def run() -> Json:
        references = References(prepared.file.others, admitted.job.namespace)
        machine = Machine(paths, references, prepared.file.directory)
        session = Session(
            admitted=admitted, machine=machine, on_change=on_change, say=display.note, fresh=request.fresh
        )
        for line in differences(admitted, paths):
            display.note(line)
        if runs_ddptrain(admitted):  # it reports its progress itself
            return await stop.run(session)
        reading = asyncio.create_task(show_output(), name="output")
        try:
            return await stop.run(session)
        finally:
            reading.cancel()
            if job_runs.is_set():
                output.read(to_the_end=True)

    return asyncio.run(run())


def _dry_run(request: Request, prepared: Prepared) -> int:
    """Print the objects that a cluster would hold, the user's ConfigMaps included and Secrets excluded."""
    shown = [other for other in prepared.file.others if other.get("kind") != "Secret"]
    objects = [*prepared.admitted.manifests(), *shown]
    notes = [one_line(note) for note in prepared.notes]
    if len(shown) < len(prepared.file.others):
        notes.append("Secrets are left out")
    if request.digits_if_offline:
        notes.append("--digits-if-offline takes effect when the job runs, not here")
    for note in notes:
        print(f"· {note}", file=sys.stderr)
    if request.output == "json":
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    else:
        print(dump_yaml(*objects), end="")
    return 0


def _display(output: str | None, stdout: TextIO) -> Display:
    if output == "json":
        return JsonDisplay(stdout)
    if output == "yaml":
        return PlainDisplay(guarded(sys.stderr))
    if output == "table" or (output is None and stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")):
        from rich.console import Console

        from ddpjob.cli.live import LiveDisplay

        return LiveDisplay(Console(file=stdout, highlight=False, emoji=False, markup=False))
    return PlainDisplay(stdout)


class _Stop:
    """The first signal suspends the job, so that the trainer saves; the second kills it."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.say: Callable[[str], None] = lambda line: None
        self._session: Session | None = None
        self._running: asyncio.Task[Json] | None = None

    async def run(self, session: Session) -> Json:
        """Run the session. Return the job in its last state, also after a second signal killed it."""
        self._session = session
        if self.number is not None:
            session.stop()
        self._running = asyncio.create_task(session.run(), name="session")
        with self._on_signals():
            try:
                return await self._running
            except asyncio.CancelledError:
                if self.number is None:
                    raise
                return session.job

    def request(self, number: int) -> None:
        """Suspend the job at the first call, kill it at the second."""
        if self.number is None:
            self.number = number
            if self._session is not None:
                self._session.stop()
            name = signal.Signals(number).name
            self.say(f"{name}: waiting for the trainer to save and exit; send it again to kill the job")
        elif self._running is not None and number != signal.SIGPIPE:
            self.say("killing all processes of the job")
            self._running.cancel()

    @contextlib.contextmanager
    def _on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # A signal that is ignored stays ignored: nohup starts programs with SIGHUP ignored.
        handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in handled:
            loop.add_signal_handler(number, self.request, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
