"""The facts of how a node of an attempt failed, and which of several failed nodes failed first.

``failures`` matches its table on these facts.
"""

import re
import signal as signals
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ddpjob.api.exit_codes import RENDEZVOUS, SIGNAL_BASE, SUPERSEDED
from ddpjob.api.failure import FailureFacts
from ddpjob.api.log_failure import LogFailure
from ddpjob.api.names import LAUNCHER
from ddpjob.api.pod_view import PodView
from ddpjob.api.report import EndReport
from ddpjob.api.times import parse_time, seconds_between

OOM_KILLED = "OOMKilled"
"""Reason that the kubelet gives for a container that exceeded its memory limit."""
GPU_OUT_OF_MEMORY = "GPUOutOfMemory"
EXITED_EARLY = "ExitedEarly"
# The line of a traceback with the exception, perhaps behind the rank. Programs that go on with less memory log others.
_GPU_OUT_OF_MEMORY_LINE = re.compile(
    r"^(?:\[\w+\]: ?)*(?:torch\.)?"
    r"(?:(?:cuda\.)?OutOfMemoryError|(?:Runtime|Accelerator)Error: CUDA (?:error: )?out of memory)\b",
    re.MULTILINE,
)
NOT_EXECUTABLE = frozenset({126, 127})
"""Exit codes of a shell for a command that cannot be executed or does not exist."""
_WRONG_FORMAT = re.compile(r"^(?:\S+: )?exec .+: exec format error$|OCI runtime .*: exec format error", re.M)
"""What the runtime, in the container's process, prints before it ends with 255 or 1, or what the kubelet says of it."""
_NOT_IN_IMAGE = re.compile(
    r'exec: "(?!nvidia-)[^"]*": (?:executable file not found in \$PATH|permission denied)'
    r"|executable file `(?!nvidia-)[^`]*` not found in \$PATH"
)
"""What runc and crun say of a command that the image, which is the same on each node, does not contain.

An absolute path may be on a volume that one node does not have.
"""
START_SECONDS = 60
"""A container that ran for longer did start: 126 or 127 is then the exit code of a later command in a script."""
START_ERRORS = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of the kubelet for a container that the runtime could not start; its exit code is 128."""

CONFIG_ERROR, INVALID_IMAGE = "CreateContainerConfigError", "InvalidImageName"
REFUSALS = frozenset({CONFIG_ERROR, INVALID_IMAGE})
"""Reasons of the kubelet for a container that waits, and does not start without a change by the user."""
NO_IMAGE = frozenset(
    {"ImagePullBackOff", "ErrImageNeverPull", INVALID_IMAGE, "ImageInspectError", "RegistryUnavailable"}
)
"""Reasons of the kubelet for a container that waits for its image."""
NO_START = REFUSALS | START_ERRORS | {
    "CreateContainerError", "RunContainerError", "PostStartHookError", "CrashLoopBackOff", "SignatureValidationFailed",
}  # fmt: skip
"""Reasons of the kubelet for a container that waits, or has ended, because it does not start."""
FAILED_TO_SYNC = "failed to sync"
"""How the message of a refusal begins if the kubelet only has not read a Secret or ConfigMap yet."""

Whose = Literal["own", "unknown", "peer"]
"""Whose failure a pod shows: its own, perhaps its own, or that of a peer which it lost."""

# NCCL's watchdog aborts the ranks that wait for a failed one.
_MAY_FOLLOW_A_PEER = frozenset({signals.SIGABRT})
_LOST_NODE = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})
_NO_REPORT = EndReport()


@dataclass(frozen=True)
class PodEvidence:
    """What is known about the failure of one node.

    pod: None if it no longer exists.
    report: what its trainer reported, or another pod reports about it; without a report, all fields are None.
    exit_code: of the trainer, from its container or another pod's report.
    reason, message: of the container or pod, as the kubelet gives them.
    """

    node_rank: int
    pod: PodView | None = None
    report: EndReport = _NO_REPORT
    exit_code: int | None = None
    reason: str = ""
    message: str = ""

    @cached_property
    def whose(self) -> Whose:
        """Whose failure it is.

        Without a report, an ordinary exit code says nothing: torchrun ends with 1 for a failed rank and for a rank that
        lost its peers; the exception in the log decides. A kill, a refusal to start, an eviction and a deletion come
        from outside the training, so they are the pod's own, and so is a GPU with too little memory.
        """
        if self.deleted or self.evicted or self.reason == OOM_KILLED:
            return "own"
        if self.report.code == SUPERSEDED:
            return "peer"
        if self.report.cause in ("own", "peer"):
            return "own" if self.report.cause == "own" else "peer"
        if self.gpu_oom or (self.signal is not None and self.signal not in _MAY_FOLLOW_A_PEER):
            return "own"
        if self.logged is not None and self.logged.cause != "unknown":
            return self.logged.cause
        return "own" if self.signal is None and (self.exit_code is None or self.not_started) else "unknown"

    @property
    def evicted(self) -> bool:
        return self.pod is not None and self.pod.evicted

    @property
    def deleted(self) -> bool:
        return self.pod is not None and self.pod.deleted

    @property
    def disruption(self) -> str:
        return self.pod.disruption if self.pod is not None else ""

    @property
    def node_lost(self) -> bool:
        return self.pod is not None and is_on_lost_node(self.pod)

    @cached_property
    def signal(self) -> int | None:
        """The signal that ended the trainer: the report's, the container's, n of exit code 128 + n, or a rank's."""
        if number := self.report.signal or (self.pod.signal if self.pod else None):
            return number
        if self.exit_code is not None and SIGNAL_BASE < self.exit_code < SIGNAL_BASE + signals.NSIG:
            return self.exit_code - SIGNAL_BASE
        return self.logged.signal if self.logged is not None else None

    @cached_property
    def not_started(self) -> bool:
        """Whether the runtime, the kernel or a shell could not start the command.

        The runtime gives a reason. A shell ends with 126 or 127, but so does a script that trained for an hour and
        whose last command does not exist: these codes count only in the first minute, or if the times are not known.
        """
        if self.pod is None or self.reason in START_ERRORS:
            return self.pod is not None
        pod, is_of_kernel = self.pod, self.exit_code in (1, 255) and _WRONG_FORMAT.search(self.pod.log)
        if self.exit_code not in NOT_EXECUTABLE and not is_of_kernel:
            return False
        if not pod.started_at or not pod.finished_at:
            return True
        return seconds_between(pod.started_at, parse_time(pod.finished_at)) < START_SECONDS

    @property
    def oom(self) -> bool:
        """Whether a container or a rank exceeded the memory limit."""
        return OOM_KILLED in (self.reason, self.report.kind)

    @property
    def gpu_oom(self) -> bool:
        """Whether a GPU had too little memory: by the report, or without it and a signal, by a traceback in the log."""
        report, pod = self.report, self.pod
        if report.kind == GPU_OUT_OF_MEMORY or (report.exception or "").rpartition(".")[2] == "OutOfMemoryError":
            return True
        if pod is None or self.signal is not None:
            return False
        text = f"{pod.logged.exception}: {pod.logged.message}" if pod.logged and pod.logged.exception else pod.log
        return _GPU_OUT_OF_MEMORY_LINE.search(text) is not None

    @property
    def is_wrong_format(self) -> bool:
        """Whether the kernel cannot execute the command on the architecture of this machine."""
        return self.not_started and self.pod is not None and _WRONG_FORMAT.search(self.pod.log) is not None

    @property
    def is_of_image(self) -> bool:
        """Whether the runtime does not find the command in the image, or cannot execute it."""
        return self.not_started and self.pod is not None and _NOT_IN_IMAGE.search(self.pod.log) is not None

    @property
    def logged(self) -> LogFailure | None:
        """What the log of the node shows, if its trainer wrote no report."""
        return self.pod.logged if self.pod is not None and self.report is _NO_REPORT else None

    @cached_property
    def facts(self) -> FailureFacts:
        """What the report, or without one the log, says of the process that failed first on the node."""
        pod = {"pod": self.pod.name, "node_name": self.pod.node_name} if self.pod is not None else {}
        own = {"node_rank": self.node_rank, "exit_code": self.exit_code, "signal": self.signal}
        return FailureFacts.of(self.logged or self.report, **own, **pod)

    @property
    def where(self) -> str:
        return self.pod.where if self.pod else f"node_rank {self.node_rank}"


