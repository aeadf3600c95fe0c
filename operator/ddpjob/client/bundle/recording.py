"""What is recorded of a job: the inputs of ``plan()``, and what else shows why the job is in its state."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Literal

from pydantic import ValidationError

from ddpjob.api import names
from ddpjob.api.log_failure import LogFailure
from ddpjob.api.model import WireModel
from ddpjob.api.objects import Json, element
from ddpjob.api.pod_view import pod_view
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import EngineSettings, Plan
from ddpjob.engine.claims import is_claim_of, unbound_claim
from ddpjob.engine.desired import Job, desired_policy
from ddpjob.engine.observed import Elder, Observed, owned_pods
from ddpjob.engine.plan import plan
from ddpjob.engine.scheduling.guard import standing

Place = Literal["machine", "cluster"]
Assumed = Literal["service", "networkPolicy", "claim"]
ASSUMED: tuple[Assumed, ...] = ("service", "networkPolicy", "claim")
_ASSUMED_UID = "assumed"


class Unread(WireModel):
    """Something that a bundle lacks."""

    what: str
    """What could not be read."""
    reason: str
    """Why: no right, no answer, or it does not exist."""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The objects of one job as they were read.

    now: by the clock of the API server, if there is one.
    settings: of the operator that serves the job.
    round: see ``Observed.round``.
    pods: of all attempts; None if they could not be read.
    former: the pods of a deleted job of the same name.
    assumed: what could not be read, and is taken to exist as the job needs it.
    claims: by name; None for one that does not exist.
    operators: the Deployments of operators.
    logs: see ``Observed.logs``.
    texts: other files, by their path in the bundle.
    versions: of programs and of the cluster, by their name.
    names: other names that identify a person: of the user, of this machine.
    """

    job: Json
    now: datetime
    place: Place
    settings: EngineSettings
    round: Literal["unknown", "complete"] = "unknown"
    pods: Sequence[Json] | None = ()
    former: Sequence[Json] = ()
    service: Json | None = None
    policy: Json | None = None
    assumed: Collection[Assumed] = ()
    claims: Mapping[str, Json | None] = field(default_factory=dict)
    events: Sequence[Json] = ()
    operators: Sequence[Json] = ()
    logs: Mapping[str, LogFailure | None] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    unread: Sequence[Unread] = ()
    names: Collection[str] = ()

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.job["metadata"]["namespace"])

    def plan(self, now: datetime | None = None) -> Plan:
        """Return what the operator does next, by default at the time of the recording."""
        # PodGroups and Workloads are not recorded: a plan with their systems would create them again.
        settings = replace(self.settings, gang_scheduler=None, kueue=None)
        return plan(self.job, self._observed(), now or self.now, settings)

    def _observed(self) -> Observed:
        pods = owned_pods(self.job, map(pod_view, self.pods or ()))
        return Observed(
            pods,
            former=[] if (self.job.get("status") or {}).get("attempt") else [pod_view(pod) for pod in self.former],
            service={} if "service" in self.assumed else self.service,
            policy=self._assumed_policy() if "networkPolicy" in self.assumed else self.policy,
            claim={} if "claim" in self.assumed else self._claim(),
            round=self.round,
            logs=self.logs,
            unbound=self._unbound(),
            elder=self._elder(),
            live=True,
        )

    def _claim(self) -> Json | None:
        found = self.claims.get(names.claim_name(self.name))
        return found if is_claim_of(found, self.name) else None

    def _assumed_policy(self) -> Json | None:
        try:
            wanted = desired_policy(Job.of(self.job), self.settings)
        except ValidationError:
            return None  # nor is it needed: the operator refuses the spec
        if wanted is None:
            return None
        return wanted.body | {"metadata": wanted.body["metadata"] | {"uid": _ASSUMED_UID}}

    def _elder(self) -> Elder | None:
        """Return some job for one that yielded: other jobs are not recorded, and the operator waited for one."""
        found = standing(self.job)
        return Elder("", "", timestamp(self.now)) if found is not None and found.since is None else None

    def _unbound(self) -> str:
        """Return why claims are not bound, as the operator finds it out for pods that no node fits."""
        texts = (unbound_claim(name, claim, self._events_of_claim(name)) for name, claim in sorted(self.claims.items()))
        return "; ".join(filter(None, texts))

    def _events_of_claim(self, name: str) -> list[Json]:
        about = {"kind": "PersistentVolumeClaim", "name": name}
        return [event for event in self.events if about.items() <= (event.get("involvedObject") or {}).items()]


def needs_logs(recording: Recording) -> tuple[tuple[str, str], ...]:
    """Return name and uid of the pods whose logs the operator reads before it decides."""
    return recording.plan().logs


def operator_environment(deployment: Json) -> dict[str, str]:
    """Return the variables of the operator's container, as far as the Deployment shows their values."""
    containers = deployment["spec"]["template"]["spec"].get("containers") or ()
    container = element(containers, "name", "operator") or next(iter(containers), {})
    given: dict[str, str] = {}
    for variable in container.get("env") or ():
        source = ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")
        if source == "metadata.namespace":
            given[str(variable["name"])] = str(deployment["metadata"].get("namespace") or "")
        elif "value" in variable:
            given[str(variable["name"])] = str(variable["value"])
    return given


def to_wire(value: EngineSettings | LogFailure) -> Json:
    """Return settings, or what a log says, as JSON."""
    return asdict(value)


def settings_of(document: Json) -> EngineSettings:
    """Return settings from their JSON; fields of another release are ignored."""
    return EngineSettings(**_known(EngineSettings, document))


def log_failure_of(document: Json | None) -> LogFailure | None:
    """Return what a log says from its JSON."""
    return LogFailure(**_known(LogFailure, document)) if document is not None else None


def _known(kind: type[Any], document: Json) -> Json:
    known = {one.name for one in fields(kind)}
    return {key: value for key, value in document.items() if key in known}
