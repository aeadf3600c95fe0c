"""Carries out ``ddpjob run``: prepares the job, runs a session, and reports it. Imported only when a job runs."""

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.cli.jobfile import dump_yaml
from ddpjob.cli.logs import LogFile
from ddpjob.cli.options import Request
from ddpjob.cli.output import Display, JsonDisplay, PipeSafeStream, PlainDisplay
from ddpjob.cli.prepare import Prepared, digits_if_offline, prepare, require_programs, runs_ddptrain
from ddpjob.cli.snapshot import take_snapshot
from ddpjob.cli.summary import RunResult
from ddpjob.cli.text import one_line
from ddpjob.local.session import Options, Session
from ddpjob.local.state import JobFolder

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUT_SECONDS = 0.2


def execute(request: Request) -> int:
    """Run the job, or with ``dry_run`` only print it. Return the exit code. Raises ``LocalError``."""
    stdout = PipeSafeStream(sys.stdout)
    prepared = prepare(request)
    if request.dry_run:
        return _dry_run(request, prepared)
    require_programs(prepared.admitted)
    display = _display(request.output, stdout)
    begin = time.monotonic()
    with display:
        for note in prepared.notes:
            display.note(note)
        for warning in prepared.warnings:
            display.note(warning, loud=True)
        admitted, paths = prepared.admitted, prepared.paths
        if request.digits_if_offline:
            warn = partial(display.note, loud=True)
            admitted = digits_if_offline(admitted, paths, fresh=request.fresh, say=display.note, warn=warn)
        options = Options(fresh=request.fresh, volumes=paths.volumes, directory=prepared.file.directory)
        record = None if runs_ddptrain(admitted) else paths.record  # ddptrain reports its progress itself

        output = _NodeOutput(record, display)

        def on_change(job: Json, pods: Sequence[Json]) -> None:
            output.follow(job)
            display.show(take_snapshot(job, pods))

        others = prepared.file.others
        session = Session(admitted, others, paths.folder, options, on_change=on_change, say=display.note)
        stop = _Stop(display.note)
        stdout.on_broken_pipe = lambda: stop.request(signal.SIGPIPE)
        job = asyncio.run(_run_session(session, stop, output))
        result = RunResult(job, paths, time.monotonic() - begin, request.again, stop.number)
        display.end(result)
    if request.output == "yaml":
        print(dump_yaml(job), end="", file=stdout.stream)
    return result.exit_code


def _dry_run(request: Request, prepared: Prepared) -> int:
    """Print the objects that a cluster would hold, the user's ConfigMaps included and Secrets excluded."""
    shown = [other for other in prepared.file.others if other.get("kind") != "Secret"]
    objects = [*prepared.admitted.manifests(), *shown]
    for note in prepared.notes:
        print(f"· {one_line(note)}", file=sys.stderr)
    if len(shown) < len(prepared.file.others):
        print("· Secrets are left out", file=sys.stderr)
    if request.digits_if_offline:
        print("· --digits-if-offline takes effect when the job runs, not here", file=sys.stderr)
    if request.output == "json":
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    else:
        print(dump_yaml(*objects), end="")
    return 0


def _display(output: str | None, stdout: PipeSafeStream) -> Display:
    if output == "json":
        return JsonDisplay(stdout.stream)
    if output == "yaml":
        return PlainDisplay(PipeSafeStream(sys.stderr).stream)
    if output == "table" or (output is None and stdout.is_terminal()):
        from rich.console import Console

        from ddpjob.cli.live import LiveDisplay

        return LiveDisplay(Console(file=stdout.stream, highlight=False, emoji=False, markup=False))
    return PlainDisplay(stdout.stream)


async def _run_session(session: Session, stop: "_Stop", output: "_NodeOutput") -> Json:
    """Run a session. Return the job in its last state, also after a second signal killed it."""
    running = asyncio.create_task(session.run(stop.event), name="session")
    reading = asyncio.create_task(output.read_forever(), name="output")
    with stop.on_signals(running):
        try:
            return await running
        except asyncio.CancelledError:
            if stop.number is None:
                raise
            return session.job
        finally:
            reading.cancel()
            output.read(to_the_end=True)


class _Stop:
    """The first signal suspends the job, so that the trainer saves; the second kills it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.event = asyncio.Event()
        self.number: int | None = None
        self._say = say
        self._running: asyncio.Task[Json] | None = None

    @contextlib.contextmanager
    def on_signals(self, running: asyncio.Task[Json]) -> Iterator[None]:
        self._running = running
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

    def request(self, number: int) -> None:
        """Suspend the job at the first call, kill it at the second."""
        if self.number is None:
            self.number = number
            self.event.set()
            name = signal.Signals(number).name
            self._say(f"{name}: waiting for the trainer to save and exit; send it again to kill the job")
        elif self._running is not None and number != signal.SIGPIPE:
            self._say("killing all processes of the job")
            self._running.cancel()


class _NodeOutput:
    """Shows what node 0 of the current attempt prints. record: the job's folder, or None to show nothing."""

    def __init__(self, record: JobFolder | None, display: Display) -> None:
        self._record = record
        self._display = display
        self._pod = ""
        self._log: LogFile | None = None

    def follow(self, job: Json) -> None:
        """Switch to the log of the job's current attempt."""
        attempt = (job.get("status") or {}).get("attempt")
        if self._record is None or not attempt:
            return
        meta = job["metadata"]
        pod = names.pod_name(meta["name"], meta["uid"], attempt, 0)
        if pod != self._pod:
            self.read(to_the_end=True)
            self._pod, self._log = pod, LogFile(self._record.log(pod))

    def read(self, *, to_the_end: bool = False) -> None:
        """Show new lines; with ``to_the_end`` also a last line without a line feed."""
        if self._log is None:
            return
        for line in self._log.lines():
            self._display.output(line)
        if to_the_end and (rest := self._log.remainder()):
            self._display.output(rest)

    async def read_forever(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(_OUTPUT_SECONDS)
