"""Signals that stop a run: the first suspends the job, so that the trainer saves; the second kills it."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator

from ddpjob.api.objects import Json
from ddpjob.local.session import Session

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppableSession:
    """Runs a session until it ends or signals stop it. number: the first signal. say: prints one line for the user."""

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
