"""The verdict on a job whose pods do not all run: refused, quota, placement, volume, image, configuration."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import LAUNCHER
from ddpjob.api.objects import Json, condition, element, event_time
from ddpjob.api.pod_view import PodView
from ddpjob.api.status import Condition
from ddpjob.client.verdict.advice import OF_KUBELETS, OF_QUEUES, OF_REFUSALS, advice_on
from ddpjob.client.verdict.autoscalers import NODE_ADDED, no_node_added, node_added, scaling
from ddpjob.client.verdict.explanation import Confidence, Evidence, Explanation, Stage
from ddpjob.client.verdict.facts import Case, of_event
from ddpjob.client.verdict.images import image_advice
from ddpjob.engine.evidence import REFUSALS
from ddpjob.engine.obstacles import CONTAINER_CREATING, EARLIER_PODS, FORMER_PODS, NOT_DELETED, obstacles
from ddpjob.engine.scheduling import guard
from ddpjob.engine.scheduling.base import UNAVAILABLE
from ddpjob.engine.scheduling.kueue import DEACTIVATED, QUEUE_UNAVAILABLE, WAITING

_OF_OPERATOR = frozenset({"CreateRefused", "CreateFailed", "NameConflict", "NameTerminating", UNAVAILABLE})
"""Reasons of what only the operator has seen: the responses to its creates, and its gang scheduler."""
_IMAGE = frozenset(
    {"ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "RegistryUnavailable"}
)
_CONTAINER = REFUSALS | {"CreateContainerError", "RunContainerError", "PostStartHookError", "CrashLoopBackOff"}
_NOT_PREPARED = frozenset({"PodNotPrepared", CONTAINER_CREATING})
_OF_VOLUMES = re.compile(r"FailedMount|FailedAttachVolume|FailedMapVolume|VolumeResizeFailed|VolumePermissionChange")
_QUOTA = re.compile(r"exceeded quota: ([a-z0-9.-]+)")
_UNSEEN_SECONDS = 30.0
"""A scheduler looks at a new pod within a second; a busy one takes longer."""
_SCHEDULED = "status.conditions[PodScheduled].message"
_MOST_PROBLEMS = 8
"""Pods with different problems that are explained."""

_STARTED = frozenset({"Scheduled", "Pulling", "Pulled", "Created", "Started"})
"""Events of a pod that come after its volumes are mounted and its network is set up, or after it got its node."""
_NAMED_VOLUME = re.compile(r'volume "([^"]+)"')

# Taints that the control plane, an autoscaler or a driver sets while a node is not ready, or is being removed.
_OF_STATE = (
    r"node\.kubernetes\.io/(?!unschedulable)|node\.cloudprovider\.kubernetes\.io/|ToBeDeletedByClusterAutoscaler"
    r"|karpenter\.sh/(?:disrupt|unregistered)|cloud\.google\.com/impending-node-termination|[\w.-]+/agent-not-ready"
)
# Clauses of the scheduler's message, in the order in which the most specific one decides.
# https://github.com/kubernetes/kubernetes/tree/v1.34.0/pkg/scheduler/framework/plugins
_CLAUSES: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "Volume",
        re.compile(r"unbound immediate PersistentVolumeClaim|persistentvolumeclaim \"|volume node affinity", re.I),
    ),
    ("Volume", re.compile(r"available persistent volumes to bind|max volume count|StorageClass", re.I)),
    ("Resource", re.compile(r"Insufficient [\w./-]+|Too many pods")),
    ("Affinity", re.compile(r"didn't match Pod's node affinity/selector|affinity rules|anti-affinity|topology spread")),
    ("NodeNotReady", re.compile(rf"taint \{{(?:{_OF_STATE})")),
    ("Taint", re.compile(rf"(?:untolerated|had) taint(?! \{{(?:{_OF_STATE}|node\.kubernetes\.io/unschedulable))")),
    ("Cordoned", re.compile(r"were unschedulable|taint \{node\.kubernetes\.io/unschedulable")),
    ("Ports", re.compile(r"didn't have free ports")),
)
_CONTROL_PLANE = re.compile(r"had untolerated taint \{node-role\.kubernetes\.io/(control-plane|master)[^}]*\}")
_UNNAMED_TAINT = "untolerated taint(s)"
"""The scheduler names no taint since Kubernetes 1.34, so the nodes may also be broken."""
_TAINTS = "kubectl get nodes -o custom-columns=NAME:.metadata.name,TAINTS:.spec.taints"
_ADVICE: Mapping[str, tuple[str, str]] = {
    "Resource": (
        "no Kubernetes node has so much free: other pods use it, or no node is that large",
        "kubectl describe nodes shows what is allocated; request less in spec.resources, or use fewer nodes",
    ),
    "Taint": (
        "the nodes that would fit are reserved for pods that tolerate their taint",
        f"{_TAINTS}; tolerate it in spec.template",
    ),
    _UNNAMED_TAINT: (
        "the nodes that would fit are reserved by a taint, or are not ready, which a taint under node.kubernetes.io/ "
        "shows",
        f"{_TAINTS}; repair nodes that are not ready; a taint that reserves nodes can be tolerated in spec.template",
    ),
    "NodeNotReady": (
        "the nodes that would fit are not ready or are being removed: the taint shows this, and ends with it",
        "kubectl get nodes; kubectl describe node NODE; the job starts when they are ready",
    ),
    "Affinity": (
        "no Kubernetes node has the labels that nodeSelector or affinity in spec.template require",
        "kubectl get nodes --show-labels; correct nodeSelector or affinity in spec.template",
    ),
    "Cordoned": ("a person cordoned the nodes, or drains them", "kubectl get nodes; kubectl uncordon NODE"),
    "Ports": ("pods with hostNetwork or hostPort use the port", "use other ports, or fewer nodes on one machine"),
    "Volume": (
        "no volume fits the claim, or nothing provisions its storage class",
        "kubectl get pvc,storageclass -n {namespace}; correct checkpoint.claimTemplate or the claim",
    ),
    "NoClaim": (
        "a volume of the pods names a claim that does not exist",
        "kubectl get pvc -n {namespace}; create the claim, or correct checkpoint.claimName or the volume",
    ),
    "NoScheduler": (
        "no scheduler looks at the pod: its schedulerName does not run in this cluster",
        "correct schedulerName in spec.template, or install that scheduler",
    ),
}
_OF_GANGS = (
    "the free nodes suffice for some of the pods: other jobs hold the rest, and perhaps also wait",
    "kubectl get ddp -A; kubectl describe nodes shows what is allocated; use fewer nodes with numNodes, or a "
    "priorityClassName with a higher priority",
)
_REFUSALS: Mapping[str, tuple[str, str]] = {
    "CreateRefused": (
        "the API server or an admission webhook refuses it",
        "correct what the message names; kubectl describe limitrange,namespace/{namespace} -n {namespace}",
    ),
    "CreateFailed": ("the API server or an admission webhook does not answer", "nothing; the creates are sent again"),
    "InvalidSpec": ("the CRD accepted what this operator refuses", "correct the field that the message names"),
    "SpecChanged": ("", "undo the change, or delete the job and apply it again"),
    "NameConflict": ("another program or user created an object of that name", "delete or rename the object"),
    UNAVAILABLE: (
        "the job asks for all nodes or none, and the operator has no gang scheduler for it",
        "the administrator of the operator sets the chart's scheduling.gangScheduler, or apply the job without "
        "spec.scheduling",
    ),
    "NameTerminating": ("an object of a deleted job still ends", "nothing; the next attempt starts when it is gone"),
    "DeleteRefused": (
        "an admission webhook refuses it, or the operator lacks the right",
        "kubectl describe ddp -n {namespace}",
    ),
}


_OF_QUEUES: Mapping[str, tuple[str, str]] = {
    WAITING: ("other jobs use the quota of the queue", "wait, request less, or use another queue"),
    QUEUE_UNAVAILABLE: ("the queue cannot admit the job without a change", "what the message says"),
    DEACTIVATED: ("an administrator or Kueue took the job out of its queue", "the command in the message"),
}


def queue_of(job: Json) -> str:
    """Return the queue that a job waits in; empty if it waits in none."""
    waits = condition(job.get("status"), "Running").get("reason") == WAITING
    return str((job["metadata"].get("labels") or {}).get(names.LABEL_QUEUE) or "") if waits else ""


def queued(case: Case) -> Explanation | None:
    """Explain a job that its queue has not admitted, with its place there."""
    running = case.condition("Running")
    if running is None or running.status == "True" or running.reason not in _OF_QUEUES:
        return None
    hint, todo = _OF_QUEUES[running.reason]
    place = _place_in_queue(case)
    text = f"{case.name} waits: {running.message}" + (f"; it is {place.value} there" if place else "")
    waits = running.reason == WAITING
    if (
        waits
        and "insufficient unused quota" not in running.message
        and (stuck := advice_on(running.message, OF_QUEUES))
    ):
        waits, hint, todo = False, *stuck
    return case.verdict(
        "Quota",
        running.reason,
        text,
        [case.of_condition(running), place],
        is_abnormal=not waits,
        hint=hint,
        next=f"ddpjob why {case.name}, again later; {todo}" if waits else todo,
        attempt=case.attempt.number or None,
    )


def _place_in_queue(case: Case) -> Evidence | None:
    name = names.service_name(case.name, str(case.meta["uid"]))
    waiting = case.facts.pending or ()
    found = next((each for each in waiting if each["metadata"]["name"] == name), None)
    if found is None:
        return None
    own, all_ = (int(found.get(f"positionIn{kind}Queue") or 0) + 1 for kind in ("Local", "Cluster"))
    text = f"number {own} of {len(waiting)} in its queue, and number {all_} of all"
    return Evidence(kind="Workload", name=name, field="positionInLocalQueue", value=text)


def refused(case: Case) -> Explanation | None:
    """Explain a job that cannot go on without a change, or whose pods the API server refuses."""
    stalled, running = case.condition("Stalled"), case.condition("Running")
    found = stalled if stalled is not None and stalled.status == "True" else running
    if found is None or (found is running and (running.status == "True" or running.reason not in _OF_OPERATOR)):
        return _refused_before(case)
    return _refusal(case, found.reason, found.message, case.of_condition(found))


def _refused_before(case: Case) -> Explanation | None:
    """Explain the refusal of the attempt before, while the next one tries again."""
    if not case.attempt.refusals or case.attempt.is_closed or case.attempt.all_running_time is not None or case.pods:
        return None
    events = [e for e in case.events_of("DDPJob", case.name) if e.get("reason") in _OF_OPERATOR]
    if not events:
        return None
    return _refusal(case, str(events[-1]["reason"]), str(events[-1].get("message")), of_event(events[-1]))


def _refusal(case: Case, reason: str, message: str, quoted: Evidence) -> Explanation:
    until = case.attempt.ending.until if case.attempt.ending else None
    place: dict[str, Any] = {"attempt": case.attempt.number or None, "until": until}
    if (quota := _QUOTA.search(message)) is not None:
        return case.verdict(
            "Quota",
            "QuotaExceeded",
            f"{case.name} waits for quota {quota[1]}: {message}",
            [quoted, *_of_quota(case, quota[1])],
            hint="other pods of the namespace use the quota, or the job needs more than the whole quota",
            next=f"kubectl describe quota {quota[1]} -n {case.namespace}; use fewer nodes, or end other jobs",
            needs=["quotas"],
            **place,
        )
    hint, todo = _REFUSALS.get(reason, _REFUSALS["CreateRefused"])
    if reason == "CreateRefused":
        hint, todo = advice_on(message, OF_REFUSALS, namespace=case.namespace) or (hint, todo)
    stage: Stage = "Starting" if reason in ("NameTerminating", "CreateFailed") else "Refused"
    stage = "Placement" if reason == UNAVAILABLE else stage
    sentence = f"{case.name} {'is refused' if stage == 'Refused' else 'waits'}: {message}"
    todo = todo.format(namespace=case.namespace)
    return case.verdict(stage, reason, sentence, [quoted], hint=hint, next=todo, **place)


def _of_quota(case: Case, name: str) -> Iterator[Evidence]:
    """Yield what of a quota is used up."""
    status = next((q.get("status") or {} for q in case.facts.quotas if q["metadata"]["name"] == name), {})
    used = status.get("used") or {}
    for resource, hard in (status.get("hard") or {}).items():
        text = f"{used.get(resource, '0')} of {hard}"
        yield Evidence(kind="ResourceQuota", name=name, field=f"status.used[{resource}]", value=text)


def waiting(case: Case) -> Explanation | None:
    """Explain why not all nodes run; None if they do, or have ended."""
    if not _waits(case):
        return None
    running = case.condition("Running")
    if running is not None and running.reason in (FORMER_PODS, EARLIER_PODS):
        return _held(case, running)
    if case.attempt.is_closed:
        return _starting(case, "")
    if running is not None and running.reason == guard.PARTIAL:
        return _partly_placed(case, running)
    pods = [pod for pod in case.current if pod.state == "pending"]
    found = next(obstacles(case.state), None) if case.state is not None and case.facts.pods is not None else None
    # In the order of the engine's obstacles, so that the condition and the verdict name the same pod.
    problems = [
        (explained, pod)
        for applies, explained in (
            (lambda pod: pod.waiting is not None, _not_started),
            (lambda pod: pod.unschedulable is not None, _unschedulable),
            (lambda pod: bool(_gates(case, pod)), _gated),
            (lambda pod: _is_unseen(case, pod), _no_scheduler),
        )
        for pod in filter(applies, pods)
    ]
    if problems:
        return _with_others(case, problems)
    if found is not None and found[0] in _NOT_PREPARED:
        return _not_prepared(case, pods, *found)
    return _starting(case, found[1] if found else "")


def _with_others(case: Case, problems: Sequence[tuple[Callable[[Case, PodView], Explanation], PodView]]) -> Explanation:
    """Return the verdict on the first problem, with a different problem of another pod as evidence."""
    different = {(pod.waiting, pod.unschedulable): (explained, pod) for explained, pod in reversed(problems)}
    found, *others = [explained(case, pod) for explained, pod in [*reversed(different.values())][:_MOST_PROBLEMS]]
    by_reason = {other.reason: other for other in reversed(others) if other.reason != found.reason}
    quoted = [
        other.evidence[0].model_copy(update={"value": f"and node_rank {other.node_rank}: {other.evidence[0].value}"})
        for other in reversed(by_reason.values())
    ]
    return found.model_copy(update={"evidence": [*found.evidence, *quoted]})


def _held(case: Case, running: Condition) -> Explanation:
    """Explain a job that waits for pods that may still write where its next attempt reads."""
    _, is_forgotten, command = running.message.partition(NOT_DELETED)
    return case.verdict(
        "Starting",
        running.reason,
        f"{case.name} waits: {running.message}",
        [case.of_condition(running)],
        is_abnormal=bool(is_forgotten),
        next=command.lstrip(": ") if is_forgotten else f"ddpjob why {case.name}, again later",
        attempt=case.attempt.number or None,
    )


def gave_back(case: Case) -> Explanation | None:
    """Explain a job that gave its Kubernetes nodes back, because they were too few, and has not started again."""
    attempt = case.attempt
    if not attempt.is_closed or attempt.verdict not in guard.VERDICTS:
        return None
    hint, todo = _OF_GANGS
    return case.verdict(
        "Placement",
        attempt.verdict or "",
        f"{case.name} waits for Kubernetes nodes: {attempt.message}",
        [case.of_job("status.currentAttempt.ending.verdict", attempt.verdict)],
        hint=hint,
        next=todo,
        attempt=attempt.number,
        until=attempt.ending.until if attempt.ending else None,
    )


def _partly_placed(case: Case, found: Condition) -> Explanation:
    hint, todo = _OF_GANGS
    pod = next((pod for pod in case.current if not pod.node_name), None)
    why, quoted = "", None
    if (scaled := scaling(case)) is not None:
        if scaled[1]["reason"] in NODE_ADDED:
            return node_added(case, *scaled)
        why, hint, todo, quoted = no_node_added(scaled[1])
    return case.verdict(
        "Placement",
        found.reason,
        f"{case.name} waits: {found.message}{why}",
        [
            quoted,
            case.of_condition(found),
            case.of_job("status.currentAttempt.partialSince", case.attempt.partial_since),
        ],
        hint=hint,
        next=todo,
        **(case.place_of(pod) if pod is not None else {"attempt": case.attempt.number}),
    )


def _waits(case: Case) -> bool:
    if any(pod.state == "pending" for pod in case.current):
        return True
    running = case.condition("Running")
    return running is None or running.status != "True"


def _unschedulable(case: Case, pod: PodView) -> Explanation:
    message = pod.unschedulable or ""
    causes = _causes(message)
    reason = causes[0] if causes else "Unschedulable"
    hint, todo = _advice(causes, message)
    todo = todo or f"kubectl describe pod {pod.name} -n {case.namespace}"
    if reason == "Volume":
        return _no_volume(case, pod, message, "High" if len(causes) == 1 else "Medium")
    is_sure = len(causes) == 1 and _UNNAMED_TAINT not in message
    quoted = Evidence(kind="Pod", name=pod.name, field=_SCHEDULED, value=message)
    why, event = "", None
    if (scaled := scaling(case)) is not None:
        if scaled[1]["reason"] in NODE_ADDED:
            return node_added(case, *scaled)
        why, hint, todo, event = no_node_added(scaled[1])
    without = [p for p in case.current if p.unschedulable is not None]
    return case.verdict(
        "Placement",
        reason,
        f"no Kubernetes node fits {len(without)} of {case.num_nodes} pods of {case.name}: {message}{why}",
        [quoted, event, *_asked(case, pod, reason)],
        hint=hint,
        next=todo,
        needs=["events"],  # by them, an autoscaler may be adding a node
        confidence="High" if is_sure else "Medium",
        **case.place_of(pod),
    )


def _no_volume(case: Case, pod: PodView, message: str, confidence: Confidence) -> Explanation:
    """Explain a pod without a Kubernetes node whose volume is the cause."""
    hint, todo = _ADVICE["NoClaim" if None in case.facts.claims.values() else "Volume"]
    return case.verdict(
        "Volume",
        "Volume",
        f"{case.name} waits for a volume: {'; '.join(filter(None, (case.unbound, message)))}",
        [Evidence(kind="Pod", name=pod.name, field=_SCHEDULED, value=message), *_of_claims(case)],
        hint=hint,
        next=todo.format(namespace=case.namespace),
        needs=["claims", "events"],
        confidence=confidence,
        **case.place_of(pod),
    )


def _advice(causes: list[str], message: str) -> tuple[str, str]:
    """Return hint and next for what the scheduler says of the nodes; empty if that is not known."""
    hint, todo = _ADVICE.get(causes[0], ("", "")) if causes else ("", "")
    if causes[:1] == ["Taint"] and _UNNAMED_TAINT in message:
        hint, todo = _ADVICE[_UNNAMED_TAINT]
    return f"{hint}; or the nodes that fit are those that are not ready" if "NodeNotReady" in causes[1:] else hint, todo


def _causes(message: str) -> list[str]:
    """Return what the scheduler's message says of the nodes; of a control plane only if there is no other node."""
    for text in (_CONTROL_PLANE.sub("", message), message):
        if found := list(dict.fromkeys(reason for reason, pattern in _CLAUSES if pattern.search(text))):
            return found
    return []


