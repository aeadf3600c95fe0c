"""The state of a job: spec, recorded status and observed objects, with the properties that decisions use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from math import isinf

from ddpjob.api import names
from ddpjob.api.limits import MAX_DIGITS
from ddpjob.api.pod_view import PodView
from ddpjob.api.report import Divergence, Slow, TrainingReport
from ddpjob.api.status import LONG_RUN_SECONDS, CurrentAttempt, DDPJobStatus, Failure, InPlace, RefusedStart
from ddpjob.api.times import parse_time, seconds_between, seconds_since, since, timestamp
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.attempt import (
    DELETING,
    DRAIN_MARGIN_SECONDS,
    EVICTED,
    SUSPENDED,
    recorded_attempt,
    seconds_running,
    seconds_to_stop,
    whole_second_after,
)
from ddpjob.engine.desired import Job, is_comparable
from ddpjob.engine.evidence import is_on_lost_node, is_refused, needs_log
from ddpjob.engine.inplace import fold, spent
from ddpjob.engine.observed import Observed

MAX_UNKNOWN_ATTEMPTS = 1000
"""How many attempts may have followed the recorded one, if the status was restored from a backup."""
MAX_ATTEMPT = 10**MAX_DIGITS // 2
"""The highest number that is an attempt's, if the status was deleted: the names of later ones must not get longer."""
TRAINED_SECONDS = 60
"""A program that reports no steps has trained when all its pods have run for so long: wrong settings end it earlier."""
RUN_SECONDS = 600
"""A program that reports neither steps nor checkpoints has made progress in an attempt that ran for so long, for
maxRestarts, so that a job survives two outages within an hour. For all other limits it is ``LONG_RUN_SECONDS``, so that
a job ends that fails every half an hour."""

MAX_LOGS = 16
"""How many logs are read to find the cause of one failure; those of the pods that ended first."""


