"""The facts of how a node of an attempt failed, and which of several failed nodes failed first.

``failures`` matches its table on these facts.
"""

import signal as signals
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ddpjob.api import limits
from ddpjob.api.exit_codes import SIGNAL_BASE
from ddpjob.api.limits import MAX_REASON
from ddpjob.api.objects import Json
from ddpjob.api.text import clean
from ddpjob.api.times import parse_time, seconds_between
from ddpjob.engine.pod_view import PodView

OOM_KILLED = "OOMKilled"
"""Reason that the kubelet gives for a container that exceeded its memory limit."""
NOT_EXECUTABLE = frozenset({126, 127})
"""Exit codes of a shell for a command that cannot be executed or does not exist."""
START_SECONDS = 60
"""A container that ran for longer did start: 126 or 127 is then the exit code of a later command in a script."""
START_ERRORS = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of the kubelet for a container that the runtime could not start; its exit code is 128."""

SUPERSEDED = 80
"""Exit code of a trainer that saw a newer run in its checkpoint directory (docs/trainer.md)."""

Whose = Literal["own", "unknown", "peer"]
"""Whose failure a pod shows: its own, perhaps its own, or that of a peer which it lost."""

# NCCL's watchdog aborts the ranks that wait for a failed one.
_MAY_FOLLOW_A_PEER = frozenset({signals.SIGABRT})
_LOST_NODE = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})
# Reasons of a pod that the kubelet ended at the shutdown of its node.
_SHUTDOWN = frozenset({"Terminated", "NodeShutdown", "Shutdown"})


@dataclass(frozen=True)
class Evidence:
    """What is known about the failure of one node.

    pod: None if it no longer exists.
    oom, evicted, deleted, gone: what ended the pod from outside the trainer; ``disruption``: see ``PodView``.
    node_lost, node_shutdown: what happened to its Kubernetes node.
    exit_code, signal: of the trainer, from its report or else from its container.
    not_started: the command could not be started (``_could_not_start``).
    code, kind, exception, step, rank: of the trainer's report; None without one.
    reason: of the container or pod, as the kubelet gives it.
    """

    node_rank: int
    whose: Whose
    pod: PodView | None = None
    oom: bool = False
    evicted: bool = False
    deleted: bool = False
    gone: bool = False
    disruption: str = ""
    node_lost: bool = False
    node_shutdown: bool = False
    exit_code: int | None = None
    signal: int | None = None
    not_started: bool = False
    code: int | None = None
    kind: str | None = None
    exception: str | None = None
    step: int | None = None
    rank: int | None = None
    reason: str = ""

    @property
    def from_outside(self) -> bool:
        """Whether the pod was taken away, whatever its trainer did."""
        return self.deleted or self.gone or self.evicted

    @property
    def where(self) -> str:
        return self.pod.where if self.pod else f"node_rank {self.node_rank}"


def failed_pods(pods: Iterable[PodView]) -> list[PodView]:
    """Return the pods whose trainer failed, or that are being deleted before it ended."""
    return [pod for pod in pods if pod.state == "failed" or (pod.deleting and pod.state != "succeeded")]


def whose_failure(pod: PodView) -> Whose:
    """Return whose failure a failed pod shows.

    Only the trainer's report can name a peer. Without a report, an ordinary exit code says nothing: torchrun ends with
    1 for a failed rank and for one that lost its peers. A kill, a refusal to start, an eviction and a deletion come
    from outside the training, so they are the pod's own.
    """
    cause = (pod.report or {}).get("cause")
    if pod.deleted or pod.evicted or pod.reason == OOM_KILLED:
        return "own"
    if (pod.report or {}).get("code") == SUPERSEDED:
        return "peer"
    if cause in ("own", "peer"):
        return "own" if cause == "own" else "peer"
    number = _signal(pod)
    if number is not None:
        return "unknown" if number in _MAY_FOLLOW_A_PEER else "own"
    return "own" if pod.exit_code is None or _could_not_start(pod) else "unknown"


def _could_not_start(pod: PodView) -> bool:
    """Return whether the runtime or a shell could not start the command.

    The runtime gives a reason. A shell ends with 126 or 127, but so does a script that trained for an hour and whose
    last command does not exist: these codes count only in the first minute, or if the times are not known.
    """
    if pod.reason in START_ERRORS:
        return True
    if pod.exit_code not in NOT_EXECUTABLE:
        return False
    if not pod.started_at or not pod.finished_at:
        return True
    return seconds_between(pod.started_at, parse_time(pod.finished_at)) < START_SECONDS


def root_cause(failed: Sequence[PodView]) -> PodView:
    """Return the pod that failed first.

    A failure of a pod's own precedes one without evidence, and that precedes a lost peer, because peers fail within
    milliseconds of the root cause and ``finishedAt`` has whole seconds. A pod that failed precedes one that is only
    being deleted, and one that obeyed SIGTERM follows both: a stop reaches all ranks. Then the earliest end decides,
    then the lowest node_rank.
    """
    order = ("own", "unknown", "peer")
    return min(
        failed,
        key=lambda p: (
            order.index(whose_failure(p)),
            obeyed_sigterm(p),
            not p.ended,
            p.finished_at or "~",
            p.node_rank,
        ),
    )


def obeyed_sigterm(pod: PodView) -> bool:
    """Return whether the trainer reports that it was asked to end, and its pod does not show why.

    One pod gets SIGTERM, and the trainers of all pods stop after the same step.
    """
    return not (pod.deleted or pod.evicted) and (pod.report or {}).get("outcome") == "stopped"


def evidence_of(pod: PodView) -> Evidence:
    """Return the facts of a failed pod."""
    report = pod.report if pod.ended and pod.report else {}
    code = report.get("code")
    return Evidence(
        node_rank=pod.node_rank,
        whose=whose_failure(pod),
        pod=pod,
        oom=pod.reason == OOM_KILLED or _text(report, "kind") == OOM_KILLED,
        evicted=pod.evicted,
        deleted=pod.deleted,
        disruption=pod.disruption,
        node_lost=is_on_lost_node(pod),
        node_shutdown=pod.evicted and pod.reason in _SHUTDOWN,
        exit_code=pod.exit_code,
        signal=_signal(pod),
        not_started=_could_not_start(pod),
        code=code if type(code) is int else None,
        kind=_name(report, "kind"),
        exception=_name(report, "exception"),
        step=_step(report),
        rank=_rank(report),
        reason=pod.reason,
    )


def evidence_named_by(peer: PodView, pods: Mapping[int, PodView]) -> Evidence | None:
    """Return the facts that a pod which lost a peer reports about the pod that failed first; None if it names none.

    pods: those of the attempt by node_rank. What a pod that has ended shows itself is not replaced.
    """
    root = (peer.report or {}).get("root")
    if whose_failure(peer) != "peer" or not isinstance(root, dict):
        return None
    node, code = root.get("node"), root.get("code")
    if type(node) is not int or type(code) is not int or node == peer.node_rank:  # a bool is an int too
        return None
    named = pods.get(node)
    if named is None or named.ended:
        return None
    return evidence_of(replace(named, state="failed", exit_code=code, report={**root, "cause": "own"}))


def evidence_of_waiting(pod: PodView) -> Evidence:
    """Return the facts of a pod whose container cannot start."""
    reason, message = pod.waiting or ("", "")
    return Evidence(pod.node_rank, "own", pod=replace(pod, message=message), reason=reason)


def evidence_of_missing(node_rank: int) -> Evidence:
    """Return the facts of a node whose pod no longer exists."""
    return Evidence(node_rank, "own", gone=True)


def is_on_lost_node(pod: PodView) -> bool:
    """Return whether the pod's Kubernetes node proved lost: it no longer responds, or no longer exists."""
    return pod.disruption in _LOST_NODE or pod.reason == "NodeLost" or pod.node_unready