def _asked(case: Case, pod: PodView, reason: str) -> Iterator[Evidence]:
    """Yield what the pod asks for that no Kubernetes node has."""
    spec = case.raw[pod.name].get("spec") or {}
    if reason == "Taint":
        own = [t for t in spec.get("tolerations") or () if not str(t.get("key")).startswith("node.kubernetes.io/")]
        yield Evidence(kind="Pod", name=pod.name, field="spec.tolerations", value=_text(own) or "none")
    if reason == "Affinity":
        for name in ("nodeSelector", "affinity"):
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


def _of_claims(case: Case) -> Iterator[Evidence]:
    """Yield phase and newest event of each claim that is not bound."""
    kind = "PersistentVolumeClaim"
    for name, claim in sorted(case.facts.claims.items()):
        if claim is None:
            yield Evidence(kind=kind, name=name, field="metadata.name", value="does not exist")
            continue
        if (phase := (claim.get("status") or {}).get("phase", "Pending")) == "Bound":
            continue
        yield Evidence(kind=kind, name=name, field="status.phase", value=phase)
        if (given := (claim.get("spec") or {}).get("storageClassName")) is not None:
            yield Evidence(kind=kind, name=name, field="spec.storageClassName", value=given)
        yield from map(of_event, case.events_of(kind, name)[-1:])


