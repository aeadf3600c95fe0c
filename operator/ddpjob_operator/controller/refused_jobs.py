"""Which jobs try again when a pod of their namespace goes, of those whose creates were refused.

The delay between two tries of a job grows to ten minutes, and nothing says what a quota has left. So when a pod of a
DDPJob ends or is deleted, up to ``TRIES`` of the waiting jobs try at once, one a second: those that have waited longest
since their last try. A namespace with a thousand waiting jobs and a thousand pods that go costs no more. Pods of other
owners are not watched: after their end, a job tries when its delay is over.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from ddpjob.api.names import Key
from ddpjob.api.status import recorded_status

TRIES = 4
PACE_SECONDS = 1.0
"""Also the time that the API server may take to update the quota after a pod has gone."""


class RefusedJobs:
    """The waiting jobs of each namespace in the order of their last tries; ``wake`` lets one try again."""

    def __init__(self, wake: Callable[[Key], None]) -> None:
        self._wake = wake
        self._waiting: dict[str, dict[Key, int]] = {}
        self._tries: dict[str, int] = {}

    def observe(self, key: Key, status: Mapping[str, Any]) -> None:
        """Take the status of a job; the jobs that wait have the verdict CreateRefused."""
        given = status.get("currentAttempt")
        ended = isinstance(given, Mapping) and "ending" in given
        attempt = recorded_status({"currentAttempt": given}).current_attempt if ended else None
        if attempt is None or attempt.verdict != "CreateRefused":
            self.forget(key)
        else:
            first = attempt.number - (attempt.refusals or 1) + 1
            self._waiting.setdefault(key.namespace, {})[key] = first

    def forget(self, key: Key) -> None:
        """Take a job out: it starts, has another state, or is gone."""
        waiting = self._waiting.get(key.namespace, {})
        waiting.pop(key, None)
        if not waiting:
            self._waiting.pop(key.namespace, None)

    def freed(self, key: Key, attempt: int) -> None:
        """A pod of this attempt has gone. Those of refused attempts free only what other tries may take."""
        if attempt < self._waiting.get(key.namespace, {}).get(key, attempt + 1):
            self.let_try(key.namespace)

    def let_try(self, namespace: str) -> None:
        """Let the next waiting jobs try, because there may be room."""
        if namespace not in self._waiting:
            return
        if namespace not in self._tries:
            asyncio.get_running_loop().call_later(PACE_SECONDS, self._let_next_try, namespace)
        self._tries[namespace] = TRIES

    def _let_next_try(self, namespace: str) -> None:
        waiting, left = self._waiting.get(namespace, {}), self._tries.pop(namespace) - 1
        if (key := next(iter(waiting), None)) is None:
            return
        waiting[key] = waiting.pop(key)
        self._wake(key)
        if left:
            self._tries[namespace] = left
            asyncio.get_running_loop().call_later(PACE_SECONDS, self._let_next_try, namespace)
