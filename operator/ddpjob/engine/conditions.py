"""The conditions of a status. All are set from the first reconcile on, each with a reason and a message."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from ddpjob.api.limits import MAX_MESSAGE
from ddpjob.api.status import CONDITIONS, RUNNING, Condition, Failure, Furthest, Nodes
from ddpjob.api.text import clean, shorten
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import REFUSALS_TO_SHOW, Problem
from ddpjob.engine.attempt import EVICTED, SUSPENDED
from ddpjob.engine.decision import RESTART_REQUESTED, Decision
from ddpjob.engine.judgement import failure_text
from ddpjob.engine.obstacles import (
    admission_obstacle,
    diverged,
    earlier_pods,
    fruitless,
    loss_not_finite,
    obstacles,
    scheduling_obstacle,
    shared_volume,
    silence,
    slow,
    stall,
    unresponsive,
)
from ddpjob.engine.scheduling import elastic, guard, kueue
from ddpjob.engine.state import JobState

Aspect = tuple[bool, str, str]
"""Whether the condition is true, its reason and its message."""


def conditions(
    s: JobState, decision: Decision, nodes: Nodes, failures: Sequence[Failure], reached: Furthest | None = None
) -> list[Condition]:
    """Return all conditions after ``decision``; a transition time changes only with its condition's status.

    failures, reached: ``status.failures`` and ``status.furthest`` after the decision.
    """
    match decision.kind:
        case "succeed" | "fail":
            failed = decision.kind == "fail"  # kstatus reads Stalled as Failed
            holds = {"Finished": True, "Failed": failed, "Succeeded": not failed, "Stalled": failed}
            aspects = without_pods(decision.reason, decision.message, **holds)
        case "suspend":
            aspects = without_pods(*s.suspension, Suspended=True)
        case "continue" if s.suspended and s.job.spec.suspend:
            reason, text = s.suspension
            aspects = without_pods(reason, "; ".join(filter(None, (text, kueue.kept_quota(s)))), Suspended=True)
        case "hold" if s.suspended:
            aspects = without_pods(SUSPENDED, "suspended; it cannot be resumed yet", Suspended=True)
            aspects["Stalled"] = (True, decision.reason, decision.message)
        case _:
            aspects = _active(s, decision, nodes, failures[-1] if failures else None, reached)
    return build(s.before.conditions or (), aspects, s.now)


def build(before: Sequence[Condition], aspects: Mapping[str, Aspect], now: datetime) -> list[Condition]:
    """Return the conditions in their fixed order; one that ``aspects`` does not have is False."""
    old, time = {condition.type: condition for condition in before}, timestamp(now)
    return [_condition(name, old.get(name), aspects.get(name, (False, f"Not{name}", "")), time) for name in CONDITIONS]


def _condition(name: str, old: Condition | None, aspect: Aspect, time: str) -> Condition:
    holds, reason, text = aspect
    status = "True" if holds else "False"
    if old is not None and (old.status, old.reason, old.message) == (status, reason, text):
        return old  # as nearly always, and what is recorded is clean
    message = shorten(clean(text), MAX_MESSAGE)
    if old is None or old.status != status:
        return Condition(type=name, status=status, reason=reason, message=message, last_transition_time=time)
    return old.changed(reason=reason, message=message)


def finished(before: Sequence[Condition], problems: Sequence[Problem], now: datetime) -> list[Condition]:
    """Return the conditions of a finished job. Stalled shows that a pod cannot be ended, which still uses resources."""
    known = {condition.type: condition for condition in before}
    if not known.keys() >= {"Finished", "Failed", "Stalled"}:
        return list(before)
    refused = next((problem for problem in problems if problem.reason in REFUSALS_TO_SHOW), None)
    end = known["Finished"]
    aspect: Aspect = (known["Failed"].status == "True", end.reason, end.message)
    if refused is not None:
        aspect = (True, refused.reason, refused.message)
    stalled = _condition("Stalled", known["Stalled"], aspect, timestamp(now))
    return [stalled if condition.type == "Stalled" else condition for condition in before]


def without_pods(reason: str, message: str, **holds: bool) -> dict[str, Aspect]:
    """Return the conditions of a job without pods; ``holds``: those that have another value than False."""
    return {kind: (value, reason, message) for kind, value in (holds | {"Running": False, "Scheduled": False}).items()}


def all_run(nodes: Nodes) -> bool:
    """Return whether every node runs or has succeeded, and at least one runs."""
    return nodes.running > 0 and nodes.running + nodes.succeeded == nodes.desired


def _active(
    s: JobState, decision: Decision, nodes: Nodes, failure: Failure | None, reached: Furthest | None
) -> dict[str, Aspect]:
    ready = f"{nodes.running + nodes.succeeded} of {nodes.desired} nodes run"
    runs = all_run(nodes)
    if runs and s.attempt.is_creating and decision.kind != "created":
        # The loss of a pod would still abandon the attempt, without a failure in the status.
        runs, ready = False, f"{ready}, but the Service {s.job.service} is not created yet"
    reason, message = _why_not_running(s, decision, ready)
    aspects: dict[str, Aspect] = {
        "Running": _running(s, ready, reached) if runs else (False, reason, message),
        "Scheduled": _scheduled(s, decision),
        "Reconciling": (True, reason, message) if not runs else (False, "AllNodesRunning", ready),
    }
    if failure and not runs and (decision.failure or _recovers_from(s, decision, failure)):
        text = decision.message if decision.failure else failure_text(failure)
        aspects["Restarting"] = (True, failure.reason, text)
    elif RESTART_REQUESTED in (s.attempt.verdict, decision.reason) and not runs:
        aspects["Restarting"] = (True, RESTART_REQUESTED, decision.message or s.attempt.message)
    if decision.kind == "hold":
        aspects["Stalled"] = (True, decision.reason, decision.message)
    shown = REFUSALS_TO_SHOW | {"NameConflict"} | ({"CreateRefused"} if s.attempt.phase == RUNNING else set())
    if problem := next((p for p in s.observed.problems if p.reason in shown), None):
        aspects["Stalled"] = (True, problem.reason, problem.message)
    elif s.attempt.verdict == "NameConflict" and decision.kind == "continue":
        aspects["Stalled"] = (True, "NameConflict", s.attempt.message)
    return aspects


def _running(s: JobState, ready: str, reached: Furthest | None) -> Aspect:
    found = (
        unresponsive(s),
        silence(s),
        stall(s),
        kueue.without_quota(s),
        fruitless(reached, s.logs_command()),
        diverged(s),
        loss_not_finite(s),
        shared_volume(s),
        slow(s),
        elastic.obstacle(s),
    )
    problems = [problem for problem in found if problem is not None]
    if not problems:
        return True, "AllNodesRunning", ready
    return True, problems[0][0], f"{ready}, but {'; '.join(text for _, text in problems)}"


def _why_not_running(s: JobState, decision: Decision, ready: str) -> tuple[str, str]:
    if decision.kind not in ("continue", "created"):
        return decision.reason, decision.message
    if s.attempt.is_settling and decision.kind == "continue":
        return "Failing", s.attempt.message
    if (wait := earlier_pods(s) or admission_obstacle(s)) is not None:
        return wait
    if s.attempt.verdict is not None:
        return s.attempt.verdict, s.attempt.message
    return next(obstacles(s), ("Starting", ready))


def _recovers_from(s: JobState, decision: Decision, failure: Failure) -> bool:
    """Whether the last failure is why the current attempt does not run yet, perhaps after abandoned attempts."""
    attempt, refusals = s.attempt, s.attempt.refusals or 0
    if attempt.is_closed and not decision.begins_attempt:
        is_queued = EVICTED in (attempt.verdict, decision.reason)
        return not (s.suspended or is_queued) and failure.attempt >= attempt.number - refusals
    if attempt.all_running_time is not None and not decision.begins_attempt:
        return False
    refusals = decision.refusals if decision.kind in ("start", "close") else refusals
    number = attempt.number + (decision.kind == "start")
    return not s.suspended and failure.attempt >= number - 1 - refusals


def _scheduled(s: JobState, decision: Decision) -> Aspect:
    if decision.begins_attempt:
        return False, "PodsNotCreated", "the pods of the new attempt are being created"
    if (wait := admission_obstacle(s)) is not None:
        return False, *wait
    if decision.gives_back:
        return False, decision.reason, decision.message
    if s.attempt.verdict in guard.VERDICTS:
        return False, s.attempt.verdict or "", s.attempt.message
    if decision.kind == "close" or s.attempt.is_closed:
        return False, "PodsNotCreated", "the next attempt has not started yet"
    if (obstacle := scheduling_obstacle(s)) is not None:
        return False, *obstacle
    return True, "AllNodesScheduled", "every pod has a Kubernetes node"
