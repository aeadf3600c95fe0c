"""Poll ``GET /progress`` of rank 0 of every running job, outside of reconciles.

The server is a program of the user, so a request has a short timeout, a size limit and no redirects.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp

from ddpjob.api.objects import Json
from ddpjob.api.report import TrainingReport, training_report
from ddpjob.controller.cache import Key
from ddpjob.engine.observed import ProgressProblem
from ddpjob.engine.obstacles import UNKNOWN_SECONDS

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
MAX_BYTES = 64 * 1024
MAX_CONNECTIONS = 512  # a pod that does not respond holds a connection for two seconds

Target = tuple[str, str, int]
"""Pod name, IP address, port."""


@dataclass(frozen=True)
class Answer:
    """The last response of a pod; only the fields of a report, because the rest can be 1.5 MB of objects."""

    pod: str
    progress: TrainingReport


@dataclass
class Stall:
    """The time over which consecutive responses of a pod showed the same step, in monotonic seconds."""

    pod: str
    mark: tuple[object, ...]
    since: float
    seen: float


@dataclass
class Silence:
    """The time since the first of consecutive requests without a usable response, in monotonic seconds."""

    since: float
    problem: ProgressProblem
    is_long: bool = False


class UnusableAnswerError(Exception):
    """The response is not a progress report."""


class ProgressPoller:
    """Polls each followed job in a task of its own.

    on_news: called with the job's key when a response differs from the one before.
    on_poll: called with the result of every request: "ok", "unusable" or "unreachable".
    """

    def __init__(
        self,
        interval: float,
        on_news: Callable[[Key], None],
        on_poll: Callable[[str], None] = lambda result: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval = interval
        self._on_news = on_news
        self._on_poll = on_poll
        self._clock = clock
        self._stalls: dict[Key, Stall] = {}
        self._silences: dict[Key, Silence] = {}
        self._tasks: dict[Key, tuple[Target, asyncio.Task[None]]] = {}
        self._answers: dict[Key, Answer] = {}
        # No proxies and no cookies: the addresses are pods of this cluster.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, force_close=True),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )

    def answer(self, key: Key) -> Answer | None:
        """Return the last usable response of the job's rank 0, of any attempt."""
        return self._answers.get(key)

    def stalled_seconds(self, key: Key) -> float | None:
        """Return for how long consecutive responses of rank 0 showed the same step; None after one that failed.

        The time after the last response does not count: a pod that cannot be reached may train, and so may all while
        the operator is down.
        """
        stall = self._stalls.get(key)
        return stall.seen - stall.since if stall else None

    def problem(self, key: Key) -> ProgressProblem | None:
        """Return why rank 0 has given no usable response for a minute; None if it has, or is not running."""
        silence = self._silences.get(key)
        return silence.problem if silence is not None and silence.is_long else None

    def follow(self, key: Key, target: Target | None) -> None:
        """Poll ``target`` from now on; None stops polling and drops the last response.

        Rank 0 is then no longer running. The plan that found this has read the last response, and later plans read the
        termination message.
        """
        if key in self._tasks:
            known, task = self._tasks[key]
            if known == target and not task.done():
                return
            task.cancel()
            del self._tasks[key]
            self._stalls.pop(key, None)
            self._silences.pop(key, None)
        if target is None:
            self._answers.pop(key, None)
        else:
            self._tasks[key] = (target, asyncio.create_task(self._poll(key, target), name=f"progress of {key}"))

    def forget(self, key: Key) -> None:
        """Stop polling and drop the last response, because the job was deleted."""
        self.follow(key, None)

    async def close(self) -> None:
        """Stop polling and close all connections."""
        for key in list(self._tasks):
            self.follow(key, None)
        await self._session.close()

    async def _poll(self, key: Key, target: Target) -> None:
        while True:
            try:
                # No local variable for the response: the task would keep it until the next one.
                answer = Answer(target[0], training_report(await self._ask(target)))
                self._on_poll("ok")
                self._take(key, answer)
            except UnusableAnswerError as error:
                self._miss(key, "unusable")
                logger.debug("%s: unusable progress response: %s", target[0], error)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._miss(key, "unreachable")
                logger.debug("%s: progress is unreachable: %s", target[0], type(error).__name__)
            await asyncio.sleep(self._interval)

    def _miss(self, key: Key, problem: ProgressProblem) -> None:
        """Note a request without a usable response; the job is queued when that has been so for a minute."""
        self._on_poll(problem)
        self._stalls.pop(key, None)
        silence = self._silences.setdefault(key, Silence(self._clock(), problem))
        silence.problem = problem
        if not silence.is_long and self._clock() - silence.since >= UNKNOWN_SECONDS:
            silence.is_long = True
            self._on_news(key)

    def _take(self, key: Key, answer: Answer) -> None:
        self._silences.pop(key, None)
        is_back = key not in self._stalls  # from now on progressDeadlineSeconds can pass, which needs a plan
        self._observe_step(key, answer)
        known = self._answers.get(key)
        self._answers[key] = answer
        if is_back or known is None or known.pod != answer.pod or _content(known) != _content(answer):
            self._on_news(key)

    def _observe_step(self, key: Key, answer: Answer) -> None:
        now, stall = self._clock(), self._stalls.get(key)
        mark = (answer.progress.step, answer.progress.epoch, answer.progress.phase)
        if stall is not None and (stall.pod, stall.mark) == (answer.pod, mark):
            stall.seen = now
        else:
            self._stalls[key] = Stall(answer.pod, mark, since=now, seen=now)

    async def _ask(self, target: Target) -> Json:
        _, address, port = target
        host = f"[{address}]" if ":" in address else address
        async with self._session.get(f"http://{host}:{port}/progress", allow_redirects=False) as response:
            if response.status != 200:
                raise UnusableAnswerError(f"HTTP {response.status}")
            body = b""
            async for chunk in response.content.iter_chunked(MAX_BYTES):
                body += chunk
                if len(body) > MAX_BYTES:
                    raise UnusableAnswerError(f"longer than {MAX_BYTES} bytes")
        return parse(body)


def parse(body: bytes) -> Json:
    """Return the JSON object; NaN and infinities, which are not JSON, become None. Raises ``UnusableAnswerError``."""
    try:
        value = json.loads(body, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        raise UnusableAnswerError(f"not JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise UnusableAnswerError("not a JSON object")
    return value


def _content(answer: Answer) -> TrainingReport:
    """Return the response without its age, which always changes."""
    return replace(answer.progress, age_seconds=None)
