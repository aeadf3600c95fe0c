"""Send the requests of a plan when their time has come: not at once again what was refused, or undone by others."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json
from ddpjob.api.pod_view import PodView
from ddpjob.engine.actions import Plan, Problem
from ddpjob.engine.attempt import MAX_RETRY_SECONDS, retry_seconds
from ddpjob_operator.cluster.job_json import labels_in_use
from ddpjob_operator.controller.apply import Executor, Outcome
from ddpjob_operator.controller.refused_jobs import RefusedJobs
from ddpjob_operator.controller.workqueue import WorkQueue

_REPAIRED = frozenset({names.SERVICES, names.NETWORK_POLICIES})


@dataclass
class Creates:
    """Which creates of the pods of an attempt this process has sent.

    begun, complete: number of the last attempt whose creates began, and of the last whose creates all had success.
    names: of the pods of the attempt ``begun`` that were created, or were seen after a create without response.
    """

    begun: int = 0
    complete: int = 0
    names: frozenset[str] = frozenset()

    def see(self, attempt: int, pods: Sequence[PodView]) -> None:
        """Take the cached pods: a create whose response was lost may have had success."""
        if self.begun == attempt != self.complete:
            self.names |= {pod.name for pod in pods if pod.attempt == attempt}

    def begin(self, attempt: int) -> None:
        """Note that the creates of an attempt are sent from now on."""
        self.names = self.names if self.begun == attempt else frozenset()
        self.begun = attempt

    def round(self, attempt: int) -> Literal["unknown", "begun", "complete"]:
        """Return ``Observed.round`` of an attempt."""
        return "complete" if self.complete == attempt else "begun" if self.begun == attempt else "unknown"


@dataclass
class Sent:
    """What is known of the requests of one job.

    problems: the creates and deletes that failed last time. refusals: how many times in a row requests were refused.
    hold_until: monotonic time before which none is sent again.
    edition: generation and labels of the job when requests were last sent.
    may_try: the creates that were refused are sent again without a delay (``refused_jobs``).
    repairs: how many times in a row Service or policy was repaired. repair_after: when the next may follow.
    """

    creates: Creates = field(default_factory=Creates)
    problems: tuple[Problem, ...] = ()
    refusals: int = 0
    hold_until: float = 0.0
    edition: tuple[int, Json] | None = None
    may_try: bool = False
    repairs: int = 0
    repair_after: float = float("-inf")


class Sender:
    """Carries out plans with the executor. clock: monotonic seconds."""

    def __init__(
        self, executor: Executor, queue: WorkQueue, refused_jobs: RefusedJobs, clock: Callable[[], float]
    ) -> None:
        self._executor, self._queue, self._refused_jobs, self._clock = executor, queue, refused_jobs, clock

    def without_early_repair(self, key: Key, plan: Plan, sent: Sent) -> Plan:
        """Return the plan without a repair that would follow the last one too soon.

        An admission webhook, another program or a second operator may undo each repair.
        """
        wait = sent.repair_after - self._clock()
        if wait <= 0 or not _repairs(plan):
            return plan
        self._queue.add_after(key, wait)
        return replace(plan, changes=tuple(change for change in plan.changes if change.resource not in _REPAIRED))

    async def act(self, key: Key, job: Json, plan: Plan, sent: Sent) -> Outcome | None:
        """Delete and create; return None if nothing is to do, or not before the delay after the last refusal."""
        if not (plan.deletes or plan.changes or plan.creates):
            if sent.problems:  # this plan has shown them, and nothing is left that could be refused
                sent.problems = ()
                self._queue.add(key)
            return None
        meta = job["metadata"]
        edition = meta.get("generation", 0), labels_in_use(meta.get("labels") or {})  # a queue is part of no spec
        if edition != sent.edition or plan.urgent:
            sent.refusals, sent.hold_until = 0, 0.0
            sent.edition = edition
        if (wait := sent.hold_until - self._clock()) > 0:
            self._queue.add_after(key, wait)
            return None
        number, was_let_try = plan.creates_attempt, sent.may_try
        if number is not None:
            sent.may_try = False
            sent.creates.begin(number)
            sent.problems = ()
        try:
            outcome = await self._executor.act(job, plan)
        except BaseException:
            sent.creates.begun = 0  # the effect is not known, as after a restart of the operator
            raise
        if _repairs(plan) and not outcome.problems:  # a refused one is delayed and shown as a problem, see ``settle``
            is_new = self._clock() - sent.repair_after > MAX_RETRY_SECONDS
            sent.repairs = 1 if is_new else sent.repairs + 1
            sent.repair_after = self._clock() + retry_seconds(sent.repairs)
        sent.creates.names |= outcome.created
        if number is not None and not outcome.failed_creates and not outcome.namespace_gone:
            sent.creates.complete, sent.creates.names = number, frozenset()
            if was_let_try:
                self._refused_jobs.let_try(key.namespace)
        return outcome

    def settle(self, key: Key, outcome: Outcome | None, sent: Sent) -> None:
        """Plan again at once after problems or the last create; what was refused is sent again with growing delay."""
        self._queue.forget(key)
        if outcome is None:
            return
        # Each event of a pod that ends in a namespace that is being deleted would otherwise cause creates.
        if outcome.problems or outcome.namespace_gone:
            sent.refusals = 1 if outcome.created else sent.refusals + 1
            delay = retry_seconds(sent.refusals) * random.uniform(0.75, 1.0)  # noqa: S311
            delay = max(delay, outcome.retry_after)
            sent.hold_until = self._clock() + delay
            self._queue.add_after(key, delay)
        else:
            sent.refusals = 0
        if (problems := tuple(outcome.problems)) != sent.problems:
            sent.problems = problems
            self._queue.add(key)


def _repairs(plan: Plan) -> bool:
    """Return whether a plan restores the Service or the NetworkPolicy."""
    return any(change.resource in _REPAIRED for change in plan.changes)
