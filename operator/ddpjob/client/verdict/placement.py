"""The verdict on pods without a Kubernetes node: no node fits, none is added, or a gang has too few."""

from collections.abc import Iterator
from typing import Any

from ddpjob.api.objects import Json, condition, element
from ddpjob.api.pod_view import PodView
from ddpjob.api.status import Condition
from ddpjob.client.verdict.autoscalers import Refusal, scaling
from ddpjob.client.verdict.explanation import Evidence, Explanation
from ddpjob.client.verdict.facts import Case
from ddpjob.client.verdict.scheduler import NO_CLAIM, Meaning, meaning
from ddpjob.engine.advice import BY_ADMINISTRATOR, DESCRIBE_NODE
from ddpjob.engine.scheduling import guard
from ddpjob.engine.suspects import NODES_NEEDED, UNSCHEDULABLE_SECONDS, banned

_UNSEEN_SECONDS = 30.0
"""A scheduler looks at a new pod within a second; a busy one takes longer."""
_SCHEDULED = "status.conditions[PodScheduled].message"
_OF_GANGS = (
    "the free nodes suffice for some of the pods: other jobs hold the rest, and perhaps also wait",
    f"{BY_ADMINISTRATOR}kubectl describe nodes, which shows what is allocated; use fewer nodes with numNodes, or a "
    "priorityClassName with a higher priority",
)


def gave_back(case: Case) -> Explanation | None:
    """Explain a job that gave its Kubernetes nodes back, because they were too few, and has not started again."""
    attempt = case.attempt
    if not attempt.is_closed or attempt.verdict not in guard.VERDICTS:
        return None
    return case.verdict(
        "Placement",
        attempt.verdict or "",
        f"{case.name} waits for Kubernetes nodes: {attempt.message}",
        [case.of_job("status.currentAttempt.ending.verdict", attempt.verdict)],
        advice=_OF_GANGS,
        until=attempt.ending.until if attempt.ending else None,
    )


def partly_placed(case: Case, found: Condition) -> Explanation:
    """Explain a gang of which only some pods have a Kubernetes node. found: the condition that says so."""
    pod = next((pod for pod in case.current if not pod.node_name), None)
    if isinstance(scaled := scaling(case), Explanation):
        return scaled
    why, quoted, advice = scaled or Refusal()
    return case.verdict(
        "Placement",
        found.reason,
        f"{case.name} waits: {found.message}{why}",
        [
            quoted,
            case.of_condition(found),
            case.of_job("status.currentAttempt.partialSince", case.attempt.partial_since),
        ],
        advice=advice or _OF_GANGS,
        **(case.place_of(pod) if pod is not None else {}),
    )


def unschedulable(case: Case, pod: PodView) -> Explanation:
    """Explain a pod that no Kubernetes node fits, by what the scheduler and an autoscaler say of it."""
    message, avoided = pod.unschedulable or "", _avoided(case)
    found = meaning(message, len(banned(case.status)))
    if found.reason == "Volume":
        return _no_volume(case, pod, message, found)
    quoted = Evidence(kind="Pod", name=pod.name, field=_SCHEDULED, value=message)
    if isinstance(scaled := scaling(case), Explanation):
        return scaled
    why, event, given = scaled or Refusal()
    advice = given or found.advice(case.namespace)
    if (nodes := banned(case.status)) and not advice:
        hint = f"no other Kubernetes node fits, so the job uses it again after {UNSCHEDULABLE_SECONDS} s"
        advice = hint, DESCRIBE_NODE.format(node=nodes[0].node_name)
    hint, todo = advice or ("", f"kubectl describe pod {pod.name} -n {case.namespace}")
    without = [p for p in case.current if p.unschedulable is not None]
    return case.verdict(
        "Placement",
        NODES_NEEDED if avoided and not found.rows else found.reason,
        f"no Kubernetes node fits {len(without)} of {case.num_nodes} pods of {case.name}: {message}{why}",
        [quoted, event, *_asked(case, pod, found.reason)],
        advice=(f"the job does not run on {avoided}; {hint}" if avoided else hint, todo),
        needs=["events"],  # by them, an autoscaler may be adding a node
        confidence="High" if found.is_sure else "Medium",
        **case.place_of(pod),
    )


