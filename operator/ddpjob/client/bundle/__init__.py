"""Bundles: what can be read of a job in one file without secrets, and what the operator does about it.

recording ─▶ redaction (redactor, pseudonyms) ─▶ archive ─▶ replay

A test of an incident puts the file below ``tests/`` and asserts on the fields of its replay::

    assert replay("tests/client/incidents/lost-node.zip").starts_attempt == 3
"""

from datetime import datetime, timedelta
from pathlib import Path

from ddpjob.client.bundle.archive import read
from ddpjob.client.bundle.replay import Replay
from ddpjob.client.bundle.replay import replay as _replay
from ddpjob.errors import InvalidJobError

_MOST_SECONDS = 10 * 365 * 86_400
__all__ = ["Replay", "replay"]


def replay(path: str | Path, *, after: float = 0.0, now: datetime | None = None) -> Replay:
    """Return what the operator of this release does about the job in a bundle.

    Args:
        after: so many seconds after the recording, if nothing else changed.
        now: at this time instead.

    Raises:
        InvalidJobError: the file is no bundle, or has no pods, without which there is no plan, or after is too large.
    """
    if not 0 <= after <= _MOST_SECONDS:
        raise InvalidJobError(
            f"after is {after}, and may be 0 to {_MOST_SECONDS:,} seconds",
            "it is counted from the time of the recording",
            "give fewer seconds",
        )
    recording = read(path).recording
    if recording.pods is None:
        why = next((one.reason for one in recording.unread if one.what == "pods"), "they were not read")
        raise InvalidJobError(
            f"{path} has no pods: {why}",
            "the operator plans from the pods of a job, so without them there is nothing to replay",
            "make the bundle with the right to list pods; the role view has it",
        )
    return _replay(recording, now or recording.now + timedelta(seconds=after))