def failed_pods(pods: Iterable[PodView]) -> list[PodView]:
    """Return the pods whose trainer failed, or that are being deleted before it ended."""
    return [pod for pod in pods if pod.state == "failed" or (pod.deleting and pod.state != "succeeded")]


def whose_failure(pod: PodView) -> Whose:
    """Return whose failure a failed pod shows."""
    return evidence_of(pod).whose


def start_contradicts(other: PodView, evidence: PodEvidence) -> bool:
    """Return whether another pod of the attempt started, and the Kubernetes node of this one could not start it.

    A shell that does not find the command runs for some time, so another shell that runs contradicts nothing yet.
    """
    if not (evidence.not_started or (evidence.exit_code is None and evidence.reason in REFUSALS)):
        return False
    if other.state == "running":
        return evidence.exit_code not in NOT_EXECUTABLE and _is_elsewhere(other, evidence)
    return other.ended and not evidence_of(other).not_started and _is_elsewhere(other, evidence)


def shows_the_same(other: PodView, evidence: PodEvidence) -> bool:
    """Return whether a pod on another Kubernetes node shows that the spec, and not the node, is the cause."""
    if evidence.exit_code is None:
        is_same = is_refused(other) and other.waiting is not None and other.waiting[0] == evidence.reason
    elif evidence.report.code is not None:
        is_same = other.report is not None and other.report.code == evidence.report.code
    else:
        is_same = other.state == "failed" and evidence_of(other).not_started
    return is_same and _is_elsewhere(other, evidence)


def _is_elsewhere(other: PodView, evidence: PodEvidence) -> bool:
    here = evidence.pod.node_name if evidence.pod else None
    return None not in (here, other.node_name) and other.node_name != here


