"""What follows from a failure: one ordered table, from the facts of a failed node to a reason, a reaction and a hint.

The first row that matches applies. ``make generate`` prints the table as docs/failures.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpjob.api.limits import MAX_ADVICE, MAX_LOG_TAIL, MAX_REASON
from ddpjob.api.objects import Json
from ddpjob.api.text import clean, shorten
from ddpjob.engine.evidence import OOM_KILLED, START_SECONDS, SUPERSEDED, Evidence, signal_name, text_of

_MAX_MESSAGE = 2000
_MAX_LAST_LINE = 300

Action = Literal["Restart", "RestartOnce", "Fail"]
"""RestartOnce: a restart, but the job fails if an earlier failure had the same reason."""

# Exit codes that the trainer reports (docs/trainer.md). They count only in a report: other programs use them otherwise.
_USAGE, _DATA, _RENDEZVOUS, _RANKS, _VOLUME, _STOPPED, _HANG, _MISMATCH, _NOT_FINITE = 2, 66, 69, 71, 73, 75, 76, 78, 79
# Errors of the operating system and of communication, and of GPUs: the same one can have another cause the next time.
_ENVIRONMENT_ERRORS = frozenset(
    {
        *("OSError", "IOError", "FileNotFoundError", "FileExistsError", "PermissionError", "NotADirectoryError"),
        *("IsADirectoryError", "InterruptedError", "BlockingIOError", "ChildProcessError", "ProcessLookupError"),
        *("ConnectionError", "BrokenPipeError", "ConnectionAbortedError", "ConnectionRefusedError", "TimeoutError"),
        *("ConnectionResetError", "gaierror", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"),
        "AcceleratorError",
    }
)
CONFIG_ERROR, INVALID_IMAGE = "CreateContainerConfigError", "InvalidImageName"
"""Reasons of the kubelet for a container that waits."""


@dataclass(frozen=True)
class Row:
    """One row of the table.

    reason: for ``status.failures``; None: the ``kind`` of the trainer's report, its exception, or the kubelet's reason.
    when: what is seen, for docs/failures.md.
    matches: whether the row applies to these facts, given the failures of earlier attempts, newest last.
    counted: whether the restart counts towards restartPolicy.maxRestarts.
    planned: the trainers still run, so they save a checkpoint together before the attempt ends.
    provisional: the restart no longer counts if a Kubernetes node of the attempt proves lost within 120 s.
    node_suspected: the Kubernetes node may be the cause; after two such failures new attempts avoid it.
    hint, next: the usual cause and what to do, unless the trainer's report says more. {logs} is the command that
        shows the log, {pod} and {node} are names.
    """

    reason: str | None
    when: str
    matches: Callable[[Evidence, Sequence[Mapping[str, Any]]], bool]
    action: Action = "Restart"
    counted: bool = True
    planned: bool = False
    provisional: bool = False
    node_suspected: bool = False
    hint: str = ""
    next: str = ""


def _code(*codes: int) -> Callable[[Evidence, Sequence[Mapping[str, Any]]], bool]:
    return lambda e, _: e.code in codes


def _waits_with(reason: str) -> Callable[[Evidence, Sequence[Mapping[str, Any]]], bool]:
    return lambda e, _: e.exit_code is None and e.reason == reason


def _repeats(e: Evidence, earlier: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the attempt before failed with the same exception of the user's code at the same step."""
    if e.code != 1 or None in (e.exception, e.step) or e.exception in _ENVIRONMENT_ERRORS or not earlier:
        return False
    return (earlier[-1].get("exception"), earlier[-1].get("step")) == (e.exception, e.step)


