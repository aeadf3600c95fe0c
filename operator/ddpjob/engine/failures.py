"""Find the pod that made an attempt fail and describe the failure for ``status.failures``."""

import signal as signals
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ddpjob.api import names
from ddpjob.api.exit_codes import SIGNAL_BASE
from ddpjob.api.status import MAX_ADVICE, MAX_REASON
from ddpjob.api.wire import Json, clean, shorten
from ddpjob.engine.pods import PodView

_MAX_MESSAGE = 2000
OOM_KILLED = "OOMKilled"
"""Reason that the kubelet gives for a container that exceeded its memory limit."""

Evidence = Literal["own", "unknown", "peer"]
"""Whose failure a pod shows: its own, perhaps its own, or that of a peer which it lost."""

_START_FAILURES = frozenset({126, 127, 128})
# Aborted (NCCL's watchdog aborts the ranks that wait for a failed one) or ended by an ordinary error.
_MAY_FOLLOW_A_PEER = frozenset({signals.SIGABRT})


def failed_pods(pods: Iterable[PodView]) -> list[PodView]:
    """Return the pods whose trainer failed, or that are being deleted before it ended."""
    return [pod for pod in pods if pod.state == "failed" or (pod.deleting and pod.state != "succeeded")]


def evidence(pod: PodView) -> Evidence:
    """Return whose failure a failed pod shows.

    Only the trainer's report can name a peer. Without a report, an ordinary exit code says nothing: torchrun ends with
    1 for a failed rank and for one that lost its peers. A kill, a refusal to start, an eviction and a deletion come
    from outside the training, so they are the pod's own.
    """
    cause = (pod.report or {}).get("cause")
    if pod.deleted or pod.evicted or pod.reason == OOM_KILLED:
        return "own"
    if cause in ("own", "peer"):
        return "own" if cause == "own" else "peer"
    number = _signal(pod)
    if number is not None:
        return "unknown" if number in _MAY_FOLLOW_A_PEER else "own"
    return "own" if pod.exit_code is None or pod.exit_code in _START_FAILURES else "unknown"


def root_cause(failed: Sequence[PodView]) -> PodView:
    """Return the pod that failed first.

    A failure of a pod's own precedes one without evidence, and that precedes a lost peer, because peers fail within
    milliseconds of the root cause and ``finishedAt`` has whole seconds. A pod that failed precedes one that is only
    being deleted. Then the earliest end decides, then the lowest node_rank.
    """
    order = ("own", "unknown", "peer")
    return min(failed, key=lambda p: (order.index(evidence(p)), not p.ended, p.finished_at or "~", p.node_rank))


def failure_record(attempt: int, pod: PodView | None, lost_node: int | None, *, time: str, action: str) -> Json:
    """Return one entry of ``status.failures``; ``pod`` is None if the pod of ``lost_node`` no longer exists."""
    if pod is None:
        message = f"the pod of node_rank {lost_node} is gone: it was deleted, or its node was removed"
        cause: Json = {"nodeRank": lost_node, "reason": "PodLost", "message": message}
    else:
        cause = {key: value for key, value in _cause(pod).items() if value is not None}
    return {"attempt": attempt, **cause, "action": action, "counted": True, "time": time}


def _cause(pod: PodView) -> Json:
    reason, message = _reason_and_message(pod)
    report = pod.report if pod.ended and pod.report else {}
    return {
        "nodeRank": pod.node_rank,
        "rank": _rank(report),
        "pod": pod.name,
        "nodeName": pod.node_name,
        "exitCode": pod.exit_code,
        "signal": _signal(pod),
        "reason": reason,
        "message": shorten(message, _MAX_MESSAGE),
        "hint": _advice(report, "hint") or _HINTS.get(reason),
        "next": _advice(report, "next"),
    }


_HINTS = {
    OOM_KILLED: "increase resources.limits.memory, or use less memory: a smaller batch, fewer data loader workers",
}


def failure_text(record: Mapping[str, Any]) -> str:
    """Return the message of an entry of ``status.failures`` followed by what to do next."""
    message = str(record["message"])
    return f"{message}; next: {record['next']}" if "next" in record else message


def _reason_and_message(pod: PodView) -> tuple[str, str]:
    report = pod.report or {}
    if pod.deleted:
        return "PodDeleted", f"{pod.where} was deleted or drained while it trained"
    if text := report.get("message"):
        kind = _text(report, "kind")  # absent in schema 1
        exception = clean(report.get("exception") or kind or "Error")
        details = {key: clean(report[key]) for key in ("rank", "step", "where") if report.get(key) is not None}
        place = "".join(f", {key} {value}" for key, value in details.items())
        reason = pod.reason if pod.reason == OOM_KILLED else kind or exception
        return _camel_case(reason), f"{pod.where}{place}: {exception}: {clean(text)}"
    if pod.reason == OOM_KILLED:
        return OOM_KILLED, f"{pod.where} was killed because it exceeded its memory limit{_log_tail(pod)}"
    if (number := _signal(pod)) is not None:
        why = f" ({pod.reason})" if pod.reason not in ("", "Error") else ""
        reason = pod.reason if pod.reason not in ("", "Error") else _signal_name(number)
        return _camel_case(reason), f"{pod.where} was ended by {_signal_name(number)}{why}{_log_tail(pod)}"
    if pod.exit_code is None:
        return _camel_case(pod.reason or "PodFailed"), f"{pod.where} failed{_log_tail(pod)}"
    return _camel_case(pod.reason or "Error"), f"{pod.where} ended with exit code {pod.exit_code}{_log_tail(pod)}"


def _log_tail(pod: PodView) -> str:
    return f": {pod.message.strip()}" if pod.message.strip() else ""


def _rank(report: Mapping[str, Any]) -> int | None:
    """Return the global rank in a report, if it is one."""
    rank = report.get("rank")
    return rank if type(rank) is int and 0 <= rank < names.MAX_NODES * names.MAX_NPROC_PER_NODE else None


def _text(report: Mapping[str, Any], key: str) -> str | None:
    """Return a field of a report if it is text with more than blanks in it."""
    value = report.get(key)
    return clean(value).strip() or None if isinstance(value, str) else None


def _advice(report: Mapping[str, Any], key: str) -> str | None:
    text = _text(report, key)
    return shorten(text, MAX_ADVICE) if text else None


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


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _camel_case(reason: str) -> str:
    """Return ``reason`` as one CamelCase word, the format that the Kubernetes API conventions require."""
    parts = "".join(c if c.isalnum() else " " for c in reason).split()
    return "".join(part[:1].upper() + part[1:] for part in parts)[:MAX_REASON] or "Error"
