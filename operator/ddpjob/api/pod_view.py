"""A pod as the operator keeps and reads it: one state, and the termination message of its trainer container.

The state is that of the trainer container, not the pod's phase: a sidecar must not keep a finished job running. A pod
of the API server takes about 20 KB as Python objects, its view less than 1 KB.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from sys import intern
from typing import Any, Literal

from ddpjob.api import limits, names
from ddpjob.api.log_failure import LogFailure, error_file, log_failure
from ddpjob.api.objects import condition, element, is_true, owner_uid
from ddpjob.api.report import EndReport, end_report
from ddpjob.api.text import clean, clean_lines
from ddpjob.api.times import parse_time

PodState = Literal["pending", "running", "succeeded", "failed"]
# Waiting reasons of every start; any other one is shown in the status.
_ORDINARY_WAITING = frozenset({"ContainerCreating", "PodInitializing", ""})
# The kubelet alternates between these two while a pull fails; as one reason they cause one event.
_SAME_WAITING = {"ErrImagePull": "ImagePullBackOff"}
STOP_SECONDS = 1
"""``spec.activeDeadlineSeconds`` of a pod whose other containers must end: this field of a running pod may be changed.
The kubelet stops them, and the pod and its logs stay."""
_CLOCK_SKEW = timedelta(seconds=2)
_LONGEST_SKEW = timedelta(minutes=10)
"""By how much a node's clock may be slow before a job that was drained could be taken for one that succeeded."""
_MAX_TOKEN = 64
# Reasons of DisruptionTarget of the kubelet, and of controllers that act on the loss of a node.
_WITHOUT_DELETION = frozenset({"TerminationByKubelet", "DeletionByPodGC", "DeletionByTaintManager"})


@dataclass(frozen=True, slots=True)
class PodView:
    """One node of one attempt.

    job_uid: of the job in the pod's label. owner_uid: of the controlling owner.
    message: the kubelet's, about the pod or about an init container that failed.
    failed_init: name of that init container, or "".
    log: the termination message if it is no report: what the program wrote there, or the end of its log.
    report: the trainer's report in the termination message, or None.
    logged: what ``log`` says about the failure, or a longer part of the pod's log (``Observed.logs``).
    waiting: (reason, message) of the container that keeps the trainer from starting, or None while it starts normally.
    waiting_init: name of that container if it is an init container, or "".
    priority: ``spec.priority``, which the API server derives from the PriorityClass.
    is_probe: it asks for room for another node (``names.LABEL_PROBE``), and trains nothing.
    claim: claim and subPath of the checkpoints that it mounts, as in "claim/path"; empty without checkpoints.
    group: the PodGroup that the API server stored for ``spec.schedulingGroup``, or "".
    gated: Kueue manages the pod by itself, and has not admitted it (``names.QUEUE_GATE``).
    token: of its attempt (``names.ENV_TOKEN``), or "". Secret.
    unschedulable: the scheduler's message while no Kubernetes node fits, or None.
    unstarted: its phase is Pending, and its trainer has not started. A kubelet that ends a pod at its deadline before
        it has reported the phase Running leaves it at Pending until all containers have ended.
    stopped: all containers have ended, so the pod holds no resources; ``ended`` is about the trainer only.
    is_told: the operator told the kubelet to stop the containers that run on after the trainer (``STOP_SECONDS``).
    deletion_deadline: when the kubelet kills a pod that is being deleted.
    deleted: someone deleted the pod before its trainer ended.
    evicted: the kubelet ended the pod, for example under memory pressure or at a node shutdown.
    disruption: who ended the pod, for example EvictionByEvictionAPI: the reason of its condition DisruptionTarget if
        that is the cause (``_disruption``), or "".
    unready_since: since when the control plane shows the pod as not ready although its containers are: its node does
        not respond. None if it does.
    created: when the API server created the pod. start_time: when the kubelet accepted it.
    started_at, finished_at: when the trainer's container started and ended, by the clock of its Kubernetes node.
    prepared: the kubelet has set up the volumes and network of a pod whose phase is Pending; None if it does not say.
    """

    name: str
    uid: str
    attempt: int
    node_rank: int
    state: PodState
    deleting: bool
    stopped: bool
    is_told: bool = False
    job_uid: str = ""
    owner_uid: str | None = None
    unstarted: bool = False
    deletion_deadline: str | None = None
    deleted: bool = False
    evicted: bool = False
    disruption: str = ""
    unready_since: str | None = None
    created: str | None = None
    start_time: str | None = None
    prepared: bool | None = None
    node_name: str | None = None
    ip: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    message: str = ""
    failed_init: str = ""
    log: str = ""
    report: EndReport | None = None
    logged: LogFailure | None = None
    started_at: str | None = None
    finished_at: str | None = None
    waiting: tuple[str, str] | None = None
    waiting_init: str = ""
    unschedulable: str | None = None
    priority: int = 0
    gated: bool = False
    group: str = ""
    is_probe: bool = False
    claim: str = ""
    token: str = field(default="", repr=False)

    @property
    def waiting_text(self) -> str:
        """The message of ``waiting``, with the name of the init container."""
        message = self.waiting[1] if self.waiting else ""
        return f"init container {self.waiting_init}: {message}" if self.waiting_init else message

    @property
    def where(self) -> str:
        """The pod as messages name it."""
        return f"node_rank {self.node_rank} ({self.name})"

    @property
    def ended(self) -> bool:
        return self.state in ("succeeded", "failed")

    @property
    def holds_resources(self) -> bool:
        """Whether a container runs that nothing stops."""
        return not (self.stopped or self.deleting or self.is_told)


