"""Compute the status after a decision. One patch records all of it."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import get_args

from ddpjob.api.limits import MAX_MESSAGE
from ddpjob.api.pod_view import PodState
from ddpjob.api.status import (
    CREATING,
    ENDING,
    RUNNING,
    AvoidedNode,
    CheckpointStatus,
    Condition,
    CurrentAttempt,
    DDPJobStatus,
    DivergedStatus,
    Ending,
    Furthest,
    InPlace,
    Nodes,
    NotFiniteLoss,
    PauseStatus,
    Progress,
    SlowNode,
    SlowStatus,
    StallStatus,
    World,
)
from ddpjob.api.text import shorten
from ddpjob.api.times import timestamp
from ddpjob.engine.attempt import EVICTED, SUSPENDED
from ddpjob.engine.budget import counted_restarts, failures_in_row, refund, total_restarts
from ddpjob.engine.conditions import all_run, build, conditions, without_pods
from ddpjob.engine.decision import RESTART_REQUESTED, Decision
from ddpjob.engine.desired import is_comparable
from ddpjob.engine.inplace import grant
from ddpjob.engine.ledger import time_spent
from ddpjob.engine.obstacles import TRAINING_STALLED, admission_obstacle
from ddpjob.engine.progress import (
    checkpoint_status,
    diverged_status,
    furthest,
    loss_status,
    pause_status,
    progress_status,
    slow_status,
)
from ddpjob.engine.scheduling import elastic, guard
from ddpjob.engine.state import JobState
from ddpjob.engine.suspects import (
    NODES_NEEDED,
    avoided,
    avoided_after,
    banned,
    no_other_node_since,
    slow_after,
    with_slow,
)
from ddpjob.engine.token import attempt_token, token_hash

_KEPT_FAILURES = 5


def next_status(s: JobState, decision: Decision) -> DDPJobStatus:
    """Return the complete status after ``decision``; it equals the recorded one if nothing changed."""
    before, restarted = refund(s), decision.restarted
    number, nodes = next_number(s, decision), _count_nodes(s, decision)
    attempt = _next_attempt(s, decision, nodes) if number else None
    finishes = decision.kind in ("succeed", "fail")
    # The nodes of an attempt of another size than the spec's say nothing about the job.
    forgets = decision.begins_attempt or (decision.ends_attempt and elastic.is_resized(s))
    ends = decision.begins_attempt or finishes or decision.kind == "suspend" or decision.reason == EVICTED
    failures, asked = before.failures, None
    if decision.begins_attempt or (decision.reason == RESTART_REQUESTED and decision.failure is None):
        asked = s.job.spec.restarted_at
    if decision.failure is not None:
        failures = [*(failures or ()), decision.failure][-_KEPT_FAILURES:]
    reached = _furthest(s, decision)
    built = conditions(s, decision, nodes, failures or (), reached)
    slow = _slow(s, built)
    slow_nodes = slow_after(s, slow)
    settles = decision.kind == "settle" or (s.attempt.is_settling and decision.kind in ("continue", "hold"))
    counted, total = before.restarts_counted_towards_limit or 0, _total_restarts(s, decision)
    whole = f" of {s.job.spec.num_nodes}" if nodes.desired < s.job.spec.num_nodes else ""
    if decision.kind in ("restart", "close", "suspend"):
        counted = counted_restarts(s) + (restarted is not None and restarted.counted)
    after = before.changed(
        observed_generation=s.job.generation,
        spec_hash=before.spec_hash if is_comparable(before.spec_hash) else s.job.spec_hash,
        state=_state(s, decision, built, is_settling=settles),
        attempt=number,
        current_attempt=attempt or before.current_attempt,
        restarts=(before.restarts or 0) + s.new_lives + (restarted is not None),
        restarts_in_place=((before.restarts_in_place or 0) + s.new_lives) or before.restarts_in_place,
        restarts_counted_towards_limit=counted,
        restarts_counted_towards_total=total or None,
        start_time=before.start_time or (timestamp(s.now) if decision.kind == "start" else None),
        completion_time=timestamp(s.now) if finishes else None,
        active_seconds=int(s.active_seconds) if s.attempt.number and ends else before.active_seconds,
        succeeded_nodes=[] if forgets else sorted(s.succeeded_nodes),
        conditions=built,
        world=_world(s, decision, number) if number else before.world,
        nodes=nodes,
        nodes_ready=f"{nodes.running + nodes.succeeded}/{nodes.desired}{whole}",
        progress=_progress(s, decision),
        checkpoint=_checkpoint(s, decision),
        stall=_stall(s, built),
        slow=slow,
        diverged=_diverged(s, built),
        loss_not_finite=_loss(s, decision),
        pause=_pause(s, decision),
        furthest=reached,
        failures=failures,
        avoid_nodes=_avoided_nodes(s, decision, slow_nodes or ()),
        slow_nodes=slow_nodes,
        restarted_at=asked or before.restarted_at,
    )
    # The time is written with other changes only: a job without events is not written for it.
    return s.before if after == s.before else after.changed(time=time_spent(s, decision, after))


def invalid_status(before: DDPJobStatus, generation: int, lines: list[str], now: datetime) -> DDPJobStatus:
    """Return the status of a job whose spec is invalid; ``lines`` are the errors."""
    message = "; ".join(lines) + ": fix the spec, or update the CustomResourceDefinition, which accepted it"
    built = build(before.conditions or (), without_pods("InvalidSpec", message, Stalled=True), now)
    return before.changed(observed_generation=generation, state="Invalid", conditions=built)


def next_number(s: JobState, decision: Decision) -> int:
    """Return the number of the current attempt after the decision."""
    if decision.begins_attempt:
        return s.number_of_next
    # Pods of a newer attempt than the recorded one are deleted, and their names must not be used again. The write also
    # shows whether the job was stale, for example because two operators are at work: then it conflicts.
    deletes_newer = decision.ends_attempt or s.attempt.is_closed
    return max(s.attempt.number, s.newest_attempt) if deletes_newer else s.attempt.number


def _next_attempt(s: JobState, decision: Decision, nodes: Nodes) -> CurrentAttempt:
    """Return the attempt after the decision: the only place where its phase changes."""
    attempt = s.attempt
    if s.in_place is not attempt.in_place:
        attempt = attempt.changed(in_place=s.in_place)
    if s.reports_fenced and not attempt.fenced:
        attempt = attempt.changed(fenced=True)
    yields = None if s.spec_edited or s.suspended else attempt.yields
    if decision.begins_attempt:
        return _new_attempt(s, decision, attempt, yields)
    if decision.ends_attempt:
        return _ended_attempt(s, decision, attempt)
    since = attempt.ending.since if attempt.ending else timestamp(s.now)
    if decision.kind == "created":
        first = attempt.creating_since if yields else None
        created = attempt.changed(phase=RUNNING, refusals=None, creating_since=first, ending=None)
        return _with_first_times(s, decision, created, nodes)  # the pods may run already
    if decision.kind == "settle":
        return attempt.changed(phase=ENDING, ending=Ending(message=decision.message, since=since, until=decision.until))
    if not attempt.is_closed:
        return _with_first_times(s, decision, attempt, nodes)
    if (number := next_number(s, decision)) == attempt.number:
        return attempt
    ended = attempt.ending or Ending(since=since, verdict=SUSPENDED)
    return attempt.changed(number=number, phase=ENDING, ending=ended)


def _new_attempt(s: JobState, decision: Decision, before: CurrentAttempt, yields: int | None) -> CurrentAttempt:
    number = s.number_of_next
    row = None if before.verdict in (SUSPENDED, EVICTED, RESTART_REQUESTED) else _failures_in_row(s, decision)
    return CurrentAttempt(
        number=number,
        phase=CREATING,
        start_time=timestamp(s.now),
        token_hash=token_hash(attempt_token(s, number)),
        refusals=decision.refusals or None,
        creating_since=before.creating_since if decision.refusals or yields else None,
        yields=yields,
        failures_in_row=row or None,
        in_place=InPlace(granted=grant(before.in_place, _total_restarts(s, decision), s.job.spec.restart_policy)),
        size=elastic.next_size(s),
        elder_seconds=before.elder_seconds,
    )


def _ended_attempt(s: JobState, decision: Decision, attempt: CurrentAttempt) -> CurrentAttempt:
    since = None  # the start of the first of the attempts that were abandoned before they ran, up to this one
    if (decision.refusals or decision.gives_back) and attempt.all_running_time is None:
        since = attempt.creating_since or attempt.start_time
    ending = Ending(
        verdict=decision.reason,
        message=shorten(decision.message, MAX_MESSAGE),
        since=attempt.ending.since if attempt.ending else timestamp(s.now),
        until=decision.until,
        drain_until=decision.drain_until,
    )
    return attempt.changed(
        number=next_number(s, decision),
        phase=ENDING,
        ending=ending,
        refusals=decision.refusals or None,
        creating_since=since,
        failures_in_row=_failures_in_row(s, decision) or None,
        partial_since=None,
        elder_seconds=guard.elder_seconds(s),
        next_size=decision.size,
        yields=(attempt.yields or 0) + 1 if decision.gives_back else attempt.yields,
    )


def _failures_in_row(s: JobState, decision: Decision) -> int | None:
    return failures_in_row(s, is_free=decision.is_free) if decision.restarted else s.attempt.failures_in_row


def _total_restarts(s: JobState, decision: Decision) -> int:
    return total_restarts(s) + (decision.restarted is not None and not decision.is_free)


def _with_first_times(s: JobState, decision: Decision, attempt: CurrentAttempt, nodes: Nodes) -> CurrentAttempt:
    now = timestamp(s.now)
    if attempt.is_creating and not s.current:  # the process that began it may have ended before it created a pod
        attempt = attempt.changed(token_hash=token_hash(attempt_token(s, attempt.number)) or attempt.token_hash)
    if attempt.phase == RUNNING and attempt.all_running_time is None and all_run(nodes):
        attempt = attempt.changed(all_running_time=now, creating_since=None, yields=None, elder_seconds=None)
    if attempt.first_step_time is None and s.has_stepped:
        attempt = attempt.changed(first_step_time=now)
    if attempt.first_success_time is None and s.succeeded_nodes:
        attempt = attempt.changed(first_success_time=now)
    if attempt.number > 1 and attempt.room_since != s.room_since and _waits_for_nodes(s):
        attempt = attempt.changed(room_since=s.room_since)
    if attempt.no_other_node_since != (since := no_other_node_since(s)):
        attempt = attempt.changed(no_other_node_since=since)
    if attempt.partial_since != s.partial_since:
        priority = next((pod.priority for pod in s.current.values()), 0)
        attempt = attempt.changed(partial_since=s.partial_since, pod_priority=priority or None)
    if attempt.size is not None and decision.kind == "continue" and elastic.asks(s):
        attempt = attempt.changed(size=attempt.size.changed(probe_time=now))
    if attempt.refused_start != s.refused_start:
        attempt = attempt.changed(refused_start=s.refused_start)
    return attempt


def _waits_for_nodes(s: JobState) -> bool:
    """Whether pods have no Kubernetes node, in a job in which something follows from that."""
    if s.attempt.all_running_time is not None:
        return False
    pods = s.current.values()
    if s.job.spec.min_nodes is not None:  # a gang scheduler does not say that it places none
        return any(pod.node_name is None for pod in pods)
    return bool(banned(s.before)) and any(pod.unschedulable is not None for pod in pods)


def _count_nodes(s: JobState, decision: Decision) -> Nodes:
    counts: Counter[str] = Counter()
    if not decision.begins_attempt:
        counts.update(pod.state for pod in s.current.values() if pod.node_rank not in s.succeeded_nodes)
        counts["succeeded"] = len(s.succeeded_nodes)
    if decision.ends_attempt or s.attempt.is_closed:
        counts["running"] = counts["pending"] = 0  # they are deleted after this status is written
    job = elastic.job_after(s, decision.begins_attempt)
    return Nodes(desired=job.nodes, **{state: counts[state] for state in get_args(PodState)})


def _avoided_nodes(s: JobState, decision: Decision, slow: Sequence[SlowNode]) -> list[AvoidedNode] | None:
    """Return the avoided nodes. The list stays as it is while an attempt runs, whose pods it describes."""
    if (failure := decision.restarted) is not None:
        nodes = avoided_after(s.before, failure, s.now, has_trained=s.has_trained)
    elif decision.reason == NODES_NEEDED:
        nodes = []
    elif decision.begins_attempt:
        nodes = avoided(s.before, s.now)
    else:
        return s.before.avoid_nodes
    nodes = with_slow(nodes, slow, s.now)
    return nodes if nodes or s.before.avoid_nodes is not None else None


def _progress(s: JobState, decision: Decision) -> Progress | None:
    """Return rank 0's last progress. After the end of its attempt it is shown until the next attempt reports."""
    progress = progress_status(s.report, s.before.progress, s.now) if s.report else s.before.progress
    if progress is not None and (decision.begins_attempt or decision.ends_attempt):
        progress = progress.changed(eta_seconds=None, saving_seconds=None)
        if decision.kind != "succeed":
            progress = progress.changed(samples_per_second=None, steps_per_second=None)
    return progress