def _gates(case: Case, pod: PodView) -> list[Json]:
    return (case.raw[pod.name].get("spec") or {}).get("schedulingGates") or []


def _gated(case: Case, pod: PodView) -> Explanation:
    value = ", ".join(str(gate.get("name")) for gate in _gates(case, pod))
    return case.verdict(
        "Quota",
        "SchedulingGated",
        f"{case.name} waits in a queue: the pods may not be scheduled until {value} is removed",
        [Evidence(kind="Pod", name=pod.name, field="spec.schedulingGates", value=value)],
        hint="a queue such as Kueue removes the gate when there is quota for the whole job",
        next=f"kubectl get workloads,localqueues -n {case.namespace}",
        **case.place_of(pod),
    )


def _is_unseen(case: Case, pod: PodView) -> bool:
    raw = case.raw[pod.name]
    is_seen = pod.node_name or condition(raw.get("status"), "PodScheduled")
    return not is_seen and case.seconds_since(raw["metadata"].get("creationTimestamp")) > _UNSEEN_SECONDS


def _no_scheduler(case: Case, pod: PodView) -> Explanation:
    raw = case.raw[pod.name]
    name = (raw.get("spec") or {}).get("schedulerName", "default-scheduler")
    hint, todo = _ADVICE["NoScheduler"]
    age = int(case.seconds_since(raw["metadata"].get("creationTimestamp")))
    return case.verdict(
        "Placement",
        "NoScheduler",
        f"{case.name} waits: no scheduler has looked at {pod.where} for {age} s",
        [Evidence(kind="Pod", name=pod.name, field="spec.schedulerName", value=name)],
        confidence="Medium",
        hint=hint,
        next=todo,
        **case.place_of(pod),
    )


