"""Poll ``GET /progress`` of rank 0 of every running job, outside of reconciles."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ddpjob.api.names import Key
from ddpjob.api.report import TrainingReport
from ddpjob.engine.observed import NOT_POLLED, Polled, ProgressProblem
from ddpjob.engine.obstacles import UNKNOWN_SECONDS
from ddpjob.progress.reader import ProgressReader, Target, UnusableAnswerError

logger = logging.getLogger(__name__)


@dataclass
class _Poll:
    """The requests to one pod, and what they have shown; times are monotonic seconds.

    since: when the step that the last response shows was first seen.
    silent_since: of the first of consecutive requests without a usable response.
    """

    target: Target
    shown: Polled
    since: float = 0.0
    silent_since: float | None = None
    task: asyncio.Task[None] = field(init=False)


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
        self._polls: dict[Key, _Poll] = {}
        self._reader = ProgressReader()

    def polled(self, key: Key) -> Polled:
        """Return what the requests to the job's rank 0 have shown; the last response may be of an earlier attempt."""
        poll = self._polls.get(key)
        return poll.shown if poll is not None else NOT_POLLED

    def follow(self, key: Key, target: Target | None) -> None:
        """Poll ``target`` from now on; None stops polling and drops the last response.

        Rank 0 is then no longer running. The plan that found this has read the last response, and later plans read the
        termination message.
        """
        known = self._polls.pop(key, None)
        if known is not None:
            if known.target == target and not known.task.done():
                self._polls[key] = known
                return
            known.task.cancel()
        if target is not None:
            shown = replace(known.shown, stalled_seconds=None, problem=None) if known else NOT_POLLED
            poll = self._polls[key] = _Poll(target, shown)
            poll.task = asyncio.create_task(self._run(key, poll), name=f"progress of {key}")

    def forget(self, key: Key) -> None:
        """Stop polling and drop the last response, because the job was deleted."""
        self.follow(key, None)

    async def close(self) -> None:
        """Stop polling and close all connections."""
        tasks = [poll.task for poll in self._polls.values()]
        for key in list(self._polls):
            self.follow(key, None)
        if tasks:
            await asyncio.wait(tasks)
        self._reader.close()

    async def _run(self, key: Key, poll: _Poll) -> None:
        while True:
            try:
                self._take(key, poll, await self._reader.ask(poll.target))
            except UnusableAnswerError as error:
                self._miss(key, poll, "unusable")
                logger.debug("%s: unusable progress response: %s", poll.target[0], error)
            except OSError as error:  # among them TimeoutError
                self._miss(key, poll, "unreachable")
                logger.debug("%s: progress is unreachable: %s", poll.target[0], type(error).__name__)
            await asyncio.sleep(self._interval)

    def _miss(self, key: Key, poll: _Poll, problem: ProgressProblem) -> None:
        """Note a request without a usable response; the job is queued when that has been so for a minute."""
        self._on_poll(problem)
        now, was_known = self._clock(), poll.shown.problem is not None
        poll.silent_since = now if poll.silent_since is None else poll.silent_since
        is_long = now - poll.silent_since >= UNKNOWN_SECONDS
        poll.shown = replace(poll.shown, stalled_seconds=None, problem=problem if is_long else None)
        if is_long and not was_known:
            self._on_news(key)

    def _take(self, key: Key, poll: _Poll, report: TrainingReport) -> None:
        self._on_poll("ok")
        now, before = self._clock(), poll.shown
        is_back = before.stalled_seconds is None  # from now on progressDeadlineSeconds can pass, which needs a plan
        if is_back or _step(before.report) != _step(report):
            poll.since = now
        poll.silent_since = None
        poll.shown = Polled(poll.target[0], report, now - poll.since)
        if is_back or _content(before.report) != _content(report):
            self._on_news(key)


def _step(report: TrainingReport | None) -> tuple[object, ...] | None:
    return (report.step, report.epoch, report.phase) if report else None


def _content(report: TrainingReport | None) -> TrainingReport | None:
    """Return the response without its age, which always changes."""
    return replace(report, age_seconds=None) if report else None
