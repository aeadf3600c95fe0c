"""Plan a reconcile: from the observed state of a job to its new status, deletes, creates and events.

The controller writes the status first, so after a crash at any later point the decision is recorded.
"""

from collections.abc import Iterable
from datetime import datetime

from pydantic import ValidationError

from ddpjob.api import names
from ddpjob.api.spec import explain
from ddpjob.api.wire import Json, is_true, seconds_between
from ddpjob.engine.actions import Create, Delete, EngineSettings, Note, Plan
from ddpjob.engine.decision import Decision, decide
from ddpjob.engine.desired import Job, desired_claim, desired_pods, desired_service
from ddpjob.engine.events import notes
from ddpjob.engine.merge import template_faults
from ddpjob.engine.observe import Observed
from ddpjob.engine.state import JobState
from ddpjob.engine.status import invalid_status, new_attempt, next_status


def plan(body: Json, observed: Observed, now: datetime, settings: EngineSettings) -> Plan:
    """Return what to do about one job.

    Args:
        body: the DDPJob as the API server returned it.
        observed: the other objects of the job (``observe``).
        now: the current time, in UTC.
        settings: of the operator.
    """
    if body["metadata"].get("deletionTimestamp"):
        return Plan()  # the API server deletes the objects that the job owns
    before = body.get("status") or {}
    try:
        job = Job.of(body)
    except ValidationError as error:
        return _refuse(body, explain(error), now)
    state = JobState(job, before, observed, now, settings)
    if state.finished:
        return _plan_finished(state)
    if job.spec.template is not None and (faults := template_faults(job.spec.wire()["template"])):
        return _refuse(body, faults, now)
    decision = decide(state)
    if decision.is_final_or_destructive and not observed.live:
        return Plan(needs_live=True)
    return _carry_out(state, decision)


def _carry_out(s: JobState, decision: Decision) -> Plan:
    status = next_status(s, decision)
    attempt = new_attempt(s, decision)
    return Plan(
        status=status if status != s.before else None,
        urgent=decision.kind not in ("continue", "hold"),
        deletes=tuple(_deletes(s, decision, attempt)),
        creates=_creates(s, decision, attempt),
        events=tuple(notes(s, decision, status)),
        requeue_after=_deadline(s) if decision.kind in ("continue", "hold", "start", "restart") else None,
        poll=_poll(s) if decision.kind in ("continue", "hold") else None,
    )


def _deletes(s: JobState, decision: Decision, attempt: int) -> Iterable[Delete]:
    """Yield deletions of pods that must not run, and of ended pods older than the previous attempt.

    Ended pods of the previous attempt are kept, with their logs.
    """
    if decision.kind == "hold":
        return
    stops_all = decision.kind in ("suspend", "succeed", "fail") or s.job.spec.suspend
    for pod in s.pods:
        if pod.deleting:
            continue
        is_old = pod.stopped and pod.attempt < attempt - 1
        if is_old or (pod.holds_resources and (stops_all or pod.attempt < attempt)):
            yield pod.deletion()


def _creates(s: JobState, decision: Decision, attempt: int) -> tuple[tuple[Create, ...], ...]:
    """Return the phases of creation: the claim, then the Service together with the pods.

    A pod created before its claim waits for a retry of the scheduler. The Service exists long before a container
    resolves a name, so a phase of its own would only delay the pods.
    """
    begins = decision.begins_attempt
    if not (begins or decision.kind == "continue") or s.job.spec.suspend or not attempt:
        return ()
    node_ranks = s.job.node_ranks if begins else s.missing_node_ranks
    service = (desired_service(s.job),) if s.observed.service is None else ()
    # The first attempt requests the claim even if it is cached: claims are not watched, and the user may have deleted
    # it together with an earlier job of this name.
    claim = desired_claim(s.job) if s.observed.claim is None or decision.kind == "start" else None
    pods = desired_pods(s.job, attempt, s.settings) if node_ranks else ()
    phases = ((claim,) if claim is not None else (), (*service, *(pods[node_rank] for node_rank in node_ranks)))
    return tuple(phase for phase in phases if phase)


def _plan_finished(s: JobState) -> Plan:
    """Return the plan for a finished job: stop pods that still run, and delete the job when its TTL has passed."""
    stops = tuple(pod.deletion() for pod in s.pods if pod.holds_resources)
    generation = {"observedGeneration": s.job.generation}
    status = dict(s.before) | generation if s.before.get("observedGeneration") != s.job.generation else None
    ttl = s.job.spec.ttl_seconds_after_finished
    if ttl is None or not s.settings.delete_finished:
        return Plan(status=status, deletes=stops)
    left = ttl - seconds_between(s.before["completionTime"], s.now)
    if left > 0:
        return Plan(status=status, deletes=stops, requeue_after=left)
    return Plan(deletes=(Delete(names.DDPJOBS, s.job.name, s.job.uid),))


def _refuse(body: Json, lines: list[str], now: datetime) -> Plan:
    before = body.get("status") or {}
    if is_true(before, "Finished"):
        return Plan()  # a finished job stays finished, even if another version of the operator refuses its spec
    generation = int(body["metadata"].get("generation", 1))
    status = invalid_status(before, generation, lines, now)
    if status == before:
        return Plan()
    return Plan(status=status, urgent=True, events=(Note("Warning", "InvalidSpec", "; ".join(lines)),))


def _deadline(s: JobState) -> float | None:
    limit = s.job.spec.active_deadline_seconds
    return None if limit is None else max(limit - s.active_seconds, 0.0)


def _poll(s: JobState) -> tuple[str, str, int] | None:
    pod = s.current.get(0)
    if pod is None or pod.state != "running" or pod.deleting or not pod.ip:
        return None
    return pod.name, pod.ip, s.job.spec.rendezvous.progress_port
