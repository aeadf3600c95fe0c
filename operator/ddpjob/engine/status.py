"""Compute the status after a decision. One patch records all of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from ddpjob.api.status import MAX_MESSAGE
from ddpjob.api.wire import Json, shorten, timestamp
from ddpjob.engine.attempt import CREATING, ENDING, RUNNING, SETTLE_SECONDS, Attempt, whole_second_after
from ddpjob.engine.conditions import all_run, build, conditions, invalid
from ddpjob.engine.decision import Decision, number_of_next
from ddpjob.engine.desired import is_comparable
from ddpjob.engine.pods import PodState
from ddpjob.engine.progress import checkpoint_status, progress_status
from ddpjob.engine.state import JobState

_KEPT_FAILURES = 5


def next_status(s: JobState, decision: Decision) -> Json:
    """Return the complete status after ``decision``; it equals the recorded one if nothing changed."""
    begins = decision.begins_attempt
    status: Json = dict(s.before)
    status["observedGeneration"] = s.job.generation
    if not is_comparable(status.get("specHash")):
        status["specHash"] = s.spec_hash
    status.setdefault("restarts", 0)
    status.setdefault("restartsCountedTowardsLimit", 0)
    status["attempt"] = next_number(s, decision)
    status["succeededNodes"] = [] if begins else sorted(s.succeeded_nodes)
    nodes = _count_nodes(s, decision)
    status["nodes"] = nodes
    status["nodesReady"] = f"{nodes['running'] + nodes['succeeded']}/{nodes['desired']}"
    if status["attempt"]:
        status["currentAttempt"] = _next_attempt(s, decision, nodes).wire()
        status["world"] = _world(s, status["attempt"])
    status |= _times(s, decision)
    status |= _failures(s, decision)
    status |= _training(s)
    if begins or decision.ends_attempt:
        status |= _without_speed(status, ended=decision.kind)
    status["conditions"] = conditions(s, decision, nodes)
    status["state"] = _state(status["conditions"], is_settling=_settles(s, decision))
    return status


def invalid_status(before: Mapping[str, Any], generation: int, lines: list[str], now: Any) -> Json:
    """Return the status of a job whose spec is invalid; ``lines`` are the errors."""
    message = "; ".join(lines) + ": fix the spec, or update the CustomResourceDefinition, which accepted it"
    status = dict(before) | {"observedGeneration": generation, "state": "Invalid"}
    status["conditions"] = build(before.get("conditions") or (), invalid(message), now)
    return status


def next_number(s: JobState, decision: Decision) -> int:
    """Return the number of the current attempt after the decision."""
    if decision.begins_attempt:
        return number_of_next(s)
    # Pods of a newer attempt than the recorded one are deleted; their names must not be used again.
    return max(s.attempt.number, s.newest_attempt) if decision.ends_attempt else s.attempt.number


def _next_attempt(s: JobState, decision: Decision, nodes: Mapping[str, int]) -> Attempt:
    """Return the attempt after the decision: the only place where its phase changes."""
    now, attempt = timestamp(s.now), s.attempt
    if decision.begins_attempt:
        return Attempt(number_of_next(s), CREATING, now, refusals=decision.refusals)
    match decision.kind:
        case "created":
            return replace(attempt, phase=RUNNING, refusals=0, message="", since="", until=None)
        case "settle":
            until = whole_second_after(s.now, SETTLE_SECONDS)
            return replace(attempt, phase=ENDING, message=decision.message, since=now, until=until)
        case "close" | "suspend" | "succeed" | "fail":
            return replace(
                attempt,
                number=next_number(s, decision),
                phase=ENDING,
                verdict=decision.reason,
                message=shorten(decision.message, MAX_MESSAGE),
                since=attempt.since or now,
                until=decision.until,
                refusals=decision.refusals,
            )
    if attempt.phase == RUNNING and attempt.all_running_time is None and all_run(nodes):
        return replace(attempt, all_running_time=now)
    return attempt


def _count_nodes(s: JobState, decision: Decision) -> dict[str, int]:
    counts: Counter[str] = Counter()
    if not decision.begins_attempt:
        counts.update(pod.state for pod in s.current.values() if pod.node_rank not in s.succeeded_nodes)
        counts["succeeded"] = len(s.succeeded_nodes)
    if decision.ends_attempt or s.attempt.is_closed:
        counts["running"] = counts["pending"] = 0  # they are deleted after this status is written
    return {"desired": len(s.job.node_ranks)} | {state: counts[state] for state in get_args(PodState)}


def _times(s: JobState, decision: Decision) -> Json:
    changes: Json = {}
    if decision.kind == "start" and "startTime" not in s.before:
        changes["startTime"] = timestamp(s.now)
    if s.attempt.number and (decision.begins_attempt or decision.kind in ("suspend", "succeed", "fail")):
        changes["activeSeconds"] = int(s.active_seconds)
    if decision.kind in ("succeed", "fail"):
        changes["completionTime"] = timestamp(s.now)
    return changes


def _failures(s: JobState, decision: Decision) -> Json:
    if decision.failure is None:
        return {}
    changes: Json = {"failures": [*(s.before.get("failures") or ()), decision.failure][-_KEPT_FAILURES:]}
    if decision.failure["action"] == "Restart":
        changes["restarts"] = int(s.before.get("restarts") or 0) + 1
        changes["restartsCountedTowardsLimit"] = int(s.before.get("restartsCountedTowardsLimit") or 0) + 1
    return changes


def _training(s: JobState) -> Json:
    """Return progress and checkpoint from rank 0's last report, or from its termination message."""
    report = None if s.attempt.is_closed else _report_of_rank_zero(s)
    if report is None:
        return {}
    changes: Json = {"progress": progress_status(report, s.before.get("progress") or {}, s.now)}
    if checkpoint := checkpoint_status(report, s.before.get("checkpoint"), s.now):
        changes["checkpoint"] = checkpoint
    return changes