TABLE: tuple[Row, ...] = (
    Row(
        "NodeLost",
        "the Kubernetes node does not respond or was removed (taint manager, pod garbage collection)",
        lambda e, _: e.node_lost,
        counted=False,
        node_suspected=True,
        hint="the Kubernetes node is down, unreachable or deleted",
        next="kubectl get nodes; kubectl describe node {node}",
    ),
    Row(
        "Preempted",
        "the scheduler preempted the pod for one of higher priority",
        lambda e, _: e.disruption == "PreemptionByScheduler",
        counted=False,
        planned=True,
        hint="pods with a higher priority needed the node",
        next="set template.spec.priorityClassName to a higher priority if the job must not be preempted",
    ),
    Row(
        "Drained",
        "the pod was evicted by the eviction API, for example by `kubectl drain`",
        lambda e, _: e.disruption == "EvictionByEvictionAPI",
        counted=False,
        planned=True,
        hint="a person or the cluster autoscaler drained the Kubernetes node",
        next="nothing; training continues from the checkpoint",
    ),
    Row(
        "NodeShutdown",
        "the kubelet ended the pod because its node shut down",
        lambda e, _: e.node_shutdown,
        counted=False,
        planned=True,
        hint="the Kubernetes node was shut down or rebooted",
        next="nothing; training continues from the checkpoint",
    ),
    Row(
        "Evicted",
        "the kubelet evicted the pod because its node ran out of memory, disk or process ids",
        lambda e, _: e.evicted and bool(e.disruption),
        counted=False,
        hint="other pods on the node use more than they request, or this job requests too little",
        next="set resources.requests to what the trainer uses",
    ),
    Row(
        "LimitExceeded",
        "the kubelet evicted the pod because it exceeded its own limit of ephemeral storage or of an emptyDir",
        lambda e, _: e.evicted and e.reason == "Evicted",
        action="RestartOnce",
        hint="the pod wrote more to its local disk than its limits allow",
        next="increase resources.limits.ephemeral-storage or the sizeLimit of the emptyDir, or write to a volume",
    ),
    Row(
        None,
        "the kubelet refused the pod (UnexpectedAdmissionError, OutOfcpu, NodeAffinity, ...)",
        lambda e, _: e.evicted and e.exit_code is None,
        counted=False,
        node_suspected=True,
        hint="the Kubernetes node cannot run the pod although the scheduler chose it, for example a device is missing",
        next="kubectl describe node {node}",
    ),
    Row(
        "PodDeleted",
        "a user or a controller deleted the pod before its trainer ended",
        lambda e, _: e.deleted,
        counted=False,
        planned=True,
        hint="a person or a controller deleted the pod",
        next="nothing; training continues from the checkpoint",
    ),
    Row(
        "PodLost",
        "the pod no longer exists",
        lambda e, _: e.gone,
        counted=False,
        hint="the pod was deleted with --force, or together with its Kubernetes node",
        next="nothing; training continues from the checkpoint",
    ),
    Row(
        OOM_KILLED,
        "a container or a rank exceeded the memory limit",
        lambda e, _: e.oom,
        action="RestartOnce",
        hint="the trainer needs more memory than its limit, or it leaks",
        next="increase resources.limits.memory, or use less memory: a smaller batch, fewer data loader workers",
    ),
    Row(
        INVALID_IMAGE,
        "the name of an image is not valid",
        _waits_with(INVALID_IMAGE),
        action="Fail",
        hint="the kubelet cannot parse the name of the image",
        next="correct spec.image (or the image in spec.template) and create the job again",
    ),
    Row(
        CONFIG_ERROR,
        "a container cannot be configured for 60 s, for example because a Secret or ConfigMap does not exist",
        _waits_with(CONFIG_ERROR),
        action="Fail",
        hint="the Secret, ConfigMap or key that the message names does not exist",
        next="create it, or correct env, envFrom or template, and create the job again",
    ),
    Row(
        "StartError",
        f"the runtime cannot start the command, or exit code 126 or 127 in the first {START_SECONDS} s and without a "
        "report: the command does not exist or cannot be executed",
        lambda e, _: e.code is None and e.not_started,
        action="Fail",
        hint="the command is not in the image, is not executable, or is for another architecture",
        next="correct command, args or image and create the job again; a shell in the image shows what it contains",
    ),
    Row(
        None,
        "the trainer reports wrong settings (exit code 2)",
        _code(_USAGE),
        action="Fail",
        hint="an argument, a DDPTRAIN_* variable or the configuration file is not valid",
        next="correct args or env and create the job again",
    ),
    Row(
        None,
        "the trainer reports that this machine cannot run the ranks or the backend (exit code 71)",
        _code(_RANKS),
        action="Fail",
        hint="the pod has fewer devices than processes, or the image lacks the backend",
        next="correct nprocPerNode, resources or image and create the job again",
    ),
    Row(
        None,
        "the trainer reports a checkpoint or data that do not match this run (exit code 78)",
        _code(_MISMATCH),
        action="Fail",
        hint="the checkpoints were written with other settings or other data",
        next="use another checkpoint.subPath, or the settings of the run that wrote the checkpoints",
    ),
    Row(
        None,
        "the trainer reports a loss that is not finite (exit code 79)",
        _code(_NOT_FINITE),
        action="Fail",
        hint="the training diverged: the same steps would diverge again",
        next="use a lower learning rate, and create the job again",
    ),
    Row(
        None,
        "the trainer reports that it obeyed SIGTERM (exit code 75)",
        _code(_STOPPED),
        counted=False,
        planned=True,
        hint="something sent SIGTERM to the trainer, for example a node that shuts down",
        next="nothing; training continues from the checkpoint",
    ),
    Row(
        None,
        "the trainer reports that a newer run writes to its checkpoint directory (exit code 80)",
        _code(SUPERSEDED),
        counted=False,
        hint="two jobs use the same claim and subPath for their checkpoints",
        next="give each job its own checkpoint.subPath",
    ),
    Row(
        "DeterministicError",
        "the user's code raised the same exception at the same step as in the attempt before",
        _repeats,
        action="Fail",
        hint="the error follows from the code or the data, so another restart would end in the same way",
        next="{logs}; correct the code, and create the job again",
    ),
    Row(
        None,
        "the trainer reports a hang (exit code 76)",
        _code(_HANG),
        node_suspected=True,
        hint="a rank or the network stopped; the report names the collective and the ranks that are missing",
        next="{logs}",
    ),
    Row(
        None,
        "the trainer reports data that are absent or damaged (exit code 66)",
        _code(_DATA),
        hint="the data volume is not mounted, or a download failed",
        next="look at spec.data and at --data-dir",
    ),
    Row(
        None,
        "the trainer reports that ranks are missing at the rendezvous (exit code 69)",
        _code(_RENDEZVOUS),
        hint="a pod started late, or the network does not connect the pods",
        next="look at NetworkPolicies and DNS, or increase rendezvous.timeoutSeconds",
    ),
    Row(
        None,
        "the trainer reports a volume that it cannot write (exit code 73)",
        _code(_VOLUME),
        hint="the volume is full, read-only, or belongs to another user",
        next="increase the claim's size, or set podSecurity.fsGroup to the group that owns the volume",
    ),
    Row(
        None,
        "the trainer reports a lost peer, and neither a pod nor a report shows a failure of another",
        lambda e, _: e.whose == "peer",
        provisional=True,
        hint="a pod or its network failed without a report; its Kubernetes node may be down",
        next="{logs}",
    ),
    Row(
        None,
        "a signal ended the trainer (exit code 128 + n)",
        lambda e, _: e.signal is not None,
        provisional=True,
        node_suspected=True,
        hint="SIGKILL often comes from the kernel's out-of-memory killer, SIGSEGV and SIGBUS from native code",
        next="{logs}; SIGBUS: increase sharedMemory.sizeLimit",
    ),
    Row(
        None,
        "any other exit code",
        lambda e, _: e.exit_code is not None,
        hint="the program ended with an error",
        next="{logs}",
    ),
    Row(
        None,
        "the pod failed without an exit code",
        lambda e, _: True,
        hint="the kubelet gave no exit code",
        next="kubectl describe pod {pod}",
    ),
)


