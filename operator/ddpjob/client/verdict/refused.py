"""The verdict on a job that is refused, or that a queue or a quota holds back."""

import re
from collections.abc import Mapping, Sequence

from ddpjob.api import names
from ddpjob.client.verdict.explanation import Evidence, Explanation, Stage
from ddpjob.client.verdict.facts import Case, of_event
from ddpjob.engine.actions import REFUSALS_TO_SHOW
from ddpjob.engine.advice import BY_ADMINISTRATOR, Row, advice
from ddpjob.engine.scheduling.gangs import NOT_ENFORCED, UNAVAILABLE
from ddpjob.engine.scheduling.kueue import DEACTIVATED, QUEUE_UNAVAILABLE, WAITING

_NO_GANG = (UNAVAILABLE, NOT_ENFORCED)
_OF_OPERATOR = frozenset({"CreateRefused", "CreateFailed", "NameConflict", "NameTerminating", *_NO_GANG})
"""Reasons of what only the operator has seen: the responses to its creates, and its gang scheduler."""
_WAIT_FOR_WEBHOOK = (
    f"wait: the creates are sent again; if it lasts, {BY_ADMINISTRATOR}kubectl get "
    "validatingwebhookconfigurations,mutatingwebhookconfigurations, and to look at the one that the message names"
)
_REFUSALS: Mapping[str, tuple[str, str]] = {
    "CreateRefused": (
        "the API server or an admission webhook refuses it",
        "correct what the message names; kubectl describe namespace {namespace}",
    ),
    "CreateFailed": ("the API server or an admission webhook does not answer", _WAIT_FOR_WEBHOOK),
    "InvalidSpec": ("the CRD accepted what this operator refuses", "correct the field that the message names"),
    "SpecChanged": ("", "undo the change, or delete the job and apply it again"),
    "NameConflict": ("another program or user created an object of that name", "delete or rename the object"),
    UNAVAILABLE: (
        "the job asks for all nodes or none, and the operator has no gang scheduler for it",
        "the administrator of the operator sets the chart's scheduling.gangScheduler, or apply the job without "
        "spec.scheduling",
    ),
    NOT_ENFORCED: (
        "the job asks for all nodes or none, and the API server of the cluster does not know groups of pods",
        "the administrator of the cluster enables what the message names, or apply the job without spec.scheduling",
    ),
    "NameTerminating": ("an object of a deleted job still ends", "nothing; the next attempt starts when it is gone"),
    **dict.fromkeys(
        REFUSALS_TO_SHOW,
        ("an admission webhook refuses it, or the operator lacks the right", "kubectl describe ddp -n {namespace}"),
    ),
}
_OF_QUEUES: Mapping[str, tuple[str, str]] = {
    WAITING: ("other jobs use the quota of the queue", "wait, request less, or use another queue"),
    QUEUE_UNAVAILABLE: ("the queue cannot admit the job without a change", "what the message says"),
    DEACTIVATED: ("an administrator or Kueue took the job out of its queue", "the command in the message"),
}
_QUOTA_EXCEEDED = "QuotaExceeded"
_STAGES: Mapping[str, Stage] = {
    "NameTerminating": "Starting",
    "CreateFailed": "Starting",
    **dict.fromkeys(_NO_GANG, "Placement"),
    _QUOTA_EXCEEDED: "Quota",
}
"""By reason; of the others, Refused."""
OF_REFUSALS: Sequence[Row] = (
    Row(
        r'persistentvolumeclaims "[^"]+" is forbidden: exceeded quota: (?P<name>[a-z0-9.-]+)',
        "other claims of the namespace use the quota of storage, or the claim needs more than the whole quota",
        "kubectl describe quota {name} -n {namespace}; request less in checkpoint.claimTemplate, or delete claims",
        _QUOTA_EXCEEDED,
    ),
    Row(
        r"exceeded quota: (?P<name>[a-z0-9.-]+)",
        "other pods of the namespace use the quota, or the job needs more than the whole quota",
        "kubectl describe quota {name} -n {namespace}; use fewer nodes, or end other jobs",
        _QUOTA_EXCEEDED,
    ),
    Row(
        r"failed quota: ",
        "a quota of the namespace counts limits or requests that the pods do not have",
        "set them in spec.resources; kubectl describe quota -n {namespace}",
    ),
    Row(
        r"violates PodSecurity",
        "Pod Security of the namespace forbids what the pods ask for",
        "correct podSecurity, or securityContext, volumes and host namespaces in spec.template; kubectl get namespace "
        "{namespace} --show-labels",
    ),
    Row(
        r"""(?:admission webhook|ValidatingAdmissionPolicy) ["'](?P<name>[^"']+)["']""",
        "a policy of the cluster refuses the pods",
        "correct what the message names, in the spec or in spec.template, or ask the owner of the policy {name}",
    ),
    Row(
        r"(?i)service ?account \S+ not found",
        "the pods name a service account that does not exist",
        "create the ServiceAccount, or correct serviceAccountName in spec.template",
    ),
    Row(
        r"no PriorityClass",
        "the priority class does not exist",
        f"correct priorityClassName; {BY_ADMINISTRATOR}kubectl get priorityclasses",
    ),
    Row(
        r'RuntimeClass "[^"]+" not found',
        "the runtime class does not exist",
        "correct runtimeClassName in spec.template",
    ),
    Row(
        r"RuntimeClass",
        "the pods contradict their runtime class: its node selector, its tolerations or its overhead",
        "correct nodeSelector, tolerations, overhead or runtimeClassName in spec.template",
    ),
    Row(
        r"is forbidden: .*GKE Warden",
        "the provider of the cluster allows no such pods in this namespace",
        "use another namespace, or correct what the message names",
    ),
    Row(
        r"\bcannot \w+ resource",
        "the operator lacks the right",
        "the administrator of the operator installs the chart's roles for this namespace",
    ),
    Row(r"is being terminated", "the namespace is being deleted", "use another namespace"),
    Row(
        r"per (?:Container|Pod)\b|LimitRange",
        "a LimitRange of the namespace does not allow such resources",
        "correct spec.resources; kubectl describe limitrange -n {namespace}",
    ),
    Row(r" is invalid: ", "the API server does not accept the pod", "correct the field that the message names"),
)
"""What the API server writes when it refuses a pod: first what refuses, then a text that may have any words."""
# https://github.com/kubernetes-sigs/kueue/blob/v0.14.0/pkg/scheduler/flavorassigner/flavorassigner.go
OF_QUEUES: Sequence[Row] = (
    Row(
        r"maximum capacity",
        "the job asks for more than its whole queue has",
        "request less in spec.resources, use fewer nodes, or another queue",
    ),
    Row(
        r"node affinity|untolerated taint|unavailable in ClusterQueue",
        "no flavor of the queue fits what the job asks for",
        "correct spec.resources, or nodeSelector, affinity and tolerations in spec.template, or use another queue",
    ),
    Row(
        r"is inactive|is stopped|doesn't exist",
        "the queue is stopped or does not exist",
        f"correct the label {names.LABEL_QUEUE} or use another queue; its administrator may start it again",
    ),
)


