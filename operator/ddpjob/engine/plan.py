"""Plan a reconcile: from the observed state of a job to its new status, deletes, creates and events.

The controller writes the status first, so after a crash at any later point the decision is recorded.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from math import isfinite

from pydantic import ValidationError

from ddpjob.api import names
from ddpjob.api.objects import Json, owner_uid
from ddpjob.api.pod_view import STOP_SECONDS, PodView
from ddpjob.api.spec import explain
from ddpjob.api.status import DDPJobStatus, recorded_status
from ddpjob.api.text import shorten
from ddpjob.api.times import seconds_between, seconds_since
from ddpjob.engine import obstacles
from ddpjob.engine.actions import LOOKUP_SECONDS, REFUSALS_TO_SHOW, Change, Create, Delete, EngineSettings, Note, Plan
from ddpjob.engine.attempt import SUSPENDED, recorded_attempt
from ddpjob.engine.conditions import finished
from ddpjob.engine.deadlines import deadlines
from ddpjob.engine.decision import Decision, decide
from ddpjob.engine.desired import Job, desired_claim, desired_pods, desired_probes
from ddpjob.engine.events import MAX_NOTE, notes
from ddpjob.engine.merge import template_faults
from ddpjob.engine.network import desired_policy, desired_service, policy_change, service_change
from ddpjob.engine.observed import Observed
from ddpjob.engine.scheduling import adapters as scheduling
from ddpjob.engine.scheduling import elastic, gangs, guard, kueue
from ddpjob.engine.state import JobState
from ddpjob.engine.status import invalid_status, next_number, next_status
from ddpjob.engine.token import attempt_token, seconds_to_wait

MIN_REQUEUE_SECONDS = 1.0
"""No job is planned again earlier without an event, so that no spec can keep the operator busy."""


def plan(
    body: Json,
    observed: Observed,
    now: datetime,
    settings: EngineSettings,
    parse: Callable[[Json], Job] = Job.of,
) -> Plan:
    """Return what to do about one job.

    Args:
        body: the DDPJob as the API server returned it.
        observed: the other objects of the job (``observe``).
        now: the current time, in UTC.
        settings: of the operator.
        parse: returns what ``Job.of`` returns, perhaps without parsing the same spec again.
    """
    meta = body["metadata"]
    finalizers = meta.get("finalizers") or () if meta.get("deletionTimestamp") else ()
    if meta.get("deletionTimestamp") and (not finalizers or names.GARBAGE_COLLECTION.intersection(finalizers)):
        return Plan()  # the garbage collector deletes the objects that the job owns, or keeps them
    # The CRD accepts any status, so that releases can be mixed. A part that a user or a program spoiled is dropped.
    before = recorded_status(body.get("status") or {})
    try:
        job = parse(body)
    except ValidationError as error:
        return _refuse(body, before, explain(error), now)
    if job.spec.managed_by not in (None, names.CONTROLLER):
        return Plan()
    if finalizers:
        job = replace(job, spec=job.spec.model_copy(update={"suspend": True}))
    job = job.of_size(elastic.nodes_of(job.spec, before, recorded_attempt(before, now)))
    state = JobState(job, before, observed, now, settings, meta.get("labels") or {}, finalizers)
    if state.finished:
        return Plan() if finalizers else _from_live_pods(_plan_finished(state), observed)
    if job.spec.template is not None and (faults := template_faults(job.wire["template"])):
        return replace(_refuse(body, before, faults, now), changes=kueue.leave(state))
    if lookups := kueue.lookups(state):
        # If reading takes so long that the first objects are too old, that is tried again later.
        return Plan(lookups=lookups, requeue_after=LOOKUP_SECONDS)
    decision = decide(state)
    is_destructive = decision.ends_attempt or decision.kind in ("settle", "restart")
    if not observed.live and (is_destructive or _fills_gaps(state, decision)):
        return Plan(needs_live=True)
    return _from_live_pods(_carry_out(state, decision), observed)


def _from_live_pods(made: Plan, observed: Observed) -> Plan:
    """Return the plan unless it deletes pods that are only cached: a trainer may have ended, and its log is kept."""
    deletes = any(delete.resource is names.PODS for delete in made.deletes)
    return Plan(needs_live=True) if deletes and not observed.live else made


def _fills_gaps(s: JobState, decision: Decision) -> bool:
    """Whether pods would be created beside others that the cache may not have.

    Those are of an attempt that another process began, or of an earlier one and may still write.
    """
    if decision.kind == "start":
        return s.attempt.number > 0 and s.may_overwrite
    gaps = s.attempt.is_creating and s.observed.round == "unknown" and bool(s.missing_nodes)
    return decision.kind == "continue" and gaps


def _carry_out(s: JobState, decision: Decision) -> Plan:
    status = next_status(s, decision)
    number, runs = next_number(s, decision), not _nothing_runs(s, decision)
    upkeep = scheduling.upkeep(s, number, runs=runs)
    first = tuple(request for request in upkeep if isinstance(request, Create))
    creates = (*((first,) if first else ()), *_creates(s, decision, status))
    goes_on = decision.kind in ("continue", "hold")
    probes = elastic.unused_probes(s, goes_on=goes_on)
    requests = [*_repairs(s, decision), *_ends(s, decision), *upkeep, *probes]
    makes_pods = any(phase[0].resource is names.PODS and not phase[0].optional for phase in creates)
    waits_for_cause = decision.kind == "continue" and s.attempt.is_settling
    return Plan(
        status=_changed(s.before, status),
        urgent=not goes_on,
        deletes=tuple(request for request in requests if isinstance(request, Delete)),
        changes=tuple(request for request in requests if isinstance(request, Change)),
        creates=creates,
        creates_attempt=number if makes_pods else None,
        events=tuple(notes(s, decision, status)),
        requeue_after=_earlier(_requeue_after(s, decision, status), kueue.look_again(s)),
        poll=None if decision.begins_attempt or decision.ends_attempt else _poll(s),
        logs=tuple((pod.name, pod.uid) for pod in s.unread_logs) if waits_for_cause else (),
        is_first=decision.kind == "start" and s.attempt.number == 0 and not s.pods,
        cautious=_is_cautious(s, decision),
    )


def _nothing_runs(s: JobState, decision: Decision) -> bool:
    return decision.ends_attempt or (s.attempt.is_closed and not decision.begins_attempt)


def _ends(s: JobState, decision: Decision) -> Iterable[Delete | Change]:
    """Yield what ends the pods that must not run, and deletes ended pods whose logs no failure in the status refers to.

    The end of the trainer is the end of the pod: of one to keep, only the other containers are stopped.
    """
    if decision.kind == "settle":
        return
    number = next_number(s, decision)
    retention = s.job.spec.pod_retention
    nothing_runs = _nothing_runs(s, decision)
    rests = decision.kind in ("succeed", "fail", "suspend") or (s.suspended and nothing_runs)
    # The pods of an ended attempt stay until the next attempt starts, so that users can read their logs.
    failure = (decision.failure if decision.begins_attempt else None) or next(reversed(s.earlier_failures), None)
    kept = {number, failure.attempt} if failure and retention == "LastAttempt" else {number}
    for pod in s.pods:
        if pod.attempt > number:
            continue  # of no attempt, or the cached job is stale and another operator started this one
        must_not_run = nothing_runs or pod.attempt != number
        is_dropped = (pod.attempt not in kept and retention != "All") or (retention == "None" and rests)
        if (end := _end(pod, must_not_run=must_not_run, keeps=not is_dropped)) is not None:
            yield end


def _end(pod: PodView, *, must_not_run: bool, keeps: bool) -> Delete | Change | None:
    """Return what ends a pod. A pod whose trainer still runs is deleted: the trainer then saves a checkpoint."""
    if pod.deleting:
        return None
    if pod.ended and keeps:
        # The kubelet then stops the containers that run on after the trainer, and keeps the pod and its logs.
        stop = Change(names.PODS, pod.name, pod.uid, {"activeDeadlineSeconds": STOP_SECONDS})
        return stop if must_not_run and pod.holds_resources else None
    if (must_not_run and pod.holds_resources) or (pod.ended and (pod.stopped or must_not_run)):
        return Delete(names.PODS, pod.name, pod.uid)
    return None


def _repairs(s: JobState, decision: Decision) -> Iterable[Change | Delete]:
    """Yield what restores the Service and the NetworkPolicy, or deletes a policy that was switched off.

    Without the Service's selector no rank finds another.
    """
    service, policy = s.observed.service, s.observed.policy
    if policy and (request := policy_change(s.job, policy, s.settings)):
        yield request
    uses_service = decision.begins_attempt or not s.attempt.is_closed
    if uses_service and service and (change := service_change(s.job, service)):
        yield change


def _creates(s: JobState, decision: Decision, status: DDPJobStatus) -> tuple[Sequence[Create], ...]:
    """Return the phases of creation: claim, NetworkPolicy and PodGroup, then the pods and the Service.

    A pod created before its claim waits for a retry of the scheduler, and one created before its policy can be reached
    by anyone. The Service exists long before a container resolves a name, so it follows the first pod. After a refusal
    it is sent alone before the pods, because a Service whose name is taken would cost a pod at each try. While a
    changed template is held, the running attempt gets only its Service and policy, which do not depend on the template.
    """
    begins, held = decision.begins_attempt, decision.kind == "hold"
    job, number = elastic.job_after(s, begins), next_number(s, decision)
    if not (begins or ((held or decision.kind == "continue") and not s.attempt.is_closed)):
        return ()
    node_ranks: Sequence[int] = ()
    if begins:
        existing = {pod.node_rank for pod in s.pods if pod.attempt == number}  # adopted, see ``number_of_next``
        node_ranks = [rank for rank in job.node_ranks if rank not in existing] if existing else job.node_ranks
    elif s.attempt.is_creating and not held:
        node_ranks = s.missing_nodes
    beside = bool(node_ranks) and not _is_cautious(s, decision)
    service = (desired_service(s.job, after_first=beside),) if s.observed.service is None else ()
    # Claims are not watched, so a cached one may have been deleted since: with an earlier job of this name, during a
    # suspension or a delay. An attempt that follows none, or not at once, therefore requests the claim again.
    needs_claim = (s.observed.claim is None and not held) or decision.kind == "start"
    claim = desired_claim(s.job) if needs_claim else None
    has_policy = s.observed.policy is not None and owner_uid(s.observed.policy) == s.job.uid
    policy = None if has_policy else desired_policy(s.job, s.settings)
    # A scheduler that has placed all pods needs the group no more.
    needs_group = begins or (not held and s.attempt.all_running_time is None)
    after = replace(s, job=job) if job is not s.job else s
    groups = gangs.objects(after, number) if needs_group else ()
    first = (*(create for create in (policy, claim) if create is not None), *groups)
    avoid = status.avoid_nodes or ()
    together = service if beside else ()
    in_place = recorded_attempt(status, s.now).in_place
    granted = in_place.granted if in_place else 0
    pods: Sequence[Create] = ()
    dress = partial(scheduling.dress, s=after, attempt=number)
    rendered = partial(desired_pods, job, number, s.settings, avoid=avoid, granted=granted, dress=dress)
    if node_ranks:
        if (token := attempt_token(s, number)) is None:
            return ()
        pods = rendered(node_ranks, beside=together, token=token)
    elif decision.kind == "continue" and elastic.asks(s):
        missing = range(job.nodes, job.spec.num_nodes)
        pods = desired_probes(rendered((0,)).first, job, number, missing)
    phases = (first, () if beside else service, pods)
    return tuple(phase for phase in phases if phase)


def _is_cautious(s: JobState, decision: Decision) -> bool:
    return decision.refusals > 0 or bool(s.attempt.refusals)


def _plan_finished(s: JobState) -> Plan:
    """Return the plan for a finished job: end pods that still run, and delete the job when its TTL has passed."""
    keeps = s.job.spec.pod_retention != "None"
    ends = [
        *(_end(pod, must_not_run=True, keeps=keeps) for pod in s.pods),
        *elastic.unused_probes(s, goes_on=False),
        *scheduling.upkeep(s, s.attempt.number, runs=False),
    ]
    deletes = tuple(end for end in ends if isinstance(end, Delete))
    changes = tuple(end for end in ends if isinstance(end, Change))
    built = finished(s.before.conditions or (), s.observed.problems, s.now) or None
    status = _changed(s.before, s.before.changed(observed_generation=s.job.generation, conditions=built))
    known = {condition.type: condition.reason for condition in s.before.conditions or ()}
    new = (each for each in built or () if each.reason in REFUSALS_TO_SHOW and known.get(each.type) != each.reason)
    events = tuple(Note("Warning", each.reason, shorten(each.message, MAX_NOTE)) for each in new)
    ttl = s.job.spec.ttl_seconds_after_finished
    completed = s.before.completion_time
    left = None
    if ttl is not None and completed is not None and not s.settings.is_local:
        left = ttl - seconds_between(completed, s.now)
    if left is not None and left <= 0:
        return Plan(deletes=(Delete(names.DDPJOBS, s.job.name, s.job.uid),))
    after = _earlier(left, kueue.look_again(s))
    return Plan(status=status, deletes=deletes, changes=changes, events=events, requeue_after=after)


def _refuse(body: Json, before: DDPJobStatus, lines: list[str], now: datetime) -> Plan:
    if before.completion_time is not None:
        return Plan()  # a finished job stays finished, even if another version of the operator refuses its spec
    generation = int(body["metadata"].get("generation", 1))
    status = _changed(before, invalid_status(before, generation, lines, now))
    if status is None:
        return Plan()
    return Plan(status=status, urgent=True, events=(Note("Warning", "InvalidSpec", "; ".join(lines)),))


def _changed(before: DDPJobStatus, status: DDPJobStatus) -> Json | None:
    return status.wire() if status != before else None


def _requeue_after(s: JobState, decision: Decision, status: DDPJobStatus) -> float | None:
    attempt = recorded_attempt(status, s.now)
    is_suspended = attempt.verdict == SUSPENDED and s.job.spec.suspend
    stops = [left for left, _ in s.stopping[:1] if isfinite(left) and not s.job.spec.suspend]
    if stops and not attempt.number:
        return stops[0]
    if decision.kind in ("succeed", "fail") or is_suspended or not attempt.number:
        return None
    # Deadlines of the attempt before the decision, unless the decision ends it.
    left = [d.left for d in deadlines(s) if d.ends == "job" or not (decision.begins_attempt or decision.ends_attempt)]
    if not (decision.begins_attempt or decision.ends_attempt):
        waits = (*obstacles.waits(s), *elastic.waits(s), *guard.waits(s))
        left += [seconds for seconds in waits if seconds is not None and seconds > 0]
        left += [seconds_to_wait(s)] if s.attempt.is_creating and attempt_token(s, s.attempt.number) is None else []
    if decision.kind != "hold":
        until = attempt.ending.until if attempt.ending else None
        left += [*stops, *([-seconds_since(until, s.now)] if until else ())]
        # A job that waits for a gang scheduler starts when that is served, at no time of its own.
        left = [seconds for seconds in left if seconds > 0] or ([] if obstacles.admission_obstacle(s) else left)
    return min(left, default=None)


def _earlier(*times: float | None) -> float | None:
    given = [max(seconds, MIN_REQUEUE_SECONDS) for seconds in times if seconds is not None]
    return min(given, default=None)


def _poll(s: JobState) -> tuple[str, str, int] | None:
    pod = s.current.get(0)
    if pod is None or pod.state != "running" or pod.deleting or not pod.ip:
        return None
    return pod.name, pod.ip, s.job.spec.rendezvous.progress_port
