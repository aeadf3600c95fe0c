"""``Snapshot``: what was read of one job at one time. One reader makes it on a cluster, another on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from ddpjob.api.objects import Json
from ddpjob.engine.actions import EngineSettings


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The objects as they were read. An object that could not be read is absent, and ``unread`` says why.

    now: by the clock of the API server, if there is one.
    settings: as far as the texts about a job depend on them.
    pods: of the job, of all attempts; None if they could not be read.
    claims: those that were read, by name; None for one that does not exist.
    events: of the job, its pods and its claims, as far as they are needed.
    others: the Service and the NetworkPolicy of the job, for a bundle.
    operators: the Deployments of operators; None if they could not be read, or there is no cluster.
    logs: the ends of logs, by the pod's name.
    operator_log: what the operator logged about the job, for a bundle.
    versions: of programs and of the cluster, by their name, for a bundle.
    is_run: whether a process of this machine runs the job, which is not suspended; None on a cluster.
    ended: error, hint and next step with which that process ended, if they are known.
    only_waiting: the pods that run are left out, because there are many.
    unread: the reason, by the kind of what could not be read.
    """

    job: Json
    now: datetime
    settings: EngineSettings
    pods: Sequence[Json] | None = None
    claims: Mapping[str, Json | None] = field(default_factory=dict)
    events: Sequence[Json] = ()
    others: Sequence[Json] = ()
    operators: Sequence[Json] | None = None
    logs: Mapping[str, str] = field(default_factory=dict)
    operator_log: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    is_run: bool | None = None
    ended: Sequence[str] = ()
    only_waiting: bool = False
    unread: Mapping[str, str] = field(default_factory=dict)
