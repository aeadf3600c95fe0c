"""Carries out ``ddpjob run``: prepares the job, runs a session, and reports it. Imported only when a job runs."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TextIO

from ddpjob.api.objects import Json
from ddpjob.cli.card import moment_of
from ddpjob.cli.options import RunOptions
from ddpjob.cli.output import INTERVAL, Display, JsonDisplay, PlainDisplay, guarded
from ddpjob.cli.prepare import Prepared, prepare, remarks
from ddpjob.cli.summary import RunResult
from ddpjob.client.job import DDPJob
from ddpjob.client.local_logs import LogReader
from ddpjob.client.log_lines import LogChoice, LogLine
from ddpjob.local.pod_process import Machine
from ddpjob.local.programs import require_programs, runs_ddptrain
from ddpjob.local.references import References
from ddpjob.local.session import Session
from ddpjob.local.stop import StoppableSession

_OUTPUT_SECONDS = 0.2
_BAR_SECONDS = 10.0  # between two lines of a progress bar


def execute(request: RunOptions, again: str) -> int:
    """Run the job, and return the exit code. again: the command that resumes it. Raises ``LocalError``."""
    prepared = prepare(request)
    require_programs(prepared.admitted)
    stop = StoppableSession()
    stdout = guarded(sys.stdout, lambda: stop.request(signal.SIGPIPE))
    begin = time.monotonic()
    with display_of(request.output, stdout) as display:
        stop.say = display.note
        job = _run(request, prepared, stop, display)
        seconds, has_output = time.monotonic() - begin, not runs_ddptrain(prepared.admitted)
        result = RunResult(DDPJob.from_manifest(job), prepared.paths, seconds, again, stop.number, has_output)
        display.end(result)
    stdout.flush()
    return result.exit_code


def _run(request: RunOptions, prepared: Prepared, stop: StoppableSession, display: Display) -> Json:
    """Run the job until it has ended; return it."""
    file, admitted, paths = prepared
    output = LogReader(paths.record, LogChoice({0}), redrawn_seconds=_BAR_SECONDS)
    job_runs = asyncio.Event()  # until then the record is that of an earlier run

    def on_change(job: Json, pods: Sequence[Json]) -> None:
        display.show(moment_of(DDPJob.from_manifest(job), pods))
        job_runs.set()

    async def follow_output() -> None:
        await job_runs.wait()
        while True:
            _show(output.read(), display)
            await asyncio.sleep(_OUTPUT_SECONDS)

    async def run() -> Json:
        references = References(file.others, admitted.job.namespace)
        machine = Machine(paths, references, file.directory)
        session = Session(
            admitted=admitted, machine=machine, on_change=on_change, say=display.note, fresh=request.fresh
        )
        for line, is_warning in remarks(file, admitted, paths):
            display.note(line, loud=is_warning)
        if runs_ddptrain(admitted):  # it reports its progress itself
            return await stop.run(session)
        reading = asyncio.create_task(follow_output(), name="output")
        try:
            return await stop.run(session)
        finally:
            reading.cancel()
            if job_runs.is_set():
                _show(output.read(to_the_end=True), display)

    return asyncio.run(run())


def _show(lines: Iterable[LogLine], display: Display) -> None:
    for line in lines:
        display.output(line.text)


def display_of(output: str, stdout: TextIO, interval: float = INTERVAL) -> Display:
    """Return how a job is shown. interval: seconds between lines that report only progress."""
    if output == "json":
        return JsonDisplay(stdout)
    if stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb"):
        from rich.console import Console

        from ddpjob.cli.live import LiveDisplay

        return LiveDisplay(Console(file=stdout, highlight=False, emoji=False, markup=False))
    return PlainDisplay(stdout, interval=interval)