def _not_started(case: Case, pod: PodView) -> Explanation:
    """Explain a container that the kubelet does not start."""
    reason, message = pod.waiting or ("", "")
    container = pod.waiting_init or "trainer"
    statuses = "initContainerStatuses" if pod.waiting_init else "containerStatuses"
    field = f"status.{statuses}[{container}].state.waiting"
    image = _image(case.raw[pod.name], container)
    quoted = [Evidence(kind="Pod", name=pod.name, field=field, value=f"{reason}: {message}")]
    stage: Stage = "Image" if reason in _IMAGE else "Configuration"
    if stage == "Image":
        path = f"spec.{'initContainers' if pod.waiting_init else 'containers'}[{container}].image"
        quoted.append(Evidence(kind="Pod", name=pod.name, field=path, value=image))
        hint, todo, is_named = image_advice(message, image)
        texts = [of_event(e) for e in case.events_of("Pod", pod.name) if e.get("reason") == "Failed"]
        if not is_named and (failed := [text for text in texts if image in text.value]):
            hint, todo, _ = image_advice(failed[-1].value, image)
            quoted.append(failed[-1])  # a message "Back-off pulling image" alone says nothing
        todo = todo.format(node=pod.node_name)
        what = f"the image {image} of {pod.where} cannot be pulled"
        if pod.waiting_init == LAUNCHER:
            hint, todo = f"this is the launcher image of the operator; {hint}", "ask the administrator of the operator"
    else:
        hint, todo = _of_kubelet(case, pod, f"{reason}: {message}") or (
            "the Secret, ConfigMap or key that the message names does not exist, or the command is wrong",
            "create it, or correct env, envFrom, command or template and create the job again",
        )
        what = f"the kubelet does not start {pod.where}"
    return case.verdict(
        stage,
        reason,
        f"{case.name} waits: {what}: {pod.waiting_text}",
        quoted,
        hint=hint,
        next=f"{todo}; kubectl describe pod {pod.name} -n {case.namespace}",
        confidence="High" if reason in _IMAGE | _CONTAINER and not message.startswith("failed to sync") else "Medium",
        **case.place_of(pod),
    )


