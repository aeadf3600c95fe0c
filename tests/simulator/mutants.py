"""Errors that the simulator must detect: each is a change of the engine or the controller while it is applied.

A mutant replaces a function or method of the live modules, so it needs no copy of the code. The runs of a mutant are
those that may detect it, the most likely first.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from ddpjob.api import names
from ddpjob.cluster.memory.server import MemoryCluster
from ddpjob.controller import reconcile
from ddpjob.controller.apply import Executor
from ddpjob.controller.reconcile import Reconciler
from ddpjob.controller.sweep import Sweeper
from ddpjob.engine import budget, decision, plan, status
from ddpjob.engine.actions import Plan
from tests.simulator.faults import CRASHES, At
from tests.simulator.runs import RANDOM, Run

Apply = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Mutant:
    """An error. ``apply`` puts it into the program as long as the context lasts; ``runs`` may detect it."""

    name: str
    apply: Apply
    runs: tuple[Run, ...]


MUTANTS: dict[str, Mutant] = {}


def _mutant(*runs: Run) -> Callable[[Callable[[], Iterator[None]]], Apply]:
    def register(function: Callable[[], Iterator[None]]) -> Apply:
        apply = contextmanager(function)
        name = function.__name__.strip("_").replace("_", "-")
        MUTANTS[name] = Mutant(name, apply, runs)
        return apply

    return register


def _random(number: int, first: int = 0) -> tuple[Run, ...]:
    return tuple(Run(RANDOM, seed=seed) for seed in range(first, first + number))


def _at_each_write(scenario: str, *kinds: str, writes: int = 22) -> tuple[Run, ...]:
    return tuple(Run(scenario, (At(kind, write),)) for write in range(1, writes) for kind in kinds)


def _changing_plan(change: Callable[[Plan], Plan]) -> AbstractContextManager[Any]:
    """Apply ``change`` to each plan."""
    original = reconcile.make_plan
    return mock.patch.object(reconcile, "make_plan", lambda *arguments: change(original(*arguments)))


@_mutant(Run("suspension-beside-a-failure"), *_at_each_write("rank-failure", "error"))
def _attempt_created_beside_its_record() -> Iterator[None]:
    """Create the pods of each attempt while its status is written, not only those of the first."""
    with _changing_plan(lambda plan: replace(plan, is_first=plan.creates_attempt is not None)):
        yield


@_mutant(Run("time-to-live-of-a-replaced-job"))
def _uid_precondition_dropped() -> Iterator[None]:
    """Delete by name only."""
    original = MemoryCluster.delete

    async def delete(self: Any, *arguments: Any, uid: str | None = None, **options: Any) -> Any:
        return await original(self, *arguments, **options)

    with mock.patch.object(MemoryCluster, "delete", delete):
        yield


@_mutant(Run("restarts-used-up"), *_random(60))
def _budget_derived_from_pods() -> Iterator[None]:
    """Count the earlier attempts whose pods still exist, instead of reading the counter in the status."""
    original = reconcile.make_plan

    def make_plan(job: Any, observed: Any, *more: Any) -> Plan:
        recorded = job.get("status") or {}
        attempts = {int(pod["metadata"]["labels"][names.LABEL_ATTEMPT]) for pod in observed.pods}
        earlier = {attempt for attempt in attempts if attempt < recorded.get("attempt", 0)}
        counted = {"restartsCountedTowardsLimit": len(earlier)} if recorded else {}
        return original(job | {"status": recorded | counted}, observed, *more)

    with mock.patch.object(reconcile, "make_plan", make_plan):
        yield


@_mutant(Run("refund-of-the-second-restart"))
def _restart_refunded_twice() -> Iterator[None]:
    """Refund a restart although its failure is already recorded as one that does not count."""

    def is_refundable(failure: Any, s: Any) -> bool:
        return bool(failure["attempt"] == s.attempt.number - 1)

    with mock.patch.object(budget, "_is_refundable", is_refundable):
        yield


@_mutant(Run("node-loss-noticed-late"))
def _restart_never_refunded() -> Iterator[None]:
    """Let a restart count although its node proved lost."""
    with mock.patch.object(status, "refund", lambda s: {}):
        yield


@_mutant(*(Run("rank-failure", watch="shuffled", order=order, seed=seed) for seed in range(20) for order in (0, 1)))
def _decides_from_the_cache() -> Iterator[None]:
    """Decide and delete without a LIST of the pods, though the cache may be stale."""
    original = reconcile.make_plan

    def make_plan(job: Any, observed: Any, *more: Any) -> Plan:
        plan = original(job, observed, *more)
        return original(job, replace(observed, live=True), *more) if plan.needs_live else plan

    with mock.patch.object(reconcile, "make_plan", make_plan):
        yield


@_mutant(Run("rank-failure"), Run("rank-failure", order=1), Run("out-of-memory", order=1))
def _first_pod_is_the_cause() -> Iterator[None]:
    """Blame the failed pod with the lowest node_rank, without regard to what the pods report."""
    with mock.patch.object(decision, "root_cause", lambda failed: min(failed, key=lambda pod: pod.node_rank)):
        yield


@_mutant(Run("rank-failure", order=1), Run("out-of-memory", order=1))
def _wait_for_the_cause_skipped() -> Iterator[None]:
    """Take the first report for the cause, without waiting for those of the other pods."""
    with mock.patch.object(status, "SETTLE_SECONDS", -1):
        yield


@_mutant(Run("suspension-beside-a-failure"), Run("rank-failure", watch="late-jobs"))
def _status_written_without_version() -> Iterator[None]:
    """Overwrite a status without regard to changes since it was read."""
    original = MemoryCluster.patch_status

    async def patch_status(self: Any, resource: Any, namespace: str, name: str, body: Any) -> Any:
        return await original(self, resource, namespace, name, {"status": body["status"]})

    with mock.patch.object(MemoryCluster, "patch_status", patch_status):
        yield


@_mutant(Run("suspension-beside-a-failure"), *_at_each_write("rank-failure", "conflict"))
def _acts_though_the_record_conflicted() -> Iterator[None]:
    """Delete and create although another client changed the job after the plan was made."""
    original = Reconciler._record

    async def record(self: Any, key: Any, job: Any, plan: Any, memory: Any) -> Any:
        return await original(self, key, job, plan, memory) or job

    with mock.patch.object(Reconciler, "_record", record):
        yield


@_mutant(Run("rank-failure"))
def _attempt_number_reused() -> Iterator[None]:
    """Start the next attempt under the number of the last one."""

    def number_of_next(s: Any) -> int:
        return max(s.attempt.number, 1)

    with ExitStack() as stack:
        for module in (decision, status):
            stack.enter_context(mock.patch.object(module, "number_of_next", number_of_next))
        yield


@_mutant(Run("success"), *_at_each_write("rank-failure", "crash-before"))
def _events_before_the_record() -> Iterator[None]:
    """Announce a decision before it is recorded."""
    original = Reconciler._record

    async def record(self: Any, key: Any, job: Any, plan: Any, memory: Any) -> Any:
        self._announce(job, plan)
        return await original(self, key, job, plan, memory)

    with mock.patch.object(Reconciler, "_record", record):
        yield


@_mutant(Run("node-removed-after-success"))
def _succeeded_nodes_not_recorded() -> Iterator[None]:
    """Know of a success only as long as its pod exists."""

    def forget(plan: Plan) -> Plan:
        return plan if plan.status is None else replace(plan, status=plan.status | {"succeededNodes": []})

    with _changing_plan(forget):
        yield


@_mutant(Run("node-loss"), Run("node-loss", order=1))
def _missing_pod_created_again() -> Iterator[None]:
    """Replace a lost pod within the running attempt."""
    original = reconcile.make_plan

    def make_plan(job: Any, observed: Any, *more: Any) -> Plan:
        recorded = job.get("status") or {}
        attempt = recorded.get("currentAttempt") or {}
        if attempt.get("phase") == "Running" and len(observed.pods) < job["spec"]["numNodes"]:
            recorded = recorded | {"currentAttempt": attempt | {"phase": "Creating"}}
            observed = replace(observed, round="begun")
        return original(job | {"status": recorded}, observed, *more)

    with mock.patch.object(reconcile, "make_plan", make_plan):
        yield


@_mutant(Run("name-conflict"))
def _foreign_pod_adopted() -> Iterator[None]:
    """Take any object of the right name for the job's own."""

    async def adopt(self: Any, job: Any, create: Any, problems: Any) -> None:
        meta = job["metadata"]
        self._cache.put(create.resource, await self._cluster.get(create.resource, meta["namespace"], create.name))

    with mock.patch.object(Executor, "_adopt", adopt):
        yield


