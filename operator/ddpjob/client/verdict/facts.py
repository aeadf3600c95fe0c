"""``Case``: a snapshot of a job as the engine reads it, with what the rules of the verdict share."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from ddpjob.api import names
from ddpjob.api.limits import MAX_ADVICE
from ddpjob.api.log_failure import log_failure
from ddpjob.api.objects import Json, event_time
from ddpjob.api.pod_view import PodView, pod_view
from ddpjob.api.status import Condition, CurrentAttempt, DDPJobStatus, Failure, recorded_status
from ddpjob.api.text import clean, shorten
from ddpjob.api.times import seconds_between
from ddpjob.client.snapshot import Snapshot
from ddpjob.client.verdict.explanation import NORMAL, Confidence, Evidence, Explanation, Stage
from ddpjob.engine.attempt import recorded_attempt
from ddpjob.engine.desired import Job
from ddpjob.engine.observed import Observed, owned_pods
from ddpjob.engine.obstacles import EARLIER_PODS
from ddpjob.engine.scheduling import elastic
from ddpjob.engine.state import JobState

OVERDUE_SECONDS = 75.0
"""For how long an operator that works may leave a change unseen: its listing finds what its watches lost after 60 s."""
NO_HEARTBEAT = "NoHeartbeat"
"""Reason of a hang, or of a long pause, that is only inferred from the age of the last report in the status."""
OF_A_RUN = (
    "Ctrl-Z or SIGSTOP has stopped it, or the machine is too busy; the ranks train on",
    "fg in its shell, or kill -CONT with its process id",
)
"""Hint and next about a job of this machine that nothing acts on."""
LOWER_CONFIDENCE: Mapping[Confidence, Confidence] = {"High": "Medium", "Medium": "Low", "Low": "Low"}


class Case:
    """A snapshot, with the views of it that rules share."""

    def __init__(self, facts: Snapshot) -> None:
        self.facts = facts
        self.meta: Json = facts.job["metadata"]
        self.name, self.namespace = str(self.meta["name"]), str(self.meta["namespace"])
        self.spec: Json = facts.job["spec"]
        self.status: DDPJobStatus = recorded_status(facts.job.get("status") or {})
        self.attempt: CurrentAttempt = recorded_attempt(self.status, facts.now)
        owned = owned_pods(facts.job, map(pod_view, facts.pods or ()))
        self.pods = [replace(p, logged=_logged(facts, p) or p.logged) for p in owned]
        self.raw = {pod["metadata"]["name"]: pod for pod in facts.pods or ()}

    @cached_property
    def job(self) -> Job | None:
        """The job with the nodes of its recorded attempt; None if this release cannot read the spec."""
        try:
            job = Job.of(self.facts.job)
        except ValidationError:
            return None
        return job.of_size(elastic.nodes_of(job.spec, self.status, self.attempt))

    @cached_property
    def state(self) -> JobState | None:
        """The state as the engine decides on it; None if this release cannot read the spec."""
        if self.job is None:
            return None
        observed = Observed(pods=self.pods)
        return JobState(self.job, self.status, observed, self.facts.now, self.facts.settings)

    @cached_property
    def unbound(self) -> str:
        """Why claims are not bound; empty if all are, or nothing is known.

        The newest event says for example that the storage class does not exist, or that nothing provisions the claim.
        """
        texts = []
        for name, claim in sorted(self.facts.claims.items()):
            phase = (claim.get("status") or {}).get("phase", "Pending") if claim is not None else "absent"
            newest = self.events_of("PersistentVolumeClaim", name)[-1:] if claim is not None else []
            why = "".join(f": {event.get('reason')}: {event.get('message')}" for event in newest)
            texts += [shorten(clean(f"claim {name} is {phase}{why}"), MAX_ADVICE)] if phase != "Bound" else []
        return "; ".join(texts)

    def of_claims(self) -> Iterator[Evidence]:
        """Yield phase and newest event of each claim that is not bound."""
        kind = "PersistentVolumeClaim"
        for name, claim in sorted(self.facts.claims.items()):
            if claim is None:
                yield Evidence(kind=kind, name=name, field="metadata.name", value="does not exist")
                continue
            if (phase := (claim.get("status") or {}).get("phase", "Pending")) == "Bound":
                continue
            yield Evidence(kind=kind, name=name, field="status.phase", value=phase)
            if (given := (claim.get("spec") or {}).get("storageClassName")) is not None:
                yield Evidence(kind=kind, name=name, field="spec.storageClassName", value=given)
            yield from map(of_event, self.events_of(kind, name)[-1:])

    @cached_property
    def current(self) -> list[PodView]:
        """The pods of the recorded attempt, by node_rank."""
        return sorted((p for p in self.pods if p.attempt == self.attempt.number), key=lambda pod: pod.node_rank)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the recorded attempt; of a spec that cannot be read, as the status has it."""
        if self.job is not None:
            return self.job.nodes
        return self.status.world.num_nodes if self.status.world is not None else 1

    @property
    def is_local(self) -> bool:
        """Whether a process of this machine is the operator of the job."""
        return self.facts.is_run is not None

    @property
    def last_failure(self) -> Failure | None:
        return self.status.failures[-1] if self.status.failures else None

    @property
    def diverged_loss(self) -> Evidence | None:
        """The last loss, if it is NaN or infinite."""
        progress = self.status.progress
        is_diverged = progress is not None and (progress.loss or "").lstrip("-") in ("nan", "inf")
        return self.of_job("status.progress.loss", progress.loss) if is_diverged and progress is not None else None

    @property
    def running_nodes(self) -> int:
        """How many nodes run."""
        if self.facts.only_waiting or self.facts.pods is None:
            return self.status.nodes.running if self.status.nodes is not None else 0
        return sum(pod.state == "running" for pod in self.current)

    @property
    def missing_nodes(self) -> list[int]:
        """Ranks of the nodes that neither run nor have succeeded, as far as they are known."""
        if self.facts.only_waiting:
            return [pod.node_rank for pod in self.current if pod.state == "pending"]
        present = {pod.node_rank for pod in self.current if pod.state in ("running", "succeeded")}
        return sorted({*range(self.num_nodes)} - present - {*(self.status.succeeded_nodes or ())})

    def place_of(self, pod: PodView) -> dict[str, Any]:
        """Return the fields of an ``Explanation`` that name a pod which does not run."""
        return {
            "attempt": pod.attempt,
            "node_rank": pod.node_rank,
            "pod": pod.name,
            "node_name": pod.node_name,
            "missing_nodes": self.missing_nodes if self.running_nodes else None,
        }

    def condition(self, kind: str) -> Condition | None:
        return next((c for c in self.status.conditions or () if c.type == kind), None)

    @property
    def waits_for_pods(self) -> str:
        """Which pods the next attempt waits for, and until when; empty if it waits for none."""
        found = self.condition("Running")
        return found.message if found is not None and found.reason == EARLIER_PODS else ""

    def events_of(self, kind: str, name: str) -> list[Json]:
        """Return the events of an object, the newest last."""
        about = ((event, event.get("involvedObject") or {}) for event in self.facts.events)
        return sorted((e for e, of in about if (of.get("kind"), of.get("name")) == (kind, name)), key=event_time)

    def seconds_since(self, time: str | None) -> float:
        return seconds_between(time, self.facts.now) if time else 0.0

    def logs_command(self, node_rank: int = 0, attempt: int | None = None) -> str:
        """Return the command that shows the log of a node."""
        number = self.attempt.number if attempt is None else attempt
        pod = names.pod_name(self.name, str(self.meta["uid"]), number, node_rank)
        return self.facts.settings.logs_command.format(
            namespace=self.namespace, job=self.name, attempt=number, node_rank=node_rank, pod=pod
        )

    def of_job(self, path: str, value: object) -> Evidence:
        return Evidence(kind=names.DDPJOBS.kind, name=self.name, field=path, value=str(value))

    def of_condition(self, condition: Condition) -> Evidence:
        """Return what a condition of the job says, as evidence."""
        text = f"{condition.status} {condition.reason}: {condition.message}".rstrip(": ")
        return self.of_job(f"status.conditions[{condition.type}]", text)

    def verdict(
        self,
        stage: Stage,
        reason: str,
        sentence: str,
        evidence: Iterable[Evidence | None],
        *,
        confidence: Confidence = "High",
        is_abnormal: bool | None = None,
        needs: Iterable[str] = (),
        advice: tuple[str, str] | None = None,
        **fields: Any,
    ) -> Explanation:
        """Return the explanation. Each kind of ``needs`` that could not be read lowers the confidence.

        advice: hint and next. fields: optional fields of ``Explanation``; ``attempt`` is the recorded one by default.
        """
        pair = {} if advice is None else {"hint": advice[0], "next": advice[1]}
        fields = {"attempt": self.attempt.number or None} | pair | fields
        unread = [self.facts.unread[kind] for kind in needs if kind in self.facts.unread]
        quoted = [item for item in evidence if item is not None]
        short = {key: shorten(text, MAX_ADVICE) for key in ("hint", "next") if (text := fields.get(key))}
        return Explanation(
            job=self.name,
            namespace=self.namespace,
            state=self.status.state or "Pending",
            stage=stage,
            reason=reason,
            is_abnormal=stage not in NORMAL if is_abnormal is None else is_abnormal,
            sentence=" ".join(sentence.split()),
            confidence=LOWER_CONFIDENCE[confidence] if unread else confidence,
            evidence=quoted or [self.of_job("status.state", self.status.state or "")],
            operator="Unknown",
            unread=unread,
            **{key: value for key, value in fields.items() if value not in (None, "")} | short,
        )


def of_event(event: Json) -> Evidence:
    """Return an event as evidence about its object."""
    about = event["involvedObject"]
    text = f"{event.get('reason')}: {event.get('message')}"
    return Evidence(kind="Event", name=f"{about.get('kind')}/{about.get('name')}", field="message", value=text)


def _logged(facts: Snapshot, pod: PodView) -> Any:
    text = facts.logs.get(pod.name)
    return log_failure(text) if text and pod.report is None and pod.exit_code else None