@dataclass(frozen=True)
class Judgement:
    """What follows from a failure. ``evidence`` is None if a deadline of the operator ended the attempt.

    next: what to do, a command or a field to change.
    """

    reason: str
    message: str
    action: Action = "Restart"
    counted: bool = True
    planned: bool = False
    provisional: bool = False
    node_suspected: bool = False
    hint: str = ""
    next: str = ""
    evidence: Evidence | None = None


def judge(evidence: Evidence, earlier: Sequence[Mapping[str, Any]], logs: str) -> Judgement:
    """Return what follows from these facts.

    Args:
        earlier: ``status.failures``, newest last.
        logs: the command that shows the log of the node.
    """
    row = next(row for row in TABLE if row.matches(evidence, earlier))
    reason, message = _reason_and_message(evidence, row)
    again = row.action == "RestartOnce" and any(failure.get("reason") == reason for failure in earlier)
    report = _report(evidence)
    return Judgement(
        reason=reason,
        message=message,
        action="Fail" if again else row.action,
        counted=row.counted,
        planned=row.planned,
        provisional=row.provisional,
        node_suspected=row.node_suspected,
        hint=_advice(report, "hint") or row.hint,
        next=_advice(report, "next") or _command(row.next, logs, evidence),
        evidence=evidence,
    )


