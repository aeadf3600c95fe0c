"""Compute the status after a decision. One patch records all of it."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

from ddpjob.api.wire import Json, timestamp
from ddpjob.engine.conditions import build, conditions, invalid
from ddpjob.engine.decision import Decision
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
    status["attempt"] = new_attempt(s, decision)
    status["succeededRanks"] = [] if begins else sorted(s.succeeded_node_ranks)
    nodes = _count_nodes(s, begins)
    status["nodes"] = nodes
    status["nodesReady"] = f"{nodes['running'] + nodes['succeeded']}/{nodes['desired']}"
    status["conditions"] = conditions(s, decision, nodes)
    status |= _times(s, decision)
    status |= _failures(s, decision)
    if not begins and s.gang_is_complete:
        status["completeAttempt"] = s.attempt
    status |= _forget_speed(s) if begins else _training(s)
    if status["attempt"]:
        status["world"] = _world(s, status["attempt"])
    status["state"] = _state(status["conditions"])
    return status


def invalid_status(before: Mapping[str, Any], generation: int, lines: list[str], now: Any) -> Json:
    """Return the status of a job whose spec is invalid; ``lines`` are the errors."""
    message = "; ".join(lines) + ": fix the spec, or update the CustomResourceDefinition, which accepted it"
    status = dict(before) | {"observedGeneration": generation, "state": "Invalid"}
    status["conditions"] = build(before.get("conditions") or (), invalid(message), now)
    return status


def new_attempt(s: JobState, decision: Decision) -> int:
    """Return the number of the current attempt after the decision."""
    if decision.begins_attempt:
        # If a user deleted the status, pods may have a higher number; their names must not be used again.
        return max(s.attempt, s.newest_attempt) + 1
    return s.attempt


def _count_nodes(s: JobState, begins: bool) -> dict[str, int]:
    counts: Counter[str] = Counter()
    if not begins:
        counts.update(pod.state for pod in s.current.values() if pod.node_rank not in s.succeeded_node_ranks)
        counts["succeeded"] = len(s.succeeded_node_ranks)
    return {"desired": len(s.job.node_ranks)} | {state: counts[state] for state in get_args(PodState)}


def _times(s: JobState, decision: Decision) -> Json:
    changes: Json = {}
    if decision.kind == "start" and "startTime" not in s.before:
        changes["startTime"] = timestamp(s.now)
    if decision.kind in ("suspend", "succeed", "fail"):
        changes["activeSeconds"] = int(s.active_seconds)
    if decision.kind in ("succeed", "fail"):
        changes["completionTime"] = timestamp(s.now)
    return changes


def _failures(s: JobState, decision: Decision) -> Json:
    if decision.failure is None:
        return {}
    changes: Json = {"failures": [*(s.before.get("failures") or ()), decision.failure][-_KEPT_FAILURES:]}
    if decision.kind == "restart":
        changes["restarts"] = int(s.before.get("restarts") or 0) + 1
        changes["restartsCountedTowardsLimit"] = int(s.before.get("restartsCountedTowardsLimit") or 0) + 1
    return changes


def _training(s: JobState) -> Json:
    """Return progress and checkpoint from rank 0's last report, or from its termination message."""
    report = _report_of_rank_zero(s)
    if report is None:
        return {}
    changes: Json = {"progress": progress_status(report, s.before.get("progress") or {}, s.now)}
    if checkpoint := checkpoint_status(report, s.before.get("checkpoint"), s.now):
        changes["checkpoint"] = checkpoint
    return changes


def _forget_speed(s: JobState) -> Json:
    """Remove speed and resume point of the attempt that ended; its progress is shown until the next one reports."""
    changes: Json = {}
    if progress := s.before.get("progress"):
        changes["progress"] = {k: v for k, v in progress.items() if k not in ("samplesPerSecond", "etaSeconds")}
    if checkpoint := s.before.get("checkpoint"):
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


def _state(conditions_: list[Json]) -> str:
    holds = {condition["type"] for condition in conditions_ if condition["status"] == "True"}
    for state in ("Succeeded", "Failed", "Suspended", "Running", "Restarting"):
        if state in holds:
            return state
    return "Pending"
