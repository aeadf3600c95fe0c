"""The ends of the logs of failed pods: the kubelet's part in a pod's status is often shorter than torchrun's frame.

A plan names the pods, after it has recorded that their attempt ends. Each log is read once, within ``SLOW_SECONDS``;
what could not be read until then is left out, and the plan decides without it. A plan waits for each log that it names,
so every reading ends with an entry in ``found``.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpjob.api import names
from ddpjob.api.log_failure import LogFailure, log_failure
from ddpjob.api.names import Key
from ddpjob.engine.state import MAX_LOGS
from ddpjob_operator.cluster.base import Cluster, ClusterError, Forbidden, Invalid, NotFound
from ddpjob_operator.controller.slots import Slots

logger = logging.getLogger(__name__)

SECONDS = 2.5
"""For how long requests for one log are repeated, less than the wait for the cause (``SETTLE_SECONDS``)."""
SLOW_SECONDS = 8.0
"""For how long a request may take: a kubelet that has just reported an end may be busy. It is ``SECONDS`` while the
last log could not be read: perhaps the API server reaches no kubelet."""
RETRY_SECONDS = 0.25
AT_ONCE = 16
"""Requests at a time; those of one job take at most half (``Slots``), as the kubelets of its nodes may not answer."""
LINES, FEW_LINES, MAX_BYTES = 500, 60, 2**20
"""A runtime stores at most 16 KiB as one line, so ``FEW_LINES`` are complete within ``MAX_BYTES``."""


@dataclass
class _Followed:
    """The logs of one attempt. found: by the pod's uid, as far as they have been read."""

    attempt: int
    found: dict[str, LogFailure | None] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)


class PodLogs:
    """Reads the logs that plans ask for, each in a task of its own.

    on_news: called with the job's key when a log has been read, or not in time.
    """

    def __init__(self, cluster: Cluster, on_news: Callable[[Key], None]) -> None:
        self._cluster = cluster
        self._on_news = on_news
        self._followed: dict[Key, _Followed] = {}
        self._slots = Slots(AT_ONCE)
        self._is_refused = False
        self._is_unanswered = False

    def found(self, key: Key) -> Mapping[str, LogFailure | None]:
        """Return what the logs of the job's attempt say, by the pod's uid; None of a log that could not be read."""
        followed = self._followed.get(key)
        return dict(followed.found) if followed is not None else {}

    def follow(self, key: Key, attempt: int, pods: Sequence[tuple[str, str]]) -> None:
        """Read the logs of these pods (name, uid), unless that has begun. What earlier attempts logged is dropped."""
        if key in self._followed and self._followed[key].attempt != attempt:
            self.forget(key)
        if not pods:
            return
        followed = self._followed.setdefault(key, _Followed(attempt))
        for name, uid in pods:
            if uid not in followed.tasks and len(followed.tasks) < MAX_LOGS:
                reading = self._read(key, followed, name, uid)
                followed.tasks[uid] = asyncio.create_task(reading, name=f"log of {key.namespace}/{name}")

    def forget(self, key: Key) -> None:
        """Drop what the logs of a job say, and stop reading them."""
        followed = self._followed.pop(key, None)
        for task in followed.tasks.values() if followed is not None else ():
            task.cancel()

    async def _read(self, key: Key, followed: _Followed, name: str, uid: str) -> None:
        found, limit = None, asyncio.timeout(SECONDS if self._is_unanswered else SLOW_SECONDS)
        try:
            async with limit, self._slots.take(key.namespace, key.name):
                found = await self._until_read(key.namespace, name)
            self._is_unanswered = False
        except TimeoutError as error:
            self._is_unanswered = True
            logger.warning("%s: the log cannot be read: %s", name, str(error) or "no answer")
        except Exception:
            logger.exception("%s: the log cannot be read", name)
        followed.found[uid] = found
        self._on_news(key)

    async def _until_read(self, namespace: str, name: str) -> LogFailure | None:
        """Return what the log says. Raises ``TimeoutError`` with the last error if no request has succeeded."""
        until = asyncio.get_running_loop().time() + SECONDS
        while True:
            try:
                return log_failure(await self._end_of(namespace, name))
            except (Forbidden, Invalid, NotFound) as error:
                if isinstance(error, Forbidden) and not self._is_refused:
                    self._is_refused = True
                    logger.warning(
                        "logs cannot be read: %s; grant get on pods/log, or set DDPJOB_OPERATOR_READ_LOGS", error
                    )
                return None
            except ClusterError as error:
                delay = max(RETRY_SECONDS, error.retry_after)
                if asyncio.get_running_loop().time() + delay > until:
                    raise TimeoutError(str(error)) from error
            await asyncio.sleep(delay)

    async def _end_of(self, namespace: str, name: str) -> str:
        """Return the last lines of the trainer's log. A response of the maximum size is cut at its end: read fewer."""
        text = ""
        for lines in (LINES, FEW_LINES):
            text = await self._cluster.read_log(namespace, name, names.TRAINER_CONTAINER, lines=lines, limit=MAX_BYTES)
            if len(text.encode()) < MAX_BYTES:
                break
        return text
