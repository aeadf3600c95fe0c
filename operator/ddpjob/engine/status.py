"""Compute the status after a decision. One patch records all of it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from ddpjob.api.limits import MAX_MESSAGE
from ddpjob.api.objects import Json
from ddpjob.api.text import shorten
from ddpjob.api.times import parse_time, seconds_between, seconds_since, timestamp
from ddpjob.engine.attempt import CREATING, ENDING, RUNNING, SETTLE_SECONDS, SUSPENDED, Attempt, whole_second_after
from ddpjob.engine.budget import refund
from ddpjob.engine.conditions import all_run, build, conditions, invalid
from ddpjob.engine.decision import RESTART_REQUESTED, Decision, number_of_next
from ddpjob.engine.desired import is_comparable
from ddpjob.engine.pod_view import PodState
from ddpjob.engine.progress import checkpoint_status, progress_status
from ddpjob.engine.state import JobState
from ddpjob.engine.suspects import avoided, avoided_after

_KEPT_FAILURES = 5


def next_status(s: JobState, decision: Decision) -> Json:
    """Return the complete status after ``decision``; it equals the recorded one if nothing changed."""
    begins = decision.begins_attempt
    status: Json = dict(s.before)
    status["observedGeneration"] = s.job.generation
    if not is_comparable(status.get("specHash")) or (s.may_be_rescheduled and not s.spec_changed):
        status["specHash"] = s.spec_hash
    status.setdefault("restarts", 0)
    status.setdefault("restartsCountedTowardsLimit", 0)
    status["attempt"] = next_number(s, decision)
    status["succeededNodes"] = [] if begins else sorted(s.succeeded_nodes)
    nodes = _count_nodes(s, decision)
    status["nodes"] = nodes
    status["nodesReady"] = f"{nodes['running'] + nodes['succeeded']}/{nodes['desired']}"
    if status["attempt"]:
        attempt = _next_attempt(s, decision, nodes)
        status["currentAttempt"] = attempt.wire()
        status["world"] = _world(s, status["attempt"])
        status |= _timings(s, attempt, decision)
    status |= _times(s, decision)
    status |= refund(s)
    status |= _failures(s, status, decision)
    status |= _avoided_nodes(s, decision)
    if decision.restarted_at or (begins and s.job.spec.restarted_at):
        status["restartedAt"] = decision.restarted_at or s.job.spec.restarted_at
    status |= _training(s)
    if begins or decision.ends_attempt:
        status |= _without_speed(status, ended=decision.kind)
    status["conditions"] = conditions(s, decision, nodes, status.get("failures") or ())
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
    # Pods of a newer attempt than the recorded one are deleted, and their names must not be used again. The write also
    # shows whether the job was stale, for example because two operators are at work: then it conflicts.
    deletes_newer = decision.ends_attempt or s.attempt.is_closed
    return max(s.attempt.number, s.newest_attempt) if deletes_newer else s.attempt.number


def _next_attempt(s: JobState, decision: Decision, nodes: Mapping[str, int]) -> Attempt:
    """Return the attempt after the decision: the only place where its phase changes."""
    now, attempt = timestamp(s.now), s.attempt
    row = decision.spending.in_row if decision.spending else attempt.failures_in_row
    if decision.begins_attempt:
        row = 0 if attempt.verdict in (SUSPENDED, RESTART_REQUESTED) else row
        since = attempt.creating_since if decision.refusals else None
        refusals = decision.refusals
        return Attempt(number_of_next(s), CREATING, now, refusals=refusals, creating_since=since, failures_in_row=row)
    match decision.kind:
        case "created":
            return replace(attempt, phase=RUNNING, refusals=0, creating_since=None, message="", since="", until=None)
        case "settle":
            until = decision.until or whole_second_after(s.now, SETTLE_SECONDS)
            since = attempt.since or now
            return replace(attempt, phase=ENDING, message=decision.message, since=since, until=until)
        case "close" | "suspend" | "succeed" | "fail":
            return replace(
                attempt,
                number=next_number(s, decision),
                phase=ENDING,
                verdict=decision.reason,
                message=shorten(decision.message, MAX_MESSAGE),
                since=attempt.since or now,
                until=decision.until,
                drain_until=decision.drain_until,
                refusals=decision.refusals,
                creating_since=_creating_since(attempt, decision),
                failures_in_row=row,
            )
    if not attempt.is_closed:
        return _with_first_times(s, attempt, nodes)
    if (number := next_number(s, decision)) == attempt.number:
        return attempt
    verdict, since = attempt.verdict or SUSPENDED, attempt.since or now
    return replace(attempt, number=number, phase=ENDING, verdict=verdict, since=since)


def _creating_since(attempt: Attempt, decision: Decision) -> str | None:
    """Return when the first of the attempts started that were abandoned before they ran, up to the one that ends."""
    if not decision.refusals or attempt.all_running_time is not None:
        return None
    return attempt.creating_since or attempt.start_time


def _with_first_times(s: JobState, attempt: Attempt, nodes: Mapping[str, int]) -> Attempt:
    """Return the attempt with the times of what was seen for the first time."""
    now = timestamp(s.now)
    if attempt.phase == RUNNING and attempt.all_running_time is None and all_run(nodes):
        attempt = replace(attempt, all_running_time=now)
    if attempt.first_step_time is None and s.has_stepped:
        attempt = replace(attempt, first_step_time=now)
    if attempt.first_success_time is None and s.succeeded_nodes:
        attempt = replace(attempt, first_success_time=now)
    return attempt


def _timings(s: JobState, attempt: Attempt, decision: Decision) -> Json:
    """Return how long the start of the attempt took, and the recovery from the failure before it."""
    started = {"scheduleSeconds": attempt.all_running_time, "firstStepSeconds": attempt.first_step_time}
    timings = {key: _seconds(attempt.start_time, time) for key, time in started.items() if time}
    failure, recovered = s.last_failure, attempt.first_step_time or attempt.all_running_time
    known = (s.before.get("timings") or {}).get("lastRecoverySeconds")  # of this failure, see below
    is_over = failure and known is not None and known < seconds_since(failure["time"], parse_time(attempt.start_time))
    if failure and failure["attempt"] < attempt.number and recovered and not is_over:
        timings["lastRecoverySeconds"] = _seconds(failure["time"], recovered)
    elif known is not None and decision.failure is None:
        timings["lastRecoverySeconds"] = known
    return {"timings": timings} if timings or "timings" in s.before else {}


def _seconds(start: str, end: str) -> int:
    return int(seconds_between(start, parse_time(end)))


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


def _failures(s: JobState, status: Json, decision: Decision) -> Json:
    if decision.failure is None:
        return {}
    changes: Json = {"failures": [*(status.get("failures") or ()), decision.failure][-_KEPT_FAILURES:]}
    if decision.spending is not None:
        changes["restarts"] = decision.spending.restarts
        changes["restartsCountedTowardsLimit"] = decision.spending.counted
    return changes


def _avoided_nodes(s: JobState, decision: Decision) -> Json:
    """Return the changed list of avoided nodes. It stays as it is while an attempt runs, whose pods it describes."""
    if decision.failure is not None and decision.spending is not None:
        entries = avoided_after(s.before, decision.failure, s.now)
    elif decision.forgets_nodes:
        entries = []
    elif decision.begins_attempt:
        entries = avoided(s.before, s.now)
    else:
        return {}
    return {"avoidNodes": entries} if entries or "avoidNodes" in s.before else {}


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
    return s.answer


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