def root_cause(failed: Sequence[PodView]) -> PodView:
    """Return the pod that failed first.

    A failure of a pod's own precedes one without evidence, and that precedes a lost peer, because peers fail within
    milliseconds of the root cause and ``finishedAt`` has whole seconds. A rank whose script had ended may have had
    nothing more to do, so another failure of a pod's own precedes it. A pod that failed precedes one that is only
    being deleted, and one that obeyed SIGTERM follows both: a stop reaches all ranks. A rank that torchrun saw end with
    another exit code than 1 precedes the others: a lost peer raises an exception, which ends Python with 1. Then the
    earliest end decides, then the lowest node_rank.
    """
    order = ("own", "unknown", "peer")
    return min(
        failed,
        key=lambda p: (
            order.index(whose_failure(p)),
            p.report is not None and p.report.kind == EXITED_EARLY,
            obeyed_sigterm(p),
            not p.ended,
            p.logged is None or p.logged.exit_code in (None, 1),
            p.finished_at or "~",
            p.node_rank,
        ),
    )


def needs_log(pod: PodView) -> bool:
    """Return whether the log of a failed pod may show whose failure it is, and what is known of the pod does not."""
    if pod.state != "failed" or not pod.exit_code or pod.report is not None or whose_failure(pod) != "unknown":
        return False
    return pod.logged is None or pod.logged.exception is None


def obeyed_sigterm(pod: PodView) -> bool:
    """Return whether the trainer reports that it was asked to end, and its pod does not show why.

    One pod gets SIGTERM, and the trainers of all pods stop after the same step.
    """
    is_told = pod.report is not None and pod.report.outcome == "stopped"
    return is_told and not (pod.deleted or pod.evicted)


def evidence_of(pod: PodView) -> PodEvidence:
    """Return the facts of a pod that failed, or whose container cannot start."""
    if pod.waiting and pod.state == "pending" and not pod.deleting:
        return PodEvidence(pod.node_rank, pod, reason=pod.waiting[0], message=pod.waiting_text)
    return PodEvidence(pod.node_rank, pod, pod.report or _NO_REPORT, pod.exit_code, pod.reason, pod.message)


def evidence_named_by(peer: PodView, pods: Mapping[int, PodView]) -> PodEvidence | None:
    """Return the facts that a pod which lost a peer reports about the pod that failed first; None if it names none.

    pods: those of the attempt by node_rank. What a pod that has ended shows itself is not replaced.
    """
    root = peer.report.root if peer.report else None
    if whose_failure(peer) != "peer" or root is None or root.code is None or root.node in (None, peer.node_rank):
        return None
    named = pods.get(root.node)
    if named is None or named.ended:
        return None
    return replace(evidence_of(named), report=replace(root, cause="own"), exit_code=root.code)


def evidence_of_early_end(peer: PodView, succeeded: Iterable[int], pods: Mapping[int, PodView]) -> PodEvidence | None:
    """Return the facts of the node that first ended with exit code 0, if a node lost a peer and none failed by itself.

    peer: the root cause. pods: those of the attempt by node_rank; a pod that no longer exists ended first.
    """
    if whose_failure(peer) != "peer" or not (nodes := sorted(succeeded)):
        return None
    first = min(nodes, key=lambda node: (pods[node].finished_at or "" if node in pods else "", node))
    message = f"its script ended with exit code 0, and {peer.where} then lost a peer"
    report = EndReport(cause="own", kind=EXITED_EARLY, exception=EXITED_EARLY, message=message)
    pod = pods.get(first)
    if pod is not None:  # what happened to it or its Kubernetes node later is not the cause
        pod = replace(pod, evicted=False, disruption="", unready_since=None, reason="")
    return PodEvidence(first, pod, report, exit_code=0)


def is_refused(pod: PodView) -> bool:
    """Return whether the kubelet does not start a container of the pod, for a reason that may last.

    Of the launcher's init container the administrator of the operator can make the change, so no job fails for it.
    """
    if pod.waiting is None or pod.waiting_init == LAUNCHER or pod.state != "pending" or pod.deleting:
        return False
    reason, message = pod.waiting
    return reason in REFUSALS and not message.startswith(FAILED_TO_SYNC)


def may_have_waited(evidence: PodEvidence) -> bool:
    """Return whether a failure before all pods ran may only show that the peers did not come.

    Without a report, a program that ended in the first minute probably did not get as far as its rendezvous.
    """
    if evidence.report.code == RENDEZVOUS or evidence.whose == "peer":
        return True
    pod = evidence.pod
    if evidence.whose == "own" or pod is None or not pod.started_at or not pod.finished_at:
        return False
    return seconds_between(pod.started_at, parse_time(pod.finished_at)) >= START_SECONDS


def is_on_lost_node(pod: PodView) -> bool:
    """Return whether the pod's Kubernetes node proved lost: it no longer responds, or no longer exists."""
    return pod.disruption in _LOST_NODE or pod.reason == "NodeLost" or pod.unready_since is not None


def signal_name(number: int) -> str:
    """Return for example SIGKILL."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"
