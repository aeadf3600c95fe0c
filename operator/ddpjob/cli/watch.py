"""Around one session: signals come in, facts go out."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from typing import Any

from ddpjob.api import names
from ddpjob.cli.audience import Audience
from ddpjob.cli.display import Display
from ddpjob.cli.facts import facts
from ddpjob.cli.logfile import LogFile
from ddpjob.local.session import Session
from ddpjob.local.state import JobFolder

Json = dict[str, Any]
OnChange = Callable[[Json, Sequence[Json]], None]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OUTPUT_SECONDS = 0.2


async def watched(
    make: Callable[[OnChange], Session], display: Display, audience: Audience, record: JobFolder | None
) -> tuple[Json, int | None]:
    """Run a session. ``record``: where node 0's output is, if it is to be shown.

    Returns the job as it is in the end, and the signal that stopped it, None where none did.
    """
    seen: list[Json] = []
    output = _Output(record, display)

    def on_change(job: Json, pods: Sequence[Json]) -> None:
        seen[:] = [job]
        output.follow(job)
        display.show(facts(job, pods))

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
