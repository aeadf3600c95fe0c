"""kopf's settings: what it may do (watch), and what it must not (write, scan, compare).

The numbers are judgement; the switches turn off everything that costs requests or annotations on objects.
"""

from typing import Any, cast

import kopf

from ddpjob.api import names


class NothingHandled(kopf.DiffBaseStorage):
    """kopf compares each object with the one it handled last, for handlers that this operator does not have.

    Copying every pod for that took most of the operator's CPU time; an empty essence costs nothing.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is kept on objects."""


class NoProgress(kopf.ProgressStorage):
    """The same for the progress of such handlers."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Nothing is kept on objects."""

    def purge(self, **_: Any) -> None:
        """Nothing was kept."""

    def touch(self, **_: Any) -> None:
        """Nothing is kept on objects."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


def settings() -> kopf.OperatorSettings:
    """For ``kopf.spawn_tasks``."""
    s = kopf.OperatorSettings()
    s.scanning.disabled = True
    s.posting.enabled = False
    s.persistence.diffbase_storage = NothingHandled()
    s.persistence.progress_storage = NoProgress()
    # The tuple matters: the documented key "v1/pods" silently matches nothing.
    s.watching.label_selectors["v1", names.PODS.plural] = names.SELECTOR
    s.watching.connect_timeout = 5
    s.watching.server_timeout = 300
    s.watching.client_timeout = 310
    s.watching.inactivity_timeout = 70
    s.networking.request_timeout = 10
    s.networking.error_backoffs = (0.5, 1, 2, 4)
    s.queueing.worker_limit = None
    # Otherwise kopf kills the whole process ten minutes after it was started anew inside it.
    s.process.ultimate_exiting_timeout = None
    return s