def queued(case: Case) -> Explanation | None:
    """Explain a job that its queue has not admitted."""
    running = case.condition("Running")
    if running is None or running.status == "True" or running.reason not in _OF_QUEUES:
        return None
    hint, todo = _OF_QUEUES[running.reason]
    waits = running.reason == WAITING
    if waits and "insufficient unused quota" not in running.message and (stuck := advice(running.message, OF_QUEUES)):
        waits, hint, todo = False, *stuck
    return case.verdict(
        "Quota",
        running.reason,
        f"{case.name} waits: {running.message}",
        [case.of_condition(running)],
        is_abnormal=not waits,
        advice=(hint, f"ddpjob why {case.name}, again later; {todo}" if waits else todo),
    )


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
    hint, todo = _REFUSALS.get(reason, _REFUSALS["CreateRefused"])
    name = ""
    if reason == "CreateRefused" and (found := _first_named(message)) is not None:
        row, name = found
        reason, hint, todo = row.reason or reason, row.hint, row.next
    stage = _STAGES.get(reason, "Refused")
    what = f"waits for quota {name}" if reason == _QUOTA_EXCEEDED else "is refused" if stage == "Refused" else "waits"
    return case.verdict(
        stage,
        reason,
        f"{case.name} {what}: {message}",
        [quoted],
        advice=(hint, todo.format(namespace=case.namespace, name=name)),
        until=case.attempt.ending.until if case.attempt.ending else None,
    )


def _first_named(message: str) -> tuple[Row, str] | None:
    """Return the row whose pattern comes first in the message of the API server, and the name in it."""
    found = [(match, row) for row in OF_REFUSALS if (match := re.search(row.pattern, message))]
    match, row = min(found, key=lambda each: each[0].start(), default=(None, None))
    return (row, match.groupdict().get("name") or "") if match is not None and row is not None else None