def _of_kubelet(case: Case, pod: PodView, text: str) -> tuple[str, str] | None:
    return advice_on(text, OF_KUBELETS, namespace=case.namespace, pod=pod.name, node=str(pod.node_name))


def _image(pod: Json, container: str) -> str:
    spec = pod.get("spec") or {}
    found = element([*(spec.get("containers") or ()), *(spec.get("initContainers") or ())], "name", container)
    return str(found.get("image") or "")


def _not_prepared(case: Case, pods: list[PodView], reason: str, message: str) -> Explanation:
    """Explain a pod whose volumes, network or image are not ready, from the events of its kubelet."""
    with_node = [pod for pod in pods if pod.node_name]
    found = [(_warnings(seen), seen, pod) for pod in with_node if (seen := case.events_of("Pod", pod.name))]
    # A pod with a warning first: the others wait for it.
    warnings, events, pod = min(found, key=lambda each: not each[0], default=([], [], with_node[0]))
    place = case.place_of(pod) | {"next": f"kubectl describe pod {pod.name} -n {case.namespace}"}
    if warnings:
        last, why = warnings[-1], str(warnings[-1].get("reason"))
        is_volume = _OF_VOLUMES.search(why) is not None
        known = _of_kubelet(case, pod, f"{why}: {last.get('message')}")
        hint, todo = known or ("", "")
        place["next"] = "; ".join(filter(None, (todo, place["next"])))
        return case.verdict(
            "Volume" if is_volume else "Configuration",
            why,
            f"{case.name} waits: {pod.where} does not start: {last.get('message')}",
            [of_event(last), *(_of_claims(case) if is_volume else ())],
            hint=hint,
            confidence="High" if known else "Medium",
            **place,
        )
    if events and events[-1].get("reason") == "Pulling":
        sentence = f"{case.name} waits: {pod.where} pulls its image: {events[-1].get('message')}"
        return case.verdict("Image", "Pulling", sentence, [of_event(events[-1])], is_abnormal=False, **place)
    what = Evidence(kind="Pod", name=pod.name, field="status.phase", value="Pending")
    return case.verdict(
        "Starting", reason, f"{case.name} waits: {message}", [what], needs=["events"], confidence="Medium", **place
    )


