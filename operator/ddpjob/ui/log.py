"""The log of a rank as it is printed, for a viewer who may go at any time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ddpjob.api.text import clean_line
from ddpjob.client.base import Client
from ddpjob.client.job import DDPJob
from ddpjob.errors import DDPJobError, StoppedError

MOST = 16  # logs at once
_LOOK_SECONDS = 0.5  # between two looks whether the program ends


@dataclass
class FollowedLogs:
    """The logs that are followed now.

    Attributes:
        new_client: makes a client for one log. Its end ends the reading, also of a job that prints nothing.
        is_ending: whether the program ends.
    """

    new_client: Callable[[], Client]
    is_ending: Callable[[], bool]
    _count: int = 0
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(MOST, "ddpjob-ui-log"))

    @property
    def is_full(self) -> bool:
        return self._count >= MOST

    async def text(self, job: DDPJob, rank: int) -> AsyncIterator[str]:
        """Yield the lines of a rank, and what is printed later."""
        loop = asyncio.get_running_loop()
        self._count += 1
        try:
            with self.new_client() as client:
                lines = _lines(client, job, rank)
                while not self.is_ending():
                    line = loop.run_in_executor(self._threads, next, lines, None)
                    while not line.done() and not self.is_ending():
                        await asyncio.wait({line}, timeout=_LOOK_SECONDS)
                    if not line.done() or (found := line.result()) is None:
                        return
                    yield found
        finally:
            self._count -= 1


def _lines(client: Client, job: DDPJob, rank: int) -> Iterator[str]:
    try:
        for line in client.logs(job, ranks={rank}, follow=True):
            if not line.unfinished:
                yield f"{clean_line(line.text)}\n"
    except StoppedError:
        return
    except (DDPJobError, ArithmeticError, KeyError) as error:  # of a spec of another form, too
        yield f"{error}\n"
