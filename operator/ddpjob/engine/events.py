"""Events about the transitions of a job, for ``kubectl describe``."""

from collections.abc import Iterator
from typing import Literal

from ddpjob.api.status import DDPJobStatus
from ddpjob.api.text import shorten
from ddpjob.engine import failures, obstacles
from ddpjob.engine.actions import Note
from ddpjob.engine.decision import RESIZED, RESTART_REQUESTED, Decision
from ddpjob.engine.mistakes import mistakes
from ddpjob.engine.scheduling.elastic import NODES_AVAILABLE, NODES_UNAVAILABLE
from ddpjob.engine.scheduling.kueue import QUEUE_UNAVAILABLE, WAITING
from ddpjob.engine.state import JobState

MAX_NOTE = 1000
RESTARTED_IN_PLACE = "RestartedInPlace"
_AS_ASKED = frozenset({RESIZED, RESTART_REQUESTED, NODES_AVAILABLE, NODES_UNAVAILABLE})
# Of a job all of whose nodes run.
_PROBLEMS = frozenset(
    {
        *(obstacles.NODE_NOT_RESPONDING, obstacles.PROGRESS_UNKNOWN, obstacles.TRAINING_STALLED, obstacles.SHARED),
        *(obstacles.TRAINING_SLOW, failures.REPLICAS_DIVERGED, obstacles.LOSS_NOT_FINITE),
        QUEUE_UNAVAILABLE,
    }
)
# A name conflict has the condition Stalled, and a large image takes minutes to pull.
_NO_NOTE = frozenset({"NameConflict", obstacles.CONTAINER_CREATING})


def notes(s: JobState, decision: Decision, status: DDPJobStatus) -> Iterator[Note]:
    """Yield one note for each transition from the recorded status to ``status``."""
    match decision.kind:
        case "start" if decision.refusals == 0:
            yield Note("Normal", decision.reason, decision.message)
            for mistake in mistakes(s.job):
                yield Note("Warning", mistake.reason, shorten(mistake.message, MAX_NOTE))
        case "restart" | "close" if decision.failure is not None:
            yield Note("Warning", "Restarting", shorten(decision.message, MAX_NOTE))
        case "fail":
            yield Note("Warning", "Failed", shorten(f"{decision.reason}: {decision.message}", MAX_NOTE))
        case "succeed":
            yield Note("Normal", "Succeeded", decision.message)
        case "close" if decision.reason in _AS_ASKED:
            yield Note("Normal", decision.reason, decision.message)
        case "close" if not s.attempt.refusals and decision.reason != "NameConflict":
            yield Note("Warning", decision.reason, shorten(decision.message, MAX_NOTE))
    yield from _observations(s, decision, status)


def _observations(s: JobState, decision: Decision, status: DDPJobStatus) -> Iterator[Note]:
    before = {condition.type: condition for condition in s.before.conditions or ()}
    for condition in status.conditions or ():
        old = before.get(condition.type)
        old_reason = old.reason if old else None
        turned_true = condition.status == "True" and (old is None or old.status != "True")
        if condition.type == "Running" and turned_true:
            yield Note("Normal", "Running", f"attempt {status.attempt}: {condition.message}")
        elif condition.type == "Running" and condition.status == "True":
            if condition.reason in _PROBLEMS - {old_reason}:
                yield Note("Warning", condition.reason, shorten(condition.message, MAX_NOTE))
        elif condition.type == "Running":
            # One note for each new obstacle, for example an image that cannot be pulled or a pod that no node fits.
            is_new = condition.reason != old_reason and decision.kind != "close"
            if is_new and condition.reason in {reason for reason, _ in obstacles.obstacles(s)} - _NO_NOTE:
                kind: Literal["Normal", "Warning"] = "Normal" if condition.reason == WAITING else "Warning"
                yield Note(kind, condition.reason, shorten(condition.message, MAX_NOTE))
        if condition.type == "Suspended" and turned_true:
            running = any(pod.holds_resources for pod in s.pods)
            message = "the pods are being deleted; the checkpoints are kept" if running else "no pod runs until resume"
            yield Note("Normal", "Suspended", message)
        if condition.type == "Stalled" and turned_true and status.state != "Failed":
            yield Note("Warning", condition.reason, shorten(condition.message, MAX_NOTE))
    yield from _lives(s, status)
    problem = obstacles.fruitless(status.furthest, s.logs_command())
    if problem and not obstacles.fruitless(s.before.furthest, ""):
        yield Note("Warning", problem[0], shorten(problem[1], MAX_NOTE))
    yield from _changes(s, status)
    step = status.checkpoint.resumed_from_step if status.checkpoint else None
    if step is not None and step != (s.before.checkpoint.resumed_from_step if s.before.checkpoint else None):
        yield Note("Normal", "ResumedFromCheckpoint", f"attempt {status.attempt} continues after step {step}")


def _lives(s: JobState, status: DDPJobStatus) -> Iterator[Note]:
    attempt = status.current_attempt
    if attempt is None or attempt.in_place is None or attempt.number != s.attempt.number:
        return
    before = (s.attempt.in_place.life if s.attempt.in_place else None) or 1
    for failure in attempt.in_place.failures or ():
        if before <= failure.life < (attempt.in_place.life or 1):
            text = f"attempt {attempt.number} restarted in place (life {failure.life + 1}): {failure.message}"
            yield Note("Warning", RESTARTED_IN_PLACE, shorten(text, MAX_NOTE))


def _changes(s: JobState, status: DDPJobStatus) -> Iterator[Note]:
    provisional = {failure.attempt for failure in s.earlier_failures if failure.provisional}
    for failure in status.failures or ():
        if failure.attempt in provisional and not failure.provisional:
            yield Note("Normal", "RestartRefunded", shorten(failure.message, MAX_NOTE))
    known = {node.node_name for node in s.before.avoid_nodes or ()}
    for node in status.avoid_nodes or ():
        if node.node_name not in known:
            name, until = node.node_name, node.until
            text = f"new attempts avoid Kubernetes node {name} until {until}: two failures ({node.reason}) point to it"
            if node.is_slow:
                text = f"new attempts prefer other Kubernetes nodes than {name} until {until}: it was {node.why}"
            yield Note("Warning", "NodeAvoided", text)