def failure_record(
    attempt: int, judgement: Judgement, *, time: str, action: str, counted: bool, with_log: bool
) -> Json:
    """Return one entry of ``status.failures``.

    action: the reaction, Restart or Fail. counted: whether it is a restart that counts. with_log: see ``spec.logTail``.
    """
    evidence = judgement.evidence
    pod = evidence.pod if evidence else None
    entry: Json = {
        "attempt": attempt,
        "nodeRank": evidence.node_rank if evidence else None,
        "rank": evidence.rank if evidence else None,
        "pod": pod.name if pod else None,
        "nodeName": pod.node_name if pod else None,
        "exitCode": evidence.exit_code if evidence else None,
        "signal": evidence.signal if evidence else None,
        "step": evidence.step if evidence else None,
        "exception": evidence.exception if evidence else None,
        "reason": judgement.reason,
        "message": shorten(_with_last_line(judgement, with_log=with_log), _MAX_MESSAGE),
        "hint": judgement.hint or None,
        "next": judgement.next or None,
        "logTail": shorten(pod.log.strip(), MAX_LOG_TAIL) or None if pod and with_log else None,
        "action": action,
        "counted": counted,
        "provisional": (judgement.provisional and counted) or None,
        "nodeSuspected": (judgement.node_suspected and bool(pod and pod.node_name)) or None,
        "time": time,
    }
    return {key: value for key, value in entry.items() if value is not None}


def failure_text(record: Mapping[str, Any]) -> str:
    """Return the message of an entry of ``status.failures`` followed by what to do next."""
    message = str(record["message"])
    return f"{message}; next: {record['next']}" if "next" in record else message


def _with_last_line(judgement: Judgement, *, with_log: bool) -> str:
    """Return the message with the last line of the log, which usually holds the error."""
    pod = judgement.evidence.pod if judgement.evidence else None
    lines = pod.log.split("\n") if pod and with_log else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{judgement.message}: {shorten(last, _MAX_LAST_LINE)}" if last else judgement.message


def _report(e: Evidence) -> Json:
    return e.pod.report if e.pod and e.pod.ended and e.pod.report else {}


def _reason_and_message(e: Evidence, row: Row) -> tuple[str, str]:
    if e.pod is None:
        return "PodLost", f"the pod of node_rank {e.node_rank} is gone: it was deleted, or its node was removed"
    if e.deleted or e.node_lost:
        how = {
            "NodeLost": f"was on Kubernetes node {e.pod.node_name or '(unknown)'}, which is lost or does not respond",
            "Preempted": "was preempted by the scheduler",
            "Drained": "was evicted through the eviction API",
        }
        return row.reason or "PodDeleted", f"{e.where} {how.get(row.reason or '', 'was deleted while it trained')}"
    if text := text_of(_report(e), "message"):
        return _reported(e, row, text)
    if e.oom:
        return OOM_KILLED, f"{e.where} was killed because it exceeded its memory limit{_kubelet_message(e)}"
    if e.signal is not None and row.reason is None:
        why = f" ({e.reason})" if e.reason not in ("", "Error") else ""
        reason = e.reason if e.reason not in ("", "Error") else signal_name(e.signal)
        return camel_case(reason), f"{e.where} was ended by {signal_name(e.signal)}{why}{_kubelet_message(e)}"
    if e.exit_code is None:
        return row.reason or camel_case(e.reason or "PodFailed"), f"{e.where} failed{_kubelet_message(e)}"
    reason = row.reason or camel_case(e.reason or "Error")
    return reason, f"{e.where} ended with exit code {e.exit_code}{_kubelet_message(e)}"


def _reported(e: Evidence, row: Row, text: str) -> tuple[str, str]:
    report = _report(e)
    exception = clean(report.get("exception") or e.kind or "Error")
    details = {key: clean(report[key]) for key in ("rank", "step", "where") if report.get(key) is not None}
    place = "".join(f", {key} {value}" for key, value in details.items())
    reason = row.reason or e.kind or exception  # kind is absent in schema 1
    repeated = "; the attempt before failed in the same way" if row.reason == "DeterministicError" else ""
    return camel_case(reason), f"{e.where}{place}: {exception}: {clean(text)}{repeated}"


def _kubelet_message(e: Evidence) -> str:
    return f": {e.pod.message.strip()}" if e.pod and e.pod.message.strip() else ""


def _command(text: str, logs: str, e: Evidence) -> str:
    pod, node = (e.pod.name, e.pod.node_name) if e.pod else (None, None)
    return text.format(logs=logs, pod=pod or "POD", node=node or "NODE")


def _advice(report: Json, key: str) -> str | None:
    text = text_of(report, key)
    return shorten(text, MAX_ADVICE) if text else None


def camel_case(reason: str) -> str:
    """Return ``reason`` as one CamelCase word, the format that the Kubernetes API conventions require."""
    parts = "".join(c if c.isalnum() else " " for c in reason).split()
    return "".join(part[:1].upper() + part[1:] for part in parts)[:MAX_REASON] or "Error"
