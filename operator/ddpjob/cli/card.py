"""The facts about one job that all views show, and the card of ``ddpjob get JOB``: a job and the time to text.

Text of a job or of its trainer passes through ``one_line``. Only what is abnormal is in colour.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from ddpjob.api.names import CONTROLLER
from ddpjob.api.objects import Json
from ddpjob.api.status import Condition, DDPJobStatus, Failure
from ddpjob.api.text import attributed
from ddpjob.api.times import parse_time, seconds_between
from ddpjob.cli.text import accuracy_text, duration, number_of, one_line, red, speed_text, time_text
from ddpjob.client.base import INTERRUPTED
from ddpjob.client.job import DDPJob

if TYPE_CHECKING:
    from ddpjob.client.timeline import JobPod

ABNORMAL_STATES = frozenset({"Ending", "Restarting", "Failed", "Invalid", INTERRUPTED})
"""States that need attention, or do not last."""
_ORDINARY = frozenset(
    {"AllNodesRunning", "Started", "Resumed", "Retried", "Starting", "WaitingForScheduler", "ContainerCreating"}
)
"""Reasons of the condition Running that every start has."""
_INDENT = 16  # columns of a label


class Fact(NamedTuple):
    """One line of a card. Without a label it belongs to the fact above it."""

    label: str
    text: str
    is_abnormal: bool = False


def card_lines(first: Fact, facts: Iterable[Fact], *, width: int, coloured: bool) -> Iterator[str]:
    """Yield the headline and the facts as lines of at most ``width`` columns."""
    for part in textwrap.wrap(one_line(first.text), width):
        yield red(part) if first.is_abnormal and coloured else part
    for fact in facts:
        label = f"  {fact.label:<{_INDENT - 2}}"
        for number, part in enumerate(textwrap.wrap(one_line(fact.text), max(width - _INDENT, 20))):
            text = red(part) if fact.is_abnormal and coloured else part
            yield (label if number == 0 else " " * _INDENT) + text


def headline(job: DDPJob, now: datetime) -> Fact:
    """Return the state of the job in a sentence."""
    return Fact("", sentence(job, now), is_abnormal(job))


def sentence(job: DDPJob, now: datetime) -> str:
    """Return the state of the job: since when, and why."""
    found = _deciding(job)
    if job.state == INTERRUPTED:
        return f"{job.name} is Interrupted: no process of this machine runs it; ddpjob resume {job.name} continues it"
    if found is None:
        manager = (job.manifest.get("spec") or {}).get("managedBy")
        is_left_alone = manager not in (None, CONTROLLER)
        why = f"it is managed by {manager}" if is_left_alone else "the operator has not reported on it yet"
        return one_line(f"{job.name} is {job.state}: {why}")
    past = _past(found.last_transition_time, now)
    state = f"{job.state.lower()} {past} ago" if job.finished else f"is {job.state} for {past}"
    return f"{job.name} {state}: {one_line(found.message) or found.reason}"


def is_abnormal(job: DDPJob) -> bool:
    """Return whether the job needs attention, or its state does not last."""
    found = _deciding(job)
    if job.state in ABNORMAL_STATES:
        return True
    return found is not None and found.type in ("Running", "Stalled") and found.reason not in _ORDINARY


def facts_of(job: DDPJob, now: datetime) -> Iterator[Fact]:
    """Yield what is known of the job."""
    status = job.status
    yield from _nodes(status)
    if progress := progress_facts(status):
        age = _past(status.progress.last_heartbeat_time, now) if status.progress else ""
        last = [f"reported {age} ago"] if age and not job.finished else []
        yield Fact("progress", ", ".join([*progress, *last]))
    yield from (Fact("", text, is_abnormal=True) for text in troubles(job, now))
    yield from attempts(job, now)
    if status.failures:
        yield from _failure(status.failures[-1], now, is_abnormal=job.state in ABNORMAL_STATES)
    if saved := status.checkpoint:
        origin = f", resumed from step {saved.resumed_from_step}" if saved.resumed_from_step is not None else ""
        yield Fact("checkpoint", f"step {saved.step}, {_past(saved.time, now)} ago: {saved.path}{origin}")
    if spent := time_spent(job, now):
        yield Fact("time", spent)


def progress_facts(status: DDPJobStatus) -> list[str]:
    """Return what rank 0 has reported of the training, one fact per entry; none if the program reports nothing."""
    if (now := status.progress) is None:
        return []
    speed = f"{now.steps_per_second} steps/s" if now.steps_per_second else ""
    speed = speed_text(now.samples_per_second) if now.samples_per_second else speed
    if now.step is None or not (now.total_steps or now.percent):
        facts = [f"step {now.step}", speed] if now.step else [now.phase or ""]
    else:
        steps = f"step {now.step}/{now.total_steps}" if now.total_steps else f"step {now.step}"
        epochs = f"epoch {now.epoch}/{now.total_epochs}" if now.total_epochs else f"epoch {now.epoch}"
        facts = [
            epochs if now.epoch else "",
            steps + (f" ({now.percent} %)" if now.percent else ""),
            f"loss {now.loss}" if now.loss else "",
            f"accuracy {accuracy_text(now.accuracy)}" if now.accuracy else "",
            speed,
            f"{duration(now.eta_seconds)} left" if now.eta_seconds else "",
        ]
    return [one_line(fact) for fact in facts if fact]


def troubles(job: DDPJob, now: datetime) -> list[str]:
    """Return that the ranks have made no step for much longer than before, and for which of them the others wait."""
    status = job.status
    slow = status.slow.text() if status.slow else ""
    diverged = status.diverged.text() if status.diverged else ""
    pause = status.pause.text(now) if status.pause and job.state == "Running" else ""
    return [one_line(text) for text in (pause, status.stall.text() if status.stall else "", diverged, slow) if text]


def pod_state(pod: "JobPod") -> str:
    """Return what the trainer of a pod does."""
    return f"{pod.state}, deleting" if pod.deleting else pod.state


def pod_text(pod: "JobPod", *, with_end: bool = True) -> str:
    """Return why a pod waits or how it ended. with_end: also with what the trainer that failed says."""
    end = f"exit code {pod.exit_code}" if pod.exit_code else ""
    message = pod.message if with_end or pod.state == "pending" else ""
    why = ": ".join(part for part in (pod.reason, message) if part) if pod.state != "succeeded" else ""
    return one_line(", ".join(part for part in (end, why) if part))


def restarts_text(job: DDPJob) -> str:
    """Return how often the job was restarted, and how many restarts it has left; empty if it never was."""
    from ddpjob.api.restarts import RestartPolicy  # ``ddpjob get`` without a name needs no model of the spec

    status = job.status
    if not status.restarts:
        return ""
    in_place = f"{status.restarts_in_place} in place, " if status.restarts_in_place else ""
    counted = status.restarts_counted_towards_limit or 0
    given = ((job.manifest.get("spec") or {}).get("restartPolicy") or {}).get("maxRestarts")
    policy = RestartPolicy(max_restarts=given)
    most = policy.limit(has_trained=status.has_trained)
    most = most if counted <= most else policy.limit(has_trained=True)  # a service was away before it trained
    return f"{number_of(status.restarts, 'restart')} ({in_place}{counted} of at most {most} counted)"


def time_spent(job: DDPJob, now: datetime) -> str:
    """Return where the time of the job went until now, of an interrupted run until its last sign of life."""
    spent = job.status.time
    if spent is not None and job.state != INTERRUPTED:
        spent = spent.at(now)
    return time_text(spent) if spent is not None and spent.total else ""


def _deciding(job: DDPJob) -> Condition | None:
    """Return the condition that says why the job is in its state; None before the operator has seen it."""
    by_type = {condition.type: condition for condition in job.status.conditions or ()}
    for kind in ("Failed", "Succeeded", "Suspended", "Stalled", "Restarting"):
        if (found := by_type.get(kind)) is not None and found.status == "True":
            return found
    return by_type.get("Running")


def _nodes(status: DDPJobStatus) -> Iterator[Fact]:
    parts = [f"{status.nodes_ready} run or have succeeded"] if status.nodes_ready else []
    failed = status.nodes.failed if status.nodes else 0
    parts += [f"{failed} failed"] if failed else []
    if world := status.world:
        parts.append(f"{number_of(world.world_size, 'rank')}, {world.nproc_per_node} per node")
    if parts:
        yield Fact("nodes", ", ".join(parts), bool(failed))
    for node in status.avoid_nodes or ():
        yield Fact("", f"avoids Kubernetes node {node.node_name} ({node.why}) until {node.until}")


def attempts(job: DDPJob, now: datetime) -> Iterator[Fact]:
    """Yield the attempts as a timeline: those that failed, as far as the status has them, and the current one."""
    status, label = job.status, "attempts"
    failures = status.failures or []
    # The begin of an attempt is the decision on the one before, and only the last failures are recorded.
    began = status.start_time if failures and failures[0].attempt == 1 else None
    for failure in failures:
        lasted = f" after {_past(began, failure.time)}" if began else ""
        what = f"{failure.attempt}: {_who(failure)}{failure.reason}, {_past(failure.time, now)} ago{lasted}"
        free = "" if failure.counted or failure.action == "Fail" else ", not counted"
        yield Fact(label, f"{what} → {failure.action}{free}")
        label, began = "", failure.time
    current = status.current_attempt
    recorded = {failure.attempt for failure in failures}
    if current is not None and current.number and current.number not in recorded:
        yield Fact(label, f"{current.number}: {_course(job, now)}")
        label = ""
        for life in (current.in_place.failures if current.in_place else None) or ():
            took = f", recovered in {life.recovery_milliseconds / 1000:.1f} s" if life.recovery_milliseconds else ""
            rank = f" on rank {life.rank}" if life.rank is not None else ""
            yield Fact("", f"life {life.life}: {life.reason}{rank}{took} → in place")
    if text := restarts_text(job):
        yield Fact(label, text)


def _course(job: DDPJob, now: datetime) -> str:
    current, status = job.status.current_attempt, job.status
    if current is None:
        return ""
    end = status.completion_time or (current.ending.since if current.ending else None)
    parts = [f"began {_past(current.start_time, now)} ago"]
    for what, time in (("all nodes ran", current.all_running_time), ("first step", current.first_step_time)):
        if time:
            parts.append(f"{what} after {_past(current.start_time, time)}")
    if end:
        verdict = f": {current.verdict}" if current.verdict else ""
        parts.append(f"ended after {_past(current.start_time, end)}{verdict}")
    elif current.phase:
        parts.append(current.phase.lower())
    return ", ".join(parts)


def _failure(failure: Failure, now: datetime, *, is_abnormal: bool) -> Iterator[Fact]:
    message = failure.message.partition("\n")[0]
    where = f" at {failure.where}" if failure.where and failure.where not in message else ""
    yield Fact("last failure", f"{failure.reason}: {message}{where} ({_past(failure.time, now)} ago)", is_abnormal)
    for name, advice in (("hint", failure.hint), ("next", failure.next)):
        if advice:
            yield Fact("", f"{name}: {attributed(name, advice, failure.from_program)}")


def _who(failure: Failure) -> str:
    rank = f"r{failure.rank}" if failure.rank is not None else ""
    return f"n{failure.node_rank}{rank} " if failure.node_rank is not None else ""


def _past(start: str | None, end: datetime | str) -> str:
    """Return the time between two moments; empty if the first is not known."""
    if start is None:
        return ""
    return duration(seconds_between(start, parse_time(end) if isinstance(end, str) else end))


class Moment(NamedTuple):
    """A job at one moment, and the pods of its attempt."""

    job: DDPJob
    pods: "list[JobPod]"

    @property
    def state(self) -> str:
        return one_line(self.job.state)

    @property
    def news(self) -> str:
        """Why the job does not run as usual; empty while it does, and at its end, which has a text of its own."""
        found = _deciding(self.job)
        if found is None or found.type in ("Failed", "Succeeded", "Suspended"):
            return ""
        is_usual = found.type == "Running" and found.status == "True" and found.reason in _ORDINARY
        return "" if is_usual else one_line(found.message)

    def job_facts(self) -> list[str]:
        """Return what is known about the job's pods, one fact per entry."""
        status = self.job.status
        facts = [
            f"nodes {status.nodes_ready or '0/' + str(self.job.manifest['spec']['numNodes'])}",
            number_of(status.world.world_size, "rank") if status.world else "",
            f"attempt {status.attempt}" if (status.attempt or 0) > 1 else "",
            restarts_text(self.job),
        ]
        return [one_line(fact) for fact in facts if fact]

    def training_facts(self) -> list[str]:
        """Return the progress of the training, one fact per entry; none if the program reports no progress."""
        status, facts = self.job.status, []
        if saved := status.checkpoint:
            facts.append(f"checkpoint of step {saved.step}")
            facts += [f"resumed from step {saved.resumed_from_step}"] if saved.resumed_from_step is not None else []
        return [*progress_facts(status), *facts, *troubles(self.job, datetime.now(UTC))]


def moment_of(job: DDPJob, pods: Sequence[Json]) -> Moment:
    """Return the moment of an admitted job and its pods."""
    from ddpjob.client.timeline import job_pods  # ``ddpjob get`` needs no model of pods

    return Moment(job, [pod for pod in job_pods(pods) if pod.attempt == (job.status.attempt or 0)])
