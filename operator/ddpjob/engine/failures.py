"""Find the pod that made an attempt fail and describe the failure for ``status.failures``."""

import signal as signals
from collections.abc import Mapping, Sequence
from typing import Any

from ddpjob.api.exit_codes import SIGNAL_BASE
from ddpjob.api.status import MAX_ADVICE, MAX_REASON
from ddpjob.api.wire import Json, clean, shorten
from ddpjob.engine.pods import PodView

_MAX_MESSAGE = 2000


def failed_pods(pods: Sequence[PodView]) -> list[PodView]:
    """Return the pods whose trainer failed, or that are being deleted before it ended."""
    return [pod for pod in pods if pod.state == "failed" or (pod.deleting and pod.state != "succeeded")]


def root_cause(failed: Sequence[PodView]) -> PodView:
    """Return the pod that failed first.

    A pod whose trainer failed by itself precedes one that reports a lost peer (``cause`` of its report), because peers
    fail within milliseconds of the root cause and ``finishedAt`` has whole seconds. A pod that failed precedes one
    that is only being deleted. Then the earliest end decides, then the lowest node_rank.
    """
    return min(failed, key=lambda pod: (_lost_a_peer(pod), not pod.ended, pod.finished_at or "~", pod.node_rank))


def failure_record(attempt: int, pod: PodView | None, lost_node_rank: int | None, *, time: str, action: str) -> Json:
    """Return one entry of ``status.failures``; ``pod`` is None if the pod of ``lost_node_rank`` no longer exists."""
    if pod is None:
        message = f"the pod of node_rank {lost_node_rank} is gone: it was deleted, or its node was removed"
        cause: Json = {"rank": lost_node_rank, "reason": "PodLost", "message": message}
    else:
        cause = {key: value for key, value in _cause(pod).items() if value is not None}
    return {"attempt": attempt, **cause, "action": action, "counted": True, "time": time}


def _cause(pod: PodView) -> Json:
    reason, message = _reason_and_message(pod)
    report = pod.report if pod.ended and pod.report else {}
    return {
        "rank": pod.node_rank,
        "pod": pod.name,
        "nodeName": pod.node_name,
        "exitCode": pod.exit_code,
        "signal": _signal(pod),
        "reason": reason,
        "message": shorten(message, _MAX_MESSAGE),
        "hint": _advice(report, "hint"),
        "next": _advice(report, "next"),
    }


def failure_text(record: Mapping[str, Any]) -> str:
    """Return the message of an entry of ``status.failures`` followed by what to do next."""
    message = str(record["message"])
    return f"{message}; next: {record['next']}" if "next" in record else message


def _reason_and_message(pod: PodView) -> tuple[str, str]:
    report = pod.report or {}
    if not pod.ended:
        return "PodDeleted", f"{pod.where} was deleted or drained while it trained"
    if text := report.get("message"):
        kind = _text(report, "kind")  # absent in schema 1
        exception = clean(report.get("exception") or kind or "Error")
        details = {key: clean(report[key]) for key in ("rank", "step", "where") if report.get(key) is not None}
        place = "".join(f", {key} {value}" for key, value in details.items())
        return _camel_case(kind or exception), f"{pod.where}{place}: {exception}: {clean(text)}"
    if (number := _signal(pod)) is not None:
        why = f" ({pod.reason})" if pod.reason not in ("", "Error") else ""
        reason = pod.reason if pod.reason not in ("", "Error") else _signal_name(number)
        return _camel_case(reason), f"{pod.where} was ended by {_signal_name(number)}{why}{_log_tail(pod)}"
    if pod.exit_code is None:
        return _camel_case(pod.reason or "PodFailed"), f"{pod.where} failed{_log_tail(pod)}"
    return _camel_case(pod.reason or "Error"), f"{pod.where} ended with exit code {pod.exit_code}{_log_tail(pod)}"


def _log_tail(pod: PodView) -> str:
    return f": {pod.message.strip()}" if pod.message.strip() else ""


def _lost_a_peer(pod: PodView) -> bool:
    return (pod.report or {}).get("cause") == "peer"


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