def _warnings(events: list[Json]) -> list[Json]:
    """Return the warnings of a pod with a Kubernetes node that no later event of the pod disproves.

    In the first seconds a kubelet often warns of a volume or a network which it then has.
    """
    started = max((event_time(event) for event in events if event.get("reason") in _STARTED), default=None)
    attached = {
        name[1]: event_time(event)
        for event in events
        if event.get("reason") == "SuccessfulAttachVolume" and (name := _NAMED_VOLUME.search(str(event.get("message"))))
    }

    def holds(event: Json) -> bool:
        name = _NAMED_VOLUME.search(str(event.get("message")))
        until = attached.get(name[1]) if name is not None and event.get("reason") == "FailedAttachVolume" else None
        return all(end is None or event_time(event) > end for end in (started, until))

    return [event for event in events if event.get("type") == "Warning" and holds(event)]


def _starting(case: Case, message: str) -> Explanation:
    """Explain pods that start without an obstacle, or of which nothing but the condition is known."""
    running = case.condition("Running")
    quoted = case.of_condition(running) if running is not None else None
    if case.facts.pods is None and running is not None:
        return _from_condition(case, running.reason, running.message)
    if case.running_nodes and case.missing_nodes:
        ranks = ", ".join(map(str, case.missing_nodes[:8]))
        sentence = f"{case.running_nodes} of {case.num_nodes} nodes of {case.name} run and wait for node_rank {ranks}"
        return case.verdict(
            "Rendezvous", "NodesMissing", sentence, [quoted], is_abnormal=False,
            attempt=case.attempt.number, missing_nodes=case.missing_nodes, confidence="Medium",
            next=f"ddpjob why {case.name}, again in a minute",
        )  # fmt: skip
    reason = running.reason if running is not None and running.status != "True" else "Starting"
    text = message or (running.message if running is not None else "") or "its nodes are starting"
    return case.verdict(
        "Starting", reason, f"{case.name} starts: {text}", [quoted], attempt=case.attempt.number or None
    )


def _from_condition(case: Case, reason: str, message: str) -> Explanation:
    """Explain with the operator's own words, without the pods."""
    stage: Stage = "Starting"
    hint, todo = "", ""
    if reason == "Unschedulable":
        causes = _causes(message)
        stage, reason = ("Volume" if "Volume" in causes[:1] else "Placement"), (causes or [reason])[0]
        hint, todo = _advice(causes, message)
    elif reason in _IMAGE:
        stage = "Image"
    elif reason in _CONTAINER:
        stage = "Configuration"
    running = case.condition("Running")
    return case.verdict(
        stage,
        reason,
        f"{case.name} waits: {message}",
        [case.of_condition(running) if running is not None else None],
        hint=hint,
        next=todo.format(namespace=case.namespace),
        needs=["pods"],
        attempt=case.attempt.number,
    )