def _checkpoint(s: JobState, decision: Decision) -> CheckpointStatus | None:
    checkpoint = checkpoint_status(s.report, s.before.checkpoint, s.now) if s.report else s.before.checkpoint
    if checkpoint is not None and decision.begins_attempt:
        checkpoint = checkpoint.changed(resumed_from_step=None)
    return checkpoint


def _stall(s: JobState, built: Sequence[Condition]) -> StallStatus | None:
    reported = s.answer.stall if s.answer is not None else None
    if reported is None or not any(condition.reason == TRAINING_STALLED for condition in built):
        return None
    return StallStatus(rank=reported.rank, step=reported.step, phase=reported.phase, where=reported.where)


def _runs(built: Sequence[Condition]) -> bool:
    return any(condition.type == "Running" and condition.status == "True" for condition in built)


def _slow(s: JobState, built: Sequence[Condition]) -> SlowStatus | None:
    if s.slow is None or not _runs(built):
        return None
    pod = s.current.get((s.slow.rank or 0) // s.job.nproc_per_node)
    node_name = pod.node_name if pod is not None and not s.settings.is_local else None
    return slow_status(s.slow, s.before.slow, s.now, node_name)


def _diverged(s: JobState, built: Sequence[Condition]) -> DivergedStatus | None:
    return diverged_status(s.diverged, s.before.diverged, s.now) if _runs(built) else None


def _loss(s: JobState, decision: Decision) -> NotFiniteLoss | None:
    ends = decision.begins_attempt or decision.ends_attempt or s.attempt.is_closed
    return None if ends else loss_status(s.report, s.before, s.now)


def _pause(s: JobState, decision: Decision) -> PauseStatus | None:
    if decision.begins_attempt or decision.ends_attempt or s.attempt.is_closed:
        return None
    return pause_status(s.report, s.before, s.now) if s.report else s.before.pause


def _furthest(s: JobState, decision: Decision) -> Furthest | None:
    ends = decision.ends_attempt or decision.begins_attempt
    reached = furthest(s.report, s.before.furthest, s.new_lives, has_trained=ends and s.has_trained)
    if reached is None or reached.trained or decision.restarted is None:
        return reached
    return reached.changed(restarts_since=(reached.restarts_since or 0) + 1)  # it follows all progress of the attempt


def _world(s: JobState, decision: Decision, attempt: int) -> World:
    """Return the world of the attempt after the decision. An edited spec changes no attempt that goes on."""
    if s.before.world is not None and not (decision.begins_attempt or decision.ends_attempt or s.attempt.is_closed):
        return s.before.world
    job = elastic.job_after(s, decision.begins_attempt)
    nodes, nproc = job.nodes, job.nproc_per_node
    address = f"{job.master_address(attempt, s.settings)}:{job.spec.rendezvous.port}"
    return World(num_nodes=nodes, nproc_per_node=nproc, world_size=nodes * nproc, master_address=address)


def _state(s: JobState, decision: Decision, built: Sequence[Condition], *, is_settling: bool) -> str:
    holds = {condition.type for condition in built if condition.status == "True"}
    for state in ("Succeeded", "Failed", "Suspended", "Running", "Restarting"):
        if state in holds:
            return state
    if is_settling:
        return "Ending"
    waits = decision.kind == "continue" and (admission_obstacle(s) is not None or s.attempt.verdict in guard.VERDICTS)
    return "Queued" if decision.gives_back or waits else "Pending"