def signal_name(number: int) -> str:
    """Return for example SIGKILL."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _signal(pod: PodView) -> int | None:
    """Return the signal that ended the trainer: the report's, the container's, or n of exit code 128 + n."""
    reported = (pod.report or {}).get("signal")
    if type(reported) is int and 0 < reported < signals.NSIG:  # a bool is an int too
        return reported
    if pod.signal:
        return pod.signal
    if pod.exit_code is not None and SIGNAL_BASE < pod.exit_code < SIGNAL_BASE + signals.NSIG:
        return pod.exit_code - SIGNAL_BASE
    return None


def _rank(report: Mapping[str, Any]) -> int | None:
    """Return the global rank in a report, if it is one."""
    rank = report.get("rank")
    return rank if type(rank) is int and 0 <= rank < limits.MAX_NODES * limits.MAX_NPROC_PER_NODE else None


def _step(report: Mapping[str, Any]) -> int | None:
    step = report.get("step")
    return step if type(step) is int and 0 <= step < 2**53 else None


def text_of(report: Json, key: str) -> str | None:
    """Return a field of a report if it is text with more than blanks in it."""
    return _text(report, key)


def _text(report: Mapping[str, Any], key: str) -> str | None:
    value = report.get(key)
    return clean(value).strip() or None if isinstance(value, str) else None


def _name(report: Mapping[str, Any], key: str) -> str | None:
    text = _text(report, key)
    return text[:MAX_REASON] if text else None