def pod_view(pod: Mapping[str, Any]) -> PodView:
    """Return the view of a pod of the API server; parts that its status does not have yet are no error."""
    meta, spec = pod["metadata"], pod.get("spec") or {}
    labels = meta.get("labels") or {}
    trainer = element(spec.get("containers"), "name", names.TRAINER_CONTAINER)
    return PodView(
        name=meta["name"],
        uid=meta["uid"],
        job_uid=_shared(labels.get(names.LABEL_JOB_UID)) or "",
        owner_uid=_shared(owner_uid(pod)),
        attempt=_number(labels.get(names.LABEL_ATTEMPT)),
        node_rank=_number(labels.get(names.LABEL_NODE_RANK)),
        deleting="deletionTimestamp" in meta,
        deletion_deadline=meta.get("deletionTimestamp"),
        created=meta.get("creationTimestamp"),
        node_name=_shared(spec.get("nodeName")),
        priority=spec.get("priority") or 0,
        gated=bool(element(spec.get("schedulingGates"), "name", names.QUEUE_GATE)),
        is_probe=names.LABEL_PROBE in labels and names.LABEL_ATTEMPT not in labels,
        claim=_claim(spec, trainer),
        group=_shared((spec.get("schedulingGroup") or {}).get("podGroupName")) or "",
        token=_shared(_token(trainer)) or "",
        **_of_status(pod, meta, spec, pod.get("status") or {}),
    )