def _avoided(case: Case) -> str:
    """Return the Kubernetes nodes that the pods avoid, why and until when; empty if they avoid none."""
    nodes = banned(case.status)
    return ", ".join(f"{node.node_name} until {node.until} ({node.reason})" for node in nodes)


def _no_volume(case: Case, pod: PodView, message: str, found: Meaning) -> Explanation:
    """Explain a pod without a Kubernetes node whose volume is the cause."""
    given = Meaning([NO_CLAIM], ()) if None in case.facts.claims.values() else found
    return case.verdict(
        "Volume",
        "Volume",
        f"{case.name} waits for a volume: {'; '.join(filter(None, (case.unbound, message)))}",
        [Evidence(kind="Pod", name=pod.name, field=_SCHEDULED, value=message), *case.of_claims()],
        advice=given.advice(case.namespace),
        needs=["claims", "events"],
        confidence="High" if found.is_sure else "Medium",
        **case.place_of(pod),
    )


def _asked(case: Case, pod: PodView, reason: str) -> Iterator[Evidence]:
    """Yield what the pod asks for that no Kubernetes node has."""
    spec = case.raw[pod.name].get("spec") or {}
    if reason == "Taint":
        own = [t for t in spec.get("tolerations") or () if not str(t.get("key")).startswith("node.kubernetes.io/")]
        yield Evidence(kind="Pod", name=pod.name, field="spec.tolerations", value=_text(own) or "none")
    if reason == "Affinity":
        for name in ("nodeSelector", "affinity", "topologySpreadConstraints"):
            if name in spec:
                yield Evidence(kind="Pod", name=pod.name, field=f"spec.{name}", value=_text(spec[name]) or "none")
    if reason == "Resource":
        asked = element(spec.get("containers"), "name", "trainer").get("resources") or {}
        value = _text(asked.get("requests") or asked.get("limits") or {}) or "none"
        yield Evidence(kind="Pod", name=pod.name, field="spec.containers[trainer].resources.requests", value=value)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items())
    return "; ".join(map(_text, value)) if isinstance(value, list) else str(value)


def gates(case: Case, pod: PodView) -> list[Json]:
    """Return the scheduling gates of a pod: until they are removed, no scheduler looks at it."""
    return (case.raw[pod.name].get("spec") or {}).get("schedulingGates") or []


def gated(case: Case, pod: PodView) -> Explanation:
    """Explain a pod that has scheduling gates."""
    value = ", ".join(str(gate.get("name")) for gate in gates(case, pod))
    return case.verdict(
        "Quota",
        "SchedulingGated",
        f"{case.name} waits in a queue: the pods may not be scheduled until {value} is removed",
        [Evidence(kind="Pod", name=pod.name, field="spec.schedulingGates", value=value)],
        hint="a queue such as Kueue removes the gate when there is quota for the whole job",
        next=f"{BY_ADMINISTRATOR}kubectl get workloads,localqueues -n {case.namespace}",
        **case.place_of(pod),
    )


def is_unseen(case: Case, pod: PodView) -> bool:
    """Return whether no scheduler has looked at a pod that has waited for longer than a busy one takes."""
    raw = case.raw[pod.name]
    is_seen = pod.node_name or condition(raw.get("status"), "PodScheduled")
    return not is_seen and case.seconds_since(raw["metadata"].get("creationTimestamp")) > _UNSEEN_SECONDS


def no_scheduler(case: Case, pod: PodView) -> Explanation:
    """Explain a pod that no scheduler has looked at."""
    raw = case.raw[pod.name]
    name = (raw.get("spec") or {}).get("schedulerName", "default-scheduler")
    age = int(case.seconds_since(raw["metadata"].get("creationTimestamp")))
    return case.verdict(
        "Placement",
        "NoScheduler",
        f"{case.name} waits: no scheduler has looked at {pod.where} for {age} s",
        [Evidence(kind="Pod", name=pod.name, field="spec.schedulerName", value=name)],
        confidence="Medium",
        hint="no scheduler looks at the pod: its schedulerName does not run in this cluster",
        next="correct schedulerName in spec.template, or install that scheduler",
        **case.place_of(pod),
    )