@dataclass(frozen=True)
class JobState:
    """All inputs of a plan. ``before`` is the recorded status; its conditions are never read, they are only output.

    labels: of the job, as far as plans read them (``names.LABELS_OF_QUEUES``).
    finalizers: what keeps a deleted job in the API server; empty if it is not deleted. Until the job is gone, the
        garbage collector deletes none of its pods: it is planned as suspended.
    """

    job: Job
    before: DDPJobStatus
    observed: Observed
    now: datetime
    settings: EngineSettings
    labels: Mapping[str, str] = field(default_factory=dict)
    finalizers: Sequence[str] = ()

    @cached_property
    def pods(self) -> Sequence[PodView]:
        """The pods of all attempts."""
        return [pod for pod in self.observed.pods if not pod.is_probe]

    @cached_property
    def attempt(self) -> CurrentAttempt:
        """The recorded attempt; its number is 0 before the first attempt."""
        return recorded_attempt(self.before, self.now)

    @cached_property
    def current(self) -> dict[int, PodView]:
        """Pods of the recorded attempt by node_rank, with what their logs say."""
        ranks, logs = self.job.node_ranks, self.observed.logs  # a user may have changed a label
        pods = (pod for pod in self.pods if pod.attempt == self.attempt.number and pod.node_rank in ranks)
        return {pod.node_rank: replace(pod, logged=logs[pod.uid]) if logs.get(pod.uid) else pod for pod in pods}

    @cached_property
    def unread_logs(self) -> list[PodView]:
        """Failed pods of this attempt whose logs may show the cause and are to be read."""
        if not self.settings.reads_logs:
            return []
        needed = sorted(filter(needs_log, self.current.values()), key=lambda p: (p.finished_at or "~", p.node_rank))
        left = max(0, MAX_LOGS - len(self.observed.logs))
        return [pod for pod in needed if pod.uid not in self.observed.logs][:left]

    @cached_property
    def succeeded_nodes(self) -> frozenset[int]:
        """node_ranks of this attempt that exited with 0, including those whose pods no longer exist."""
        ended = {node_rank: pod for node_rank, pod in self.current.items() if pod.state == "succeeded"}
        # Exit code 0 then answers the operator's own SIGTERM, unless the launcher says that the training had ended.
        if self.attempt.is_closed:
            ended = {rank: pod for rank, pod in ended.items() if pod.report is not None and pod.report.before_stop}
        return frozenset(self.before.succeeded_nodes or ()) | ended.keys()

    @cached_property
    def newest_attempt(self) -> int:
        """Highest attempt of any pod of the job; a number far above the recorded one is no attempt's."""
        limit = self.attempt.number + MAX_UNKNOWN_ATTEMPTS if self.attempt.number else MAX_ATTEMPT
        return max((pod.attempt for pod in self.pods if pod.attempt <= limit), default=0)

    @cached_property
    def number_of_next(self) -> int:
        """The number of the attempt that would start now.

        If a user deleted the status, pods may have a higher number; their names must not be used again. Pods of attempt
        1 are adopted, because they may have been created beside the status that records them: if all run, or none
        started.
        """
        all_exist = {pod.node_rank for pod in self.pods}.issuperset(self.job.node_ranks)
        usable = all(not (pod.ended or pod.deleting) and (all_exist or pod.state == "pending") for pod in self.pods)
        if self.attempt.number == 0 and self.newest_attempt == 1 and usable:
            return 1
        return max(self.attempt.number, self.newest_attempt) + 1

    @cached_property
    def missing_nodes(self) -> list[int]:
        """node_ranks that have no pod and have not succeeded.

        After all pods ran, a pod that has not started does not prove that the pod that ran still exists: a delayed
        create can add it after that pod was lost. The peers do not accept it. A pod that is older ran, and its kubelet
        shows it as Pending for a moment, for example after its restart.
        """
        ran = self.attempt.all_running_time
        done = self.succeeded_nodes | {
            node_rank
            for node_rank, pod in self.current.items()
            if not pod.unstarted
            or ran is None
            or (pod.created is not None and parse_time(pod.created) <= parse_time(ran))
        }
        return [node_rank for node_rank in self.job.node_ranks if node_rank not in done]

    @property
    def all_stopped(self) -> bool:
        """Whether no pod of this attempt can report a failure any more: it ended, is being deleted, or is gone."""
        return all(pod.ended or pod.deleting for pod in self.current.values())

    @cached_property
    def reports_fenced(self) -> bool:
        """Whether a launcher of this attempt has reported that its program is fenced."""
        if self.attempt.fenced or (self.answer is not None and self.answer.fenced):
            return True
        return any(pod.report is not None and pod.report.fenced for pod in self.current.values())

    @cached_property
    def may_overwrite(self) -> bool:
        """Whether two attempts at a time could write the same files: in local mode, any of this machine.

        An older attempt of a fenced program cannot: fenced by the spec, or else as its launcher reports.
        """
        checkpoint = self.job.spec.checkpoint
        given = checkpoint.fenced if checkpoint is not None else None
        is_fenced = self.reports_fenced if given is None else given
        return (self.job.writes_volume or self.settings.is_local) and not is_fenced

    def may_save(self, pod: PodView) -> bool:
        """Whether the next attempt waits for the end of a pod of an earlier one, if it waits for any.

        A Kubernetes node that does not respond may only have lost the API server: its pods run on, and may save.
        """
        return self.may_overwrite or not is_on_lost_node(pod)

    @property
    def drain_until(self) -> str | None:
        """Until when the running pods may write after SIGTERM, if they keep the job's grace; None if none runs."""
        if not any(self.may_save(pod) for pod in self.pods if not pod.ended):
            return None
        return whole_second_after(self.now, self.job.grace_seconds + DRAIN_MARGIN_SECONDS)

    @cached_property
    def stopping(self) -> Sequence[tuple[float, PodView]]:
        """The pods that the next attempt waits for, each with the seconds left (``seconds_to_stop``), the most first.

        They may save what it reads, after a planned loss, or write over what it saves. The first attempt waits for the
        pods of other jobs. A planned loss waits no longer for a pod that is not deleted than for one that is.
        """
        ending, number = self.attempt.ending, self.attempt.number
        if not number:
            former = () if self.pods else self.observed.former
            waits = [(seconds_to_stop(pod, self.now), pod) for pod in former]
        elif ending is None or not self.attempt.is_closed or not (ending.drain_until or self.may_overwrite):
            return []
        else:
            waits = [(seconds_to_stop(pod, self.now), pod) for pod in self.pods if self.may_save(pod)]
            if ending.drain_until is not None and not self.may_overwrite:
                longest = max(-seconds_since(ending.drain_until, self.now), 0.0)
                waits = [(longest if isinf(left) else left, pod) for left, pod in waits]
        return sorted((wait for wait in waits if wait[0] > 0), key=lambda wait: (-wait[0], wait[1].name))

    @cached_property
    def refused_start(self) -> RefusedStart | None:
        """A container of this attempt that the kubelet does not start, with the time when the operator first saw it.

        The operator's clock decides, because the clock of the pod's Kubernetes node may be wrong.
        """
        pods = sorted(self.current.items())
        refused = {node_rank: pod.waiting[0] for node_rank, pod in pods if pod.waiting and is_refused(pod)}
        known = self.attempt.refused_start
        is_same = known is not None and refused.get(known.node_rank) == known.reason
        if is_same and known is not None and seconds_since(known.since, self.now) >= 0:
            return known
        first = next(iter(refused.items()), None)
        return RefusedStart(node_rank=first[0], reason=first[1], since=timestamp(self.now)) if first else None

    @cached_property
    def room_since(self) -> str | None:
        """Since when no pod of an earlier attempt uses resources for which this one may wait; None while one does.

        A pod that hangs counts up to its deletion deadline, and one on a lost Kubernetes node not at all.
        """
        start, number = self.attempt.start_time, self.attempt.number
        earlier = [pod for pod in self.pods if pod.attempt < number and not is_on_lost_node(pod)]
        if any(seconds_to_stop(pod, self.now) > 0 for pod in earlier):
            return None
        return since(self.attempt.room_since or (start if number <= 1 else None), self.now)

    @cached_property
    def partial_since(self) -> str | None:
        """When the operator first saw that some pods of this attempt have a Kubernetes node, and others do not.

        None if that is not so now, after all pods ran, or while pods of an earlier attempt use resources. By the
        operator's clock; after it was set back, from now on.
        """
        if self.attempt.is_closed or self.attempt.all_running_time is not None or self.room_since is None:
            return None
        placed = {pod.node_name is not None for pod in self.current.values() if not pod.ended}
        if placed != {True, False}:
            return None
        return since(self.attempt.partial_since, self.now)

    @property
    def answer(self) -> TrainingReport | None:
        """The last response of rank 0's pod; a response of a pod of an earlier attempt may arrive late: ignored."""
        pod = self.current.get(0)
        return self.observed.progress.report if pod is not None and self.observed.progress.pod == pod.name else None

    @cached_property
    def slow(self) -> Slow | None:
        """The slow rank that the launcher of node 0 reports; None if it reports none, or does not report any more.

        The recorded one until the first answer to an operator that has just started.
        """
        known = self.before.slow
        if self.observed.progress.problem is not None:
            return None
        found = self.answer.slow if self.answer is not None else None
        if known is not None and self._has_no_answer_yet:
            found = Slow(rank=known.rank, part=known.part, message=f"slow: {known.text()}")
        return found if found is not None and found.rank is not None else None

    @cached_property
    def diverged(self) -> Divergence | None:
        """What the launcher of node 0 reports of parameters that differ between the ranks; else as ``slow``."""
        known = self.before.diverged
        if self.observed.progress.problem is not None:
            return None
        found = self.answer.diverged if self.answer is not None else None
        if known is not None and self._has_no_answer_yet:
            found = Divergence(
                step=known.step, agreed_step=known.agreed_step, rank=known.rank, tensor=known.tensor,
                cause=known.cause, message=f"replicas diverged: {known.text()}",
            )  # fmt: skip
        return found if found is not None and found.step is not None else None

    @property
    def _has_no_answer_yet(self) -> bool:
        pod = self.current.get(0)
        return self.answer is None and pod is not None and pod.state == "running"

    @cached_property
    def report(self) -> TrainingReport | None:
        """What rank 0 of the current attempt reported last; None if it does not report, or its attempt has ended."""
        pod = self.current.get(0)
        if pod is None or self.attempt.is_closed:
            return None
        if pod.ended:
            return pod.report.progress if pod.report else None
        return self.answer

    @cached_property
    def in_place(self) -> InPlace | None:
        """The attempt's restarts in place with what node 0 reports now; None if none were granted."""
        found, pod = self.attempt.in_place, self.current.get(0)
        for report in (self.report, pod.report if pod else None):
            if found is not None and report is not None:
                found = fold(found, report)
        return found

    @cached_property
    def new_lives(self) -> int:
        """How many restarts in place node 0 reports that the status does not have."""
        return spent(self.in_place) - spent(self.attempt.in_place)

    @property
    def has_stepped(self) -> bool:
        """Whether rank 0 reported a step that this attempt trained."""
        if self.attempt.first_step_time is not None:
            return True
        if self.answer is None or self.answer.step is None:
            return False
        resumed = self.answer.resumed_from
        return self.answer.step > ((resumed.step if resumed else None) or 0)

    @property
    def has_trained(self) -> bool:
        """Whether an attempt of the job made a step, saved a checkpoint, or ran with all its pods for long enough.

        Then a failure to start says something about a Kubernetes node or a service, and not about the spec. A program
        that reports step 0 still prepares its training, for example loads the data.
        """
        if self.before.has_trained or self.has_stepped:
            return True
        known = self.answer or self.before.progress
        limit = LONG_RUN_SECONDS if known is not None and known.step == 0 else TRAINED_SECONDS
        return seconds_running(self.attempt, self.now) >= limit

    @property
    def is_proved(self) -> bool:
        """Whether the same error twice may have two causes. A program that reports nothing has to train for an hour."""
        is_silent = self.before.progress is None and self.answer is None
        trained = self.before.time.training if self.before.time is not None else 0
        ran = max(float(trained), seconds_running(self.attempt, self.now))
        return self.has_trained and not (is_silent and ran < LONG_RUN_SECONDS)

    def logs_command(self, node_rank: int = 0, attempt: int | None = None) -> str:
        """Return the command that shows the log of a node, by default of the current attempt."""
        job, number = self.job, self.attempt.number if attempt is None else attempt
        pod = self.pod_name(node_rank, number)
        return self.settings.logs_command.format(
            namespace=job.namespace, job=job.name, attempt=number, node_rank=node_rank, pod=pod
        )

    def pod_name(self, node_rank: int, attempt: int | None = None) -> str:
        """Return the name of a node's pod, by default of the current attempt."""
        number = self.attempt.number if attempt is None else attempt
        return names.pod_name(self.job.name, self.job.uid, number, node_rank)

    @property
    def finished(self) -> bool:
        return self.before.completion_time is not None

    @property
    def suspended(self) -> bool:
        """Whether no pod runs because of a suspension."""
        if self.attempt.number == 0:
            return self.job.spec.suspend
        return self.attempt.verdict == SUSPENDED

    @property
    def suspension(self) -> tuple[str, str]:
        """Reason and message of a suspension."""
        if not self.finalizers:
            return SUSPENDED, "spec.suspend is true"
        return DELETING, f"the job was deleted, and is kept by the finalizer {', '.join(self.finalizers)}"

    @property
    def spec_edited(self) -> bool:
        """Whether the spec changed since the last status."""
        return self.before.observed_generation != self.job.generation

    @property
    def spec_changed(self) -> bool:
        """Whether an immutable part of the spec changed, which CEL rules cannot detect in the whole template."""
        return is_comparable(self.before.spec_hash) and self.before.spec_hash != self.job.spec_hash

    @property
    def earlier_failures(self) -> Sequence[Failure]:
        """``status.failures``, newest last."""
        return self.before.failures or ()

    @property
    def active_seconds(self) -> float:
        """Seconds that the job was active: all attempts, without suspensions and the waits of an evicted job."""
        earlier = float(self.before.active_seconds or 0)
        if self.suspended or not self.attempt.number or self.attempt.verdict == EVICTED:
            return earlier
        return earlier + seconds_between(self.attempt.start_time, self.now)
