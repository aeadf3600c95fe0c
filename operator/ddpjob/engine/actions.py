"""What the engine hands to whoever carries it out: a plan, and the problems met on the way back.

Plain data between the pure core and the edges; the controller and local mode execute it the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpjob.api.names import Resource
from ddpjob.api.wire import Json


@dataclass(frozen=True)
class Create:
    """POST ``body``. An existing object of that name is adopted if the job owns it, else it is a conflict.

    ``shared``: the object may exist already whoever made it (the claim of an earlier job of this name).
    """

    resource: Resource
    name: str
    body: Json = field(hash=False)
    shared: bool = False


@dataclass(frozen=True)
class Delete:
    """DELETE with the precondition that the object still has this uid."""

    resource: Resource
    name: str
    uid: str


@dataclass(frozen=True)
class Note:
    """A Kubernetes Event about the job, sent on a transition only, after the status that it speaks of."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Problem:
    """A create that the API server refused or that could not be made; the next plan shows it in the status."""

    reason: Literal["NameConflict", "CreateRefused", "CreateFailed"]
    resource: Resource
    name: str
    message: str


@dataclass(frozen=True)
class EngineSettings:
    """What the engine needs to know of the cluster and of the operator's configuration."""

    cluster_domain: str = "cluster.local"
    delete_finished: bool = True
    """Whether ``ttlSecondsAfterFinished`` deletes finished jobs."""


@dataclass(frozen=True)
class Plan:
    """One reconcile's decisions, in the order they are carried out.

    status: the complete new status, or None where nothing changes (then nothing is written).
    urgent: the status holds a decision; it is written before anything else and never delayed. A status that is
        not urgent is cosmetic: it may be coalesced with the next.
    needs_live: the plan decides something that cannot be taken back from what may be a stale cache: read the
        pods again by a LIST and plan anew before acting. Never set when the observation was live.
    creates: phases, each a tuple of objects created concurrently; a later phase starts after the former ended.
    requeue_after: seconds until time alone changes the answer, or None.
    poll: (pod name, IP, port) of rank 0 to ask for progress, or None when there is nothing to ask.
    """

    status: Json | None = None
    urgent: bool = False
    needs_live: bool = False
    deletes: tuple[Delete, ...] = ()
    creates: tuple[tuple[Create, ...], ...] = ()
    events: tuple[Note, ...] = ()
    requeue_after: float | None = None
    poll: tuple[str, str, int] | None = None

    @property
    def idle(self) -> bool:
        """True when the plan writes nothing at all."""
        return self.status is None and not (self.deletes or self.creates or self.events)


def status_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> Json:
    """RFC 7396 merge patch that turns ``old`` into ``new``; keys that vanish become null."""
    patch: Json = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := status_patch(before, value):
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch
