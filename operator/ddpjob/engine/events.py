"""Events about the transitions of a job, for ``kubectl describe``."""

from collections.abc import Iterator, Mapping
from typing import Any

from ddpjob.api.text import shorten
from ddpjob.engine.actions import Note
from ddpjob.engine.conditions import PROGRESS_UNKNOWN
from ddpjob.engine.decision import Decision
from ddpjob.engine.launcher import launch_warning
from ddpjob.engine.state import CONTAINER_CREATING, JobState

_MAX_NOTE = 1000
# A name conflict has the condition Stalled, and a large image takes minutes to pull.
_NO_NOTE = frozenset({"NameConflict", CONTAINER_CREATING})


def notes(s: JobState, decision: Decision, status: Mapping[str, Any]) -> Iterator[Note]:
    """Yield one note for each transition from the recorded status to ``status``."""
    match decision.kind:
        case "start" if decision.refusals == 0:
            yield Note("Normal", decision.reason, decision.message)
            if warning := launch_warning(s.job):
                yield Note("Warning", "NoLauncher", warning)
        case "restart" | "close" if decision.failure is not None:
            yield Note("Warning", "Restarting", shorten(decision.message, _MAX_NOTE))
        case "fail":
            yield Note("Warning", "Failed", shorten(f"{decision.reason}: {decision.message}", _MAX_NOTE))
        case "succeed":
            yield Note("Normal", "Succeeded", decision.message)
        case "close" if decision.restarted_at is not None:
            yield Note("Normal", decision.reason, decision.message)
        case "close" if s.attempt.refusals == 0 and decision.reason != "NameConflict":
            yield Note("Warning", decision.reason, shorten(decision.message, _MAX_NOTE))
    yield from _observations(s, decision, status)


def _observations(s: JobState, decision: Decision, status: Mapping[str, Any]) -> Iterator[Note]:
    before = {condition["type"]: condition for condition in s.before.get("conditions") or ()}
    for condition in status["conditions"]:
        old = before.get(condition["type"], {})
        turned_true = condition["status"] == "True" and old.get("status") != "True"
        if condition["type"] == "Running" and turned_true:
            yield Note("Normal", "Running", f"attempt {status['attempt']}: {condition['message']}")
        elif condition["reason"] == PROGRESS_UNKNOWN != old.get("reason"):
            yield Note("Warning", PROGRESS_UNKNOWN, shorten(condition["message"], _MAX_NOTE))
        if condition["type"] == "Running" and condition["status"] == "False":
            # One note for each new obstacle, for example an image that cannot be pulled or a pod that no node fits.
            is_new = condition["reason"] != old.get("reason") and decision.kind != "close"
            if is_new and condition["reason"] in {reason for reason, _ in s.obstacles()} - _NO_NOTE:
                yield Note("Warning", condition["reason"], shorten(condition["message"], _MAX_NOTE))
        if condition["type"] == "Suspended" and turned_true:
            running = any(pod.holds_resources for pod in s.pods)
            message = "the pods are being deleted; the checkpoints are kept" if running else "no pod runs until resume"
            yield Note("Normal", "Suspended", message)
        if condition["type"] == "Stalled" and turned_true and status["state"] != "Failed":
            yield Note("Warning", condition["reason"], shorten(condition["message"], _MAX_NOTE))
    yield from _changes(s, status)
    step = (status.get("checkpoint") or {}).get("resumedFromStep")
    if step is not None and step != (s.before.get("checkpoint") or {}).get("resumedFromStep"):
        yield Note("Normal", "ResumedFromCheckpoint", f"attempt {status['attempt']} continues after step {step}")


def _changes(s: JobState, status: Mapping[str, Any]) -> Iterator[Note]:
    """Yield notes about the budget and the avoided nodes."""
    provisional = {f["attempt"] for f in s.before.get("failures") or () if f.get("provisional")}
    for failure in status.get("failures") or ():
        if failure["attempt"] in provisional and not failure.get("provisional"):
            yield Note("Normal", "RestartRefunded", shorten(failure["message"], _MAX_NOTE))
    known = {entry["nodeName"] for entry in s.before.get("avoidNodes") or ()}
    for entry in status.get("avoidNodes") or ():
        if entry["nodeName"] not in known:
            name, until = entry["nodeName"], entry["until"]
            text = (
                f"new attempts avoid Kubernetes node {name} until {until}: two failures ({entry['reason']}) point to it"
            )
            yield Note("Warning", "NodeAvoided", text)