def _without_speed(status: Json, *, ended: str) -> Json:
    """Remove what no longer holds when an attempt ends; its progress is shown until the next one reports."""
    changes: Json = {}
    if progress := status.get("progress"):
        gone = {"etaSeconds"} if ended == "succeed" else {"samplesPerSecond", "etaSeconds"}
        changes["progress"] = {k: v for k, v in progress.items() if k not in gone}
    if (checkpoint := status.get("checkpoint")) and ended in ("start", "restart"):
        changes["checkpoint"] = {k: v for k, v in checkpoint.items() if k != "resumedFromStep"}
    return changes


def _report_of_rank_zero(s: JobState) -> Json | None:
    pod = s.current.get(0)
    if pod is None:
        return None
    if pod.ended:
        last = (pod.report or {}).get("progress")
        if not isinstance(last, dict) or pod.report is None:
            return None
        return last | {k: pod.report[k] for k in ("accuracy", "checkpoint", "resumedFrom") if pod.report.get(k)}
    # A late response may come from a pod of an earlier attempt.
    return s.observed.progress if s.observed.progress_pod == pod.name else None


def _world(s: JobState, attempt: int) -> Json:
    nodes, nproc = len(s.job.node_ranks), s.job.nproc_per_node
    address = f"{s.job.master_address(attempt, s.settings)}:{s.job.spec.rendezvous.port}"
    return {"numNodes": nodes, "nprocPerNode": nproc, "worldSize": nodes * nproc, "masterAddress": address}


def _settles(s: JobState, decision: Decision) -> bool:
    return decision.kind == "settle" or (s.attempt.is_settling and decision.kind in ("continue", "hold"))


def _state(conditions_: list[Json], *, is_settling: bool) -> str:
    holds = {condition["type"] for condition in conditions_ if condition["status"] == "True"}
    for state in ("Succeeded", "Failed", "Suspended", "Running", "Restarting"):
        if state in holds:
            return state
    return "Ending" if is_settling else "Pending"