@_mutant(Run("rank-failure"), Run("suspension"))
def _old_pods_not_deleted() -> Iterator[None]:
    """Start the next attempt while the pods of the last one run on."""
    with _changing_plan(lambda plan: replace(plan, deletes=())):
        yield


@_mutant(Run("node-loss"), Run("success"))
def _unchanged_status_written() -> Iterator[None]:
    """Send a status patch in each reconcile."""
    original = reconcile.status_patch

    def status_patch(old: Any, new: Any) -> Any:
        return original(old, new) or {"observedGeneration": new["observedGeneration"]}

    always = _changing_status(lambda job: job.get("status"))
    with mock.patch.object(reconcile, "status_patch", status_patch), always:
        yield


def _changing_status(default: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """Let each plan have a status: where it has none, the recorded one."""
    original = reconcile.make_plan

    def make_plan(job: Any, *more: Any) -> Plan:
        plan = original(job, *more)
        return plan if plan.status is not None else replace(plan, status=default(job))

    return mock.patch.object(reconcile, "make_plan", make_plan)


@_mutant(*(Run("node-loss", watch="dropped", seed=seed) for seed in range(10)), *_random(60))
def _lists_ignored_after_the_start() -> Iterator[None]:
    """Never list again, though watches lose events."""
    original = Sweeper.sweep

    async def sweep(self: Any) -> int:
        return 0 if self._started else await original(self)

    with mock.patch.object(Sweeper, "sweep", sweep):
        yield


@_mutant(Run("deadline"))
def _deadline_forgotten() -> Iterator[None]:
    """Plan again only after an event, never at a deadline."""
    with _changing_plan(lambda plan: replace(plan, requeue_after=None)):
        yield


@_mutant(*_at_each_write("rank-failure", *CRASHES, "lost"), *_random(60))
def _effect_of_a_lost_response_assumed() -> Iterator[None]:
    """Take a write without a response for one that was carried out."""
    original = Executor._create

    async def create(self: Any, job: Any, create: Any, problems: Any) -> None:
        try:
            await original(self, job, create, problems)
        except Exception:
            return

    with mock.patch.object(Executor, "_create", create):
        yield


@_mutant(Run("two-nodes-lost"))
def _only_newest_failure_refunded() -> Iterator[None]:
    """Refund only the newest failure when nodes prove lost."""
    with mock.patch.object(budget, "_first_in_counter", lambda failures, used: max(len(failures) - 1, 0)):
        yield


@_mutant(Run("startup-deadline-of-refused-pods"))
def _startup_deadline_of_each_try() -> Iterator[None]:
    """Let the startup deadline begin again with each attempt whose pods are refused."""
    with mock.patch.object(status, "_creating_since", lambda attempt, decision: None):
        yield


@_mutant(Run("avoided-node"))
def _avoided_nodes_not_in_the_pods() -> Iterator[None]:
    """Record the nodes to avoid, and create pods that may run on them."""
    original = plan.desired_pods

    def desired_pods(*arguments: Any, avoid: Any = (), **options: Any) -> Any:
        return original(*arguments, **options)

    with mock.patch.object(plan, "desired_pods", desired_pods):
        yield


@_mutant(Run("rules-for-restarts"))
def _rules_of_the_user_ignored() -> Iterator[None]:
    """Decide by the table of failures alone."""
    with mock.patch.object(decision, "overrule", lambda judgement, rules: judgement):
        yield


@_mutant(*(Run("requested-restart", watch="shuffled", order=order, operators=2) for order in (1, 0, 2, 3)))
def _newer_pods_deleted_without_a_record() -> Iterator[None]:
    """Delete pods of an attempt that the recorded status does not know, although the job may be stale."""
    original = status.next_number

    def next_number(s: Any, made: Any) -> int:
        changes = made.begins_attempt or made.ends_attempt
        return original(s, made) if changes else int(s.attempt.number)

    with mock.patch.object(status, "next_number", next_number):
        yield
