"""Finds which pod ended an attempt, and puts into words why.

Every failure restarts the group and is counted; finer rules build on ``root_cause`` and the record made here.
"""

import signal as signals
from collections.abc import Sequence

from ddpjob.api.wire import Json, clean, shorten
from ddpjob.engine.pods import PodView

_MAX_MESSAGE = 2000
_SIGNAL_BASE = 128


def failed_pods(pods: Sequence[PodView]) -> list[PodView]:
    """Pods whose trainer failed, or that are going away before it ended."""
    return [pod for pod in pods if pod.state == "failed" or (pod.deleting and pod.state != "succeeded")]


def root_cause(failed: Sequence[PodView]) -> PodView:
    """The pod to blame: a failure of its own before "my peer is gone", then the earliest, then the lowest rank.

    Peers die within milliseconds of the culprit while ``finishedAt`` has whole seconds, so the trainer's own word
    on the cause (trainer report, ``cause``: own or peer) outranks the clock. A pod that failed says more than one
    that is merely going away.
    """
    return min(failed, key=lambda pod: (_blames_peer(pod), not pod.ended, pod.finished_at or "~", pod.node_rank))


def failure_record(attempt: int, pod: PodView | None, lost_rank: int | None, *, time: str, action: str) -> Json:
    """One entry of ``status.failures``; ``pod`` is None where the pod is gone without a trace."""
    if pod is None:
        return {
            "attempt": attempt,
            "rank": lost_rank,
            "reason": "PodLost",
            "message": f"the pod of node_rank {lost_rank} vanished: it was deleted, or its node was removed",
            "action": action,
            "counted": True,
            "time": time,
        }
    reason, message = _words(pod)
    record: Json = {
        "attempt": attempt,
        "rank": pod.node_rank,
        "pod": pod.name,
        "nodeName": pod.node_name,
        "exitCode": pod.exit_code,
        "signal": _signal(pod),
        "reason": reason,
        "message": shorten(message, _MAX_MESSAGE),
        "action": action,
        "counted": True,
        "time": time,
    }
    return {key: value for key, value in record.items() if value is not None}


def _words(pod: PodView) -> tuple[str, str]:
    where = f"node_rank {pod.node_rank} ({pod.name})"
    report = pod.report or {}
    if not pod.ended:
        return "PodDeleted", f"{where} was deleted or drained while it trained"
    if said := report.get("message"):
        exception = clean(report.get("exception") or "Error")
        places = {key: clean(report[key]) for key in ("rank", "step", "where") if report.get(key) is not None}
        place = "".join(f", {key} {value}" for key, value in places.items())
        return _camel(exception), f"{where}{place}: {exception}: {clean(said)}"
    if (number := _signal(pod)) is not None:
        why = f" ({pod.reason})" if pod.reason not in ("", "Error") else ""
        reason = pod.reason if pod.reason not in ("", "Error") else _signal_name(number)
        return _camel(reason), f"{where} was ended by {_signal_name(number)}{why}{_tail(pod)}"
    if pod.exit_code is None:
        return _camel(pod.reason or "PodFailed"), f"{where} failed{_tail(pod)}"
    return _camel(pod.reason or "Error"), f"{where} ended with exit code {pod.exit_code}{_tail(pod)}"


def _tail(pod: PodView) -> str:
    return f": {pod.message.strip()}" if pod.message.strip() else ""


def _blames_peer(pod: PodView) -> bool:
    return (pod.report or {}).get("cause") == "peer"


def _signal(pod: PodView) -> int | None:
    """The signal that ended the trainer: the report's, the container's, or 128+n as a shell reports it."""
    reported = (pod.report or {}).get("signal")
    if type(reported) is int and 0 < reported < signals.NSIG:  # a bool is an int too
        return reported
    if pod.signal:
        return pod.signal
    if pod.exit_code is not None and _SIGNAL_BASE < pod.exit_code < _SIGNAL_BASE + signals.NSIG:
        return pod.exit_code - _SIGNAL_BASE
    return None


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _camel(reason: str) -> str:
    """A reason in the one word that API conventions ask for."""
    word = "".join(part[:1].upper() + part[1:] for part in "".join(c if c.isalnum() else " " for c in reason).split())
    return word[:128] or "Error"
