"""``ddpjob run`` carried out. It brings the operator and the API's schema, so it comes late."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ddpjob.api import names
from ddpjob.cli.jobfile import dump
from ddpjob.cli.logs import LogFile
from ddpjob.cli.options import Request
from ddpjob.cli.output import Display, JsonDisplay, PipeSafeStream, PlainDisplay
from ddpjob.cli.prepare import Prepared, digits_if_offline, prepare, require_programs, runs_ddptrain
from ddpjob.cli.snapshot import snapshot
from ddpjob.cli.summary import RunResult
from ddpjob.cli.text import one_line
from ddpjob.local.session import Options, Session, render
from ddpjob.local.state import JobFolder

Json = dict[str, Any]


def execute(request: Request) -> int:
    """Run, or with ``dry_run`` only show, the job. Returns the exit code; raises ``LocalError``."""
    audience = PipeSafeStream(sys.stdout)
    prepared = prepare(request)
    if request.dry_run:
        return _dry_run(request, prepared)
    require_programs(prepared.file.job)
    display = _display(request.output, audience)
    begin = time.monotonic()
    with display:
        for note in prepared.notes:
            display.note(note)
        for warning in prepared.warnings:
            display.note(warning, loud=True)
        if request.digits_if_offline:
            warn = partial(display.note, loud=True)
            digits_if_offline(prepared.paths, fresh=request.fresh, say=display.note, warn=warn)
        options = Options(fresh=request.fresh, volumes=prepared.paths.volumes, directory=prepared.file.directory)
        shows_output = not runs_ddptrain(prepared.file.job)
        job, stopped_by = asyncio.run(
            watched(
                lambda on_change: Session(
                    prepared.file.job,
                    prepared.file.others,
                    prepared.paths.folder,
                    options,
                    on_change=on_change,
                    say=display.note,
                ),
                display,
                audience,
                prepared.paths.record if shows_output else None,
            )
        )
        result = RunResult(job, prepared.paths, time.monotonic() - begin, request.again, stopped_by)
        display.end(result)
    if request.output == "yaml":
        print(dump(job), end="", file=audience.stream)
    return result.exit_code


def _dry_run(request: Request, prepared: Prepared) -> int:
    """The objects that a cluster would hold, the user's ConfigMaps included; Secrets stay where they are."""
    shown = [other for other in prepared.file.others if other.get("kind") != "Secret"]
    objects = [*render(prepared.file.job), *shown]
    for note in prepared.notes:
        print(f"· {one_line(note)}", file=sys.stderr)
    if len(shown) < len(prepared.file.others):
        print("· Secrets are left out", file=sys.stderr)
    if request.digits_if_offline:
        print("· --digits-if-offline looks for MNIST when the job runs, not now", file=sys.stderr)
    if request.output == "json":
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    else:
        print(dump(*objects), end="")
    return 0


def _display(output: str | None, audience: PipeSafeStream) -> Display:
    if output == "json":
        return JsonDisplay(audience.stream)
    if output == "yaml":
        return PlainDisplay(PipeSafeStream(sys.stderr).stream)
    if output == "table" or (output is None and audience.is_terminal()):
        from rich.console import Console

        from ddpjob.cli.live import LiveDisplay

        return LiveDisplay(Console(file=audience.stream, highlight=False, emoji=False, markup=False))
    return PlainDisplay(audience.stream)


OnChange = Callable[[Json, Sequence[Json]], None]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUT_SECONDS = 0.2


async def watched(
    make: Callable[[OnChange], Session], display: Display, audience: PipeSafeStream, record: JobFolder | None
) -> tuple[Json, int | None]:
    """Run a session. ``record``: where node 0's output is, if it is to be shown.

    Returns the job as it is in the end, and the signal that stopped it, None where none did.
    """
    seen: list[Json] = []
    output = _Output(record, display)

    def on_change(job: Json, pods: Sequence[Json]) -> None:
        seen[:] = [job]
        output.follow(job)
        display.show(snapshot(job, pods))

    session = make(on_change)
    stop = _Stop(display.note)
    audience.on_leave = lambda: stop.ask(signal.SIGPIPE)
    running = asyncio.create_task(session.run(stop.event), name="session")
    reading = asyncio.create_task(output.read_on(), name="output")
    with stop.listening(running):
        try:
            job = await running
        except asyncio.CancelledError:
            if not seen or stop.number is None:
                raise
            job = seen[0]
        finally:
            reading.cancel()
            output.read(to_the_end=True)
    return job, stop.number


class _Stop:
    """The first signal asks the job to save and leave, the second kills it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.event = asyncio.Event()
        self.number: int | None = None
        self._say = say
        self._running: asyncio.Task[Json] | None = None

    @contextlib.contextmanager
    def listening(self, running: asyncio.Task[Json]) -> Any:
        self._running = running
        loop = asyncio.get_running_loop()
        # nohup leaves SIGHUP ignored, and so do we.
        heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        for number in heeded:
            loop.add_signal_handler(number, self.ask, number)
        try:
            yield
        finally:
            for number in heeded:
                loop.remove_signal_handler(number)

    def ask(self, number: int) -> None:
        """Asked once: stop in order. Asked again: at once."""
        if self.number is None:
            self.number = number
            self.event.set()
            self._say(f"{signal.Signals(number).name}: the trainer saves and leaves; once more to kill it at once")
        elif self._running is not None and number != signal.SIGPIPE:
            self._say("killing what still runs")
            self._running.cancel()


class _Output:
    """Shows what node 0 of the current attempt prints."""

    def __init__(self, record: JobFolder | None, display: Display) -> None:
        self._record = record
        self._display = display
        self._pod = ""
        self._log: LogFile | None = None

    def follow(self, job: Json) -> None:
        attempt = (job.get("status") or {}).get("attempt")
        if self._record is None or not attempt:
            return
        meta = job["metadata"]
        pod = names.pod_name(meta["name"], meta["uid"], attempt, 0)
        if pod != self._pod:
            self.read(to_the_end=True)
            self._pod, self._log = pod, LogFile(self._record.log(pod))

    def read(self, *, to_the_end: bool = False) -> None:
        if self._log is None:
            return
        for line in self._log.lines():
            self._display.output(line)
        if to_the_end and (rest := self._log.remainder()):
            self._display.output(rest)

    async def read_on(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(_OUTPUT_SECONDS)
