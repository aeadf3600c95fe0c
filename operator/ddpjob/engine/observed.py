"""The observed state of a job: the input of ``plan``."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpjob.api.log_failure import LogFailure
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.api.pod_view import PodView
from ddpjob.api.report import TrainingReport
from ddpjob.engine.actions import Problem

ProgressProblem = Literal["unreachable", "unusable"]


@dataclass(frozen=True, slots=True)
class Polled:
    """What the requests for rank 0's progress have shown.

    pod, report: the last response, and the pod that sent it; a response of a pod of an older attempt is ignored.
    stalled_seconds: for how long consecutive responses of that pod showed the same step; None after a request that
        failed. The time after the last response does not count: a pod that cannot be reached may train, and so may all
        while the operator is down.
    problem: why rank 0 has not reported for a minute: no connection, or its responses are no reports; or None.
    """

    pod: str = ""
    report: TrainingReport | None = None
    stalled_seconds: float | None = None
    problem: ProgressProblem | None = None


NOT_POLLED = Polled()


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why an object of the cluster is not known.

    is_final: the API server says that it does not exist, or refuses to show it; otherwise it did not answer.
    """

    text: str
    is_final: bool = True


@dataclass(frozen=True, slots=True)
class Elder:
    """A job of which only some pods have a Kubernetes node, since this time, and which others give way to."""

    namespace: str
    name: str
    since: str


@dataclass(frozen=True)
class Observed:
    """The objects of one job and its last progress report.

    pods: the pods that the job owns (``owned_pods``).
    former: as long as the job has no attempt, the pods of other jobs that may still save where it reads: of a deleted
        job of the same name, or being deleted on the same claim and subPath, or there without a job.
    sharing: names of other jobs whose pods run with the same claim and subPath.
    service, policy, claim: the job's Service, NetworkPolicy, and the claim of its claimTemplate, or None if not seen.
    problems: the creates and deletes that failed last time.
    round: how far the creates of the recorded attempt came: "complete" (each had success), "begun" by this process, or
        "unknown", for example after a restart of the operator.
    created: names of the pods of this attempt that this process knows to exist, or to have existed.
    logs: what the end of the log of a failed pod says, by its uid; None if it says nothing, or could not be read.
    objects: what the job owns of the kinds in ``names.SCHEDULING_KINDS``.
    found: objects of the cluster by kind and name (``Plan.lookups``).
    served: the API versions of these kinds that the API server serves; None before it was asked.
    elder: the eldest partial job (``scheduling.guard``) if it is elder than this one; None if this job neither is
        partial nor has yielded.
    may_try: a pod of the namespace has gone, so creates that a quota refused may have success now.
    token_key: of this process, which draws the tokens of attempts from it; b"" draws none. Secret.
    live: the pods come from a LIST of this reconcile, not from the cache.
    has_workload: whether the job's Workload exists, by a GET of this reconcile; False only if each GET of a minute said
        so. None if it is not known.
    """

    pods: Sequence[PodView] = ()
    former: Sequence[PodView] = ()
    sharing: Sequence[str] = ()
    service: Json | None = None
    policy: Json | None = None
    claim: Json | None = None
    problems: Sequence[Problem] = ()
    round: Literal["unknown", "begun", "complete"] = "unknown"
    created: Collection[str] = frozenset()
    progress: Polled = NOT_POLLED
    logs: Mapping[str, LogFailure | None] = field(default_factory=dict)
    objects: Mapping[Resource, Sequence[Json]] = field(default_factory=dict)
    found: Mapping[tuple[Resource, str], Json | Unknown] = field(default_factory=dict)
    served: Collection[str] | None = None
    elder: Elder | None = None
    may_try: bool = False
    token_key: bytes = field(default=b"", repr=False)
    live: bool = False
    has_workload: bool | None = None


def owned_pods(job: Mapping[str, Any], pods: Iterable[PodView]) -> list[PodView]:
    """Return the pods that have this job as controller, sorted by name.

    Pods of a deleted job of the same name, or with the job's labels only, are left out.
    """
    uid = job["metadata"]["uid"]
    return sorted((pod for pod in pods if pod.owner_uid == uid), key=lambda pod: pod.name)
