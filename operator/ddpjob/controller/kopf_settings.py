"""Settings of kopf: it only watches, and writes nothing to objects."""

from typing import Any, cast

import kopf

from ddpjob.api import names


class NothingHandled(kopf.DiffBaseStorage):
    """Disables kopf's comparison of each object with its last handled version, which only its other handlers need.

    Copying every pod for the comparison took most of the operator's CPU time.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        return cast(kopf.BodyEssence, {})

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""


class NoProgress(kopf.ProgressStorage):
    """Disables kopf's records of the progress of handlers."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""

    def purge(self, **_: Any) -> None:
        """Remove nothing."""

    def touch(self, **_: Any) -> None:
        """Store nothing."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


def settings() -> kopf.OperatorSettings:
    """Return the settings for ``kopf.spawn_tasks``."""
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
    # Otherwise kopf kills the whole process ten minutes after a restart of its tasks.
    s.process.ultimate_exiting_timeout = None
    return s
