"""Data between the engine and the controller: settings, plans, and the problems of carrying one out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.version import __version__

Obstacle = tuple[str, str]
"""Reason and message of what keeps an attempt from running."""
MAX_TEXT: Final = 512
"""Characters of a text of another system in a message."""
LOOKUP_SECONDS: Final = 60.0
"""How long an object of the cluster that was read is used, and when one is read again that keeps a job waiting."""


@dataclass(frozen=True)
class Create:
    """POST ``body``. An existing object of that name is adopted if the job owns it; otherwise it is a conflict.

    ``shared``: an existing object is adopted without being owned (the claim of an earlier job of this name).
    ``after_first``: it is sent when the first create of its phase has been answered; it is never the first itself.
    ``optional``: a refusal is no problem of the job: nothing waits for the object.
    """

    resource: Resource
    name: str
    body: Json = field(hash=False)
    shared: bool = False
    after_first: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Delete:
    """DELETE, with the precondition that the object still has this uid."""

    resource: Resource
    name: str
    uid: str


@dataclass(frozen=True)
class Change:
    """PATCH a part of an object (RFC 7396), with the precondition that it still has this uid.

    value: of the part. annotations: of the object, in the same request; null removes one.
    version: the resourceVersion that it must still have, because the patch replaces a list; empty for any.
    """

    resource: Resource
    name: str
    uid: str
    value: Json = field(hash=False)
    part: Literal["spec", "status"] = "spec"
    annotations: Json = field(default_factory=dict, hash=False)
    version: str = ""

    @property
    def body(self) -> Json:
        """The patch."""
        meta: Json = {"uid": self.uid}
        meta |= {"annotations": self.annotations} if self.annotations else {}
        meta |= {"resourceVersion": self.version} if self.version else {}
        return {"metadata": meta, self.part: self.value}


@dataclass(frozen=True)
class Note:
    """A Kubernetes Event about a transition of the job, sent after the status that records the transition."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


NAME_TERMINATING: Final = "NameTerminating"
"""An object with the name to create is being deleted."""
DELETE_REFUSED: Final = "DeleteRefused"
CHANGE_REFUSED: Final = "ChangeRefused"
REFUSALS_TO_SHOW: Final = frozenset({DELETE_REFUSED, CHANGE_REFUSED})
"""Problems that keep no attempt from starting: the request is repeated, and the status shows them."""
CREATE_FAILED: Final = "CreateFailed"
"""The API server did not respond to a create, or with an error that may be over soon: the create is sent again."""


ProblemReason = Literal[
    "NameConflict", "CreateRefused", "CreateFailed", "NameTerminating", "DeleteRefused", "ChangeRefused"
]


@dataclass(frozen=True)
class Problem:
    """A create or delete that failed; the next plan shows it in the status."""

    reason: ProblemReason
    resource: Resource
    name: str
    message: str


LAUNCHER_IMAGE: Final = f"ddpjob/trainer:{__version__}"
"""The trainer's image of this release. The name is of no registry, so it is never pulled from there."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the cluster and the operator that plans depend on.

    pod_namespace, pod_labels: select the operator's own pods, which the NetworkPolicies of jobs admit; without a
        namespace they admit no operator.
    kueue: whether jobs with a queue wait for Kueue; None as for ``gang_scheduler``.
    gang_scheduler: the system that places the pods of an attempt together (``scheduling.gangs``); "" for none; None
        where pods need no scheduler, as in local mode, or where the setting is not known.
    scheduler_name: ``schedulerName`` of the pods of a gang whose template gives none; empty for that of the system.
    launcher_image, launcher_pull_policy: of the init container of ``launcher: Injected``; without an image the machine
        has ``ddprun``, as in local mode.
    is_local: local mode: no Kubernetes node can be lost, advice names nothing that only a cluster has, and
        ``ttlSecondsAfterFinished`` deletes no job.
    """

    cluster_domain: str = "cluster.local"
    logs_command: str = "kubectl logs {pod} -n {namespace}"
    """Command that shows the log of a pod, with the fields namespace, job, attempt, node_rank and pod."""
    reads_logs: bool = False
    """Whether plans may ask for the logs of failed pods."""
    pod_namespace: str = ""
    pod_labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    kueue: bool | None = False
    gang_scheduler: str | None = ""
    scheduler_name: str = ""
    launcher_image: str = LAUNCHER_IMAGE
    launcher_pull_policy: str = "Never"
    is_local: bool = False


@dataclass(frozen=True)
class Plan:
    """The decisions of one reconcile, in the order in which they are carried out.

    status: the complete new status, or None if it does not change.
    urgent: the status records a decision, so it is written at once, before any delete or create. Any other status may
        be delayed and combined with the next.
    lookups: (kind, name) of objects of the cluster to read before a plan can be made; nothing else is in the plan.
    needs_live: the decision is irreversible, and the cache may be stale: LIST the pods and plan again before acting.
        Never set if the pods came from a LIST.
    changes: a Service or NetworkPolicy that a user edited, pods to keep whose sidecars run on after the trainer,
        and the Workload of a job in a queue.
    creates: phases, each a sequence of objects that are created concurrently; a phase starts after the one before
        ended. A sequence may render its objects when they are read.
    requeue_after: seconds after which the plan can change without an event, or None.
    creates_attempt: number of the attempt whose pods are among the creates, or None.
    poll: (pod name, IP, port) of rank 0 to request progress from, or None.
    logs: (name, uid) of failed pods whose logs may show the cause. The ending of their attempt is recorded.
    is_first: the creates are those of the first attempt. Nothing can be lost: they may be sent beside the status.
    cautious: earlier creates were refused, so send 1, 2, 4, ... at a time until one is refused.
    """

    status: Json | None = None
    urgent: bool = False
    lookups: tuple[tuple[Resource, str], ...] = ()
    needs_live: bool = False
    deletes: tuple[Delete, ...] = ()
    changes: tuple[Change, ...] = ()
    creates: tuple[Sequence[Create], ...] = ()
    events: tuple[Note, ...] = ()
    creates_attempt: int | None = None
    requeue_after: float | None = None
    poll: tuple[str, str, int] | None = None
    logs: tuple[tuple[str, str], ...] = ()
    is_first: bool = False
    cautious: bool = False


def patch_between(old: Mapping[str, Any], new: Mapping[str, Any]) -> Json:
    """Return the RFC 7396 merge patch that turns ``old`` into ``new``; removed keys become null."""
    patch: Json = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            if inner := patch_between(before, value):
                patch[key] = inner
        elif key not in old or before != value:
            patch[key] = value
    return patch