def _of_status(
    pod: Mapping[str, Any], meta: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields that the status decides."""
    container = element(status.get("containerStatuses"), "name", names.TRAINER_CONTAINER)
    ended = (container.get("state") or {}).get("terminated") or {}
    text = str(ended.get("message") or "")
    text = error_file(text) or text
    report = end_report(text)
    disruption = _disruption(meta, status, ended)
    is_told = bool(ended) and spec.get("activeDeadlineSeconds") == STOP_SECONDS
    if is_told:  # what the kubelet then writes is not about the trainer
        status = {key: value for key, value in status.items() if key not in ("reason", "message")}
    failed_init, failure_of_init = ("", "") if text else _init_failure(status)
    evicted = status.get("phase") == "Failed" and bool(status.get("reason") or disruption)
    succeeded = ended.get("exitCode") == 0 and report is not None and report.before_stop
    was_drained = bool(ended) and not succeeded and _was_drained(meta, ended)
    state = _state(status, container, ended, interrupted=was_drained or (evicted and not succeeded))
    waiting, waiting_init = _waiting(status, container)
    drained = was_drained if ended else state not in ("succeeded", "failed")
    return {
        "state": state,
        "unstarted": status.get("phase") == "Pending" and state == "pending",
        "is_told": is_told,
        "stopped": status.get("phase") in ("Succeeded", "Failed") or _all_containers_ended(pod),
        "deleted": "deletionTimestamp" in meta and drained,
        "evicted": evicted,
        "disruption": disruption,
        "unready_since": _node_unready_since(status),
        "start_time": status.get("startTime"),
        "prepared": _prepared(status),
        "ip": status.get("podIP"),
        "exit_code": ended.get("exitCode"),
        "signal": ended.get("signal") or None,
        "reason": clean(status.get("reason") or ended.get("reason") or ""),
        "message": "\n".join(part for part in (clean(status.get("message") or ""), failure_of_init) if part),
        "failed_init": failed_init,
        "log": clean_lines(text) if text and not report else "",
        "report": report,
        "logged": log_failure(text) if text and not report and ended.get("exitCode") else None,
        "started_at": (ended or (container.get("state") or {}).get("running") or {}).get("startedAt"),
        "finished_at": ended.get("finishedAt"),
        "waiting": waiting,
        "waiting_init": waiting_init,
        "unschedulable": _unschedulable(status),
    }


def _claim(spec: Mapping[str, Any], trainer: Mapping[str, Any]) -> str:
    for volume in spec.get("volumes") or ():
        if volume.get("name") == names.CHECKPOINT_VOLUME and (source := volume.get("persistentVolumeClaim")):
            mount = element(trainer.get("volumeMounts"), "name", names.CHECKPOINT_VOLUME)
            return intern(names.claim_place(str(source.get("claimName")), mount.get("subPath")))
    return ""


def _state(
    status: Mapping[str, Any], container: Mapping[str, Any], ended: Mapping[str, Any], *, interrupted: bool
) -> PodState:
    if ended:
        return "succeeded" if ended.get("exitCode") == 0 and not interrupted else "failed"
    # An evicted pod, or one whose kubelet refused it, fails without a container status.
    match status.get("phase"):
        case "Failed":
            return "failed"
        case "Succeeded":
            return "succeeded"
        case _:
            return "running" if "running" in (container.get("state") or {}) else "pending"


def _all_containers_ended(pod: Mapping[str, Any]) -> bool:
    """Return whether all containers have ended, which is true shortly before the kubelet sets the final phase.

    Init containers are ignored; the kubelet itself ends those that run as sidecars.
    """
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    ended = {container.get("name") for container in statuses if (container.get("state") or {}).get("terminated")}
    specified = (pod.get("spec") or {}).get("containers") or ()
    return bool(ended) and {container.get("name") for container in (*specified, *statuses)} <= ended


def _was_drained(meta: Mapping[str, Any], ended: Mapping[str, Any]) -> bool:
    """Return whether the trainer ended after the deletion began: exit code 0 then answers SIGTERM, it is no success."""
    if "deletionTimestamp" not in meta:
        return False
    deleted = datetime.fromisoformat(meta["deletionTimestamp"])
    grace = timedelta(seconds=int(meta.get("deletionGracePeriodSeconds") or 0))
    finished = ended.get("finishedAt")
    # Times have whole seconds and come from two machines' clocks; in doubt the exit answers the signal. A success that
    # is in doubt only costs another attempt, which resumes from the last checkpoint.
    skew = _LONGEST_SKEW if ended.get("exitCode") == 0 else _CLOCK_SKEW
    return not finished or datetime.fromisoformat(finished) >= deleted - grace - skew


def _disruption(meta: Mapping[str, Any], status: Mapping[str, Any], ended: Mapping[str, Any]) -> str:
    """Return the reason of the condition DisruptionTarget if this disruption ended the pod, or an empty string.

    The condition announces a disruption. It stays if the trainer ends by itself first, and for two minutes if a
    preemption is given up. It is the cause of a failure only if

    - its status is True, and it is not older than the trainer's container, and
    - the pod is being deleted, and its trainer did not end before that. Two kinds need no deletion: the kubelet ends a
      pod by itself, and a lost node is noticed after its trainer may have ended.
    """
    target = condition(status, "DisruptionTarget")
    changed, started = target.get("lastTransitionTime"), ended.get("startedAt")
    # Certainly before the start, although the times come from two machines' clocks.
    is_older = changed and started and parse_time(changed) < parse_time(started) - _CLOCK_SKEW
    if target.get("status") != "True" or is_older:
        return ""
    reason = str(target.get("reason") or "Disruption")
    was_deleted = _was_drained(meta, ended) if ended else "deletionTimestamp" in meta
    return reason if was_deleted or reason in _WITHOUT_DELETION else ""


def _prepared(status: Mapping[str, Any]) -> bool | None:
    if status.get("phase") != "Pending":
        return None
    return {"True": True, "False": False}.get(condition(status, "PodReadyToStartContainers").get("status", ""))


def _node_unready_since(status: Mapping[str, Any]) -> str | None:
    """Return when the node lifecycle controller marked the pod, because its node stopped sending heartbeats; or None.

    It only sets Ready to False; the kubelet never does so while ContainersReady is True, except for a readiness gate.
    https://github.com/kubernetes/kubernetes/blob/v1.34.0/pkg/controller/util/node/controller_utils.go
    """
    ready = condition(status, "Ready")
    marked = ready.get("status") == "False" and ready.get("reason") != "ReadinessGatesNotReady"
    return str(ready.get("lastTransitionTime") or "") if marked and is_true(status, "ContainersReady") else None


def _init_failure(status: Mapping[str, Any]) -> tuple[str, str]:
    for container in status.get("initContainerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            text = str(ended.get("message") or ended.get("reason") or "")
            report = end_report(text)
            message = report.message if report is not None and report.message else clean(text)
            name = str(container.get("name"))
            return name, f"init container {name} ended with exit code {ended['exitCode']}: {message}"
    return "", ""


def _waiting(status: Mapping[str, Any], container: Mapping[str, Any]) -> tuple[tuple[str, str] | None, str]:
    """Return what keeps the trainer from starting: its own container, or an init container, which precedes it.

    The second value is the name of the init container.
    The kubelet starts the other containers independently of each other. A sidecar that restarts later stops nothing.
    """
    if (container.get("state") or {}).keys() & {"running", "terminated"}:
        return None, ""
    for candidate in (container, *(status.get("initContainerStatuses") or ())):
        waiting = (candidate.get("state") or {}).get("waiting") or {}
        if (reason := str(waiting.get("reason") or "")) not in _ORDINARY_WAITING:
            name = "" if candidate is container else str(candidate.get("name"))
            return (_SAME_WAITING.get(reason, reason), clean(waiting.get("message") or "")), name
    return None, ""


def _unschedulable(status: Mapping[str, Any]) -> str | None:
    scheduled = condition(status, "PodScheduled")
    if scheduled.get("status") != "False" or scheduled.get("reason") == "SchedulingGated":
        return None
    return clean(scheduled.get("message") or scheduled.get("reason") or "")


def _token(trainer: Mapping[str, Any]) -> str:
    env = reversed(trainer.get("env") or ())  # it is one of the last
    return str(element(env, "name", names.ENV_TOKEN).get("value") or "")[:_MAX_TOKEN]


def _shared(text: str | None) -> str | None:
    return intern(text) if text is not None else None


def _number(label: str | None) -> int:
    return int(label) if label and label.isdecimal() and len(label) <= limits.MAX_DIGITS else 0
