"""Reconcile a job: observe, plan, record, act, report.

The input is the state of the cluster, never an event. The status patch with the decision is written before any delete
or create, with the resourceVersion that the decision is based on, so a crash at any point leaves the decision recorded.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json, levels
from ddpjob.api.pod_view import PodView
from ddpjob.clock import SteadyClock
from ddpjob.engine.actions import Delete, EngineSettings, Plan
from ddpjob.engine.claims import claim_in_use, is_claim_of
from ddpjob.engine.desired import Job
from ddpjob.engine.observed import Observed, owned_pods
from ddpjob.engine.plan import plan as make_plan
from ddpjob.engine.scheduling.adapters import families
from ddpjob.progress.poller import ProgressPoller
from ddpjob_operator.cluster.base import Cluster, ClusterError, Forbidden, Invalid, TooManyRequests
from ddpjob_operator.controller import logs
from ddpjob_operator.controller.apply import Executor
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.events import EventSender
from ddpjob_operator.controller.health import Verdict
from ddpjob_operator.controller.listing import list_into, read_into
from ddpjob_operator.controller.lookups import Absence, Lookups
from ddpjob_operator.controller.metrics import Metrics
from ddpjob_operator.controller.pod_logs import PodLogs
from ddpjob_operator.controller.recorder import Recorder, Written, readiness
from ddpjob_operator.controller.refused_jobs import RefusedJobs
from ddpjob_operator.controller.sender import Creates, Sender, Sent
from ddpjob_operator.controller.sweep import Sweeper
from ddpjob_operator.controller.workqueue import WorkQueue

logger = logging.getLogger(__name__)

MAX_READS = 4
"""How many plans of one reconcile may ask for more: flavors, and the live pods."""
RECORD_SECONDS = 0.05
"""The status of a first attempt waits no longer for the answer to its first create."""
MAX_VALUES = 50_000
"""JSON values of all kept parsed specs together: about 500 ordinary jobs, and at most some 30 MB."""
GRACE_SECONDS = 10.0
FLUSH_SECONDS = 5.0


@dataclass
class Memory:
    """State of one job in memory between reconciles. Losing it costs a retry, but is always safe.

    stale: a write got no response, so the job must be read again before the next plan.
    absence: of its Workload.
    """

    uid: str
    sent: Sent = field(default_factory=Sent)
    written: Written = field(default_factory=Written)
    absence: Absence = field(default_factory=Absence)
    stale: bool = False
    last_error: str = ""


class ParsedJobs:
    """Parses jobs, and keeps the last ones: a plan of an unchanged spec neither validates nor hashes it again."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, tuple[Job, int]] = OrderedDict()
        self._values = 0

    def parse(self, body: Json) -> Job:
        """Return ``Job.of(body)``, perhaps an earlier result for the same spec."""
        uid = body["metadata"]["uid"]
        known, _ = self._jobs.get(uid, (None, 0))
        # The generation does not count the defaults that a new CustomResourceDefinition adds to a stored spec.
        if known and known.generation == body["metadata"].get("generation") and known.stored_spec == body["spec"]:
            self._jobs.move_to_end(uid)
            return known
        self.forget(uid)
        job = Job.of(body)
        values = sum(map(len, levels(job.stored_spec)))
        self._jobs[uid] = job, values
        self._values += values
        while self._values > MAX_VALUES:
            self.forget(next(iter(self._jobs)))
        return job

    def forget(self, uid: str) -> None:
        """Drop the job with this uid."""
        _, values = self._jobs.pop(uid, (None, 0))
        self._values -= values


class Controller:
    """Reconciles every DDPJob of a cluster: ``run`` sweeps, and the work queue calls ``process``.

    scopes: namespaces to list, one request each; None lists all of them at once.
    make_poller: returns the progress poller, given the function to call with the key of a job that made progress.
    concurrent_requests: how many requests that create and delete objects are sent at a time.
    clock: monotonic seconds, for delays. now: the time that is written into the status; by default ``SteadyClock``.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: EngineSettings,
        make_poller: Callable[[Callable[[Key], None]], ProgressPoller],
        metrics: Metrics,
        *,
        scopes: tuple[str | None, ...] = (None,),
        sweep_seconds: float = 60.0,
        workers: int = 1,
        concurrent_requests: int = 64,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] | None = None,
    ) -> None:
        self.cluster, self.settings, self.metrics, self._clock = cluster, settings, metrics, clock
        self.now = now or SteadyClock().now
        self.queue = WorkQueue(workers)
        self.cache = Cache(on_change=self.queue.add, on_update=self.queue.add_soon, now=self.now)
        self.poller = make_poller(self.queue.add)
        self.pod_logs = PodLogs(cluster, self.queue.add)
        self.events = EventSender(cluster)
        self.recorder = Recorder(cluster, self.cache, self.queue, self.events, metrics, clock)
        self.sweeper = Sweeper(
            cluster=cluster, cache=self.cache, scopes=scopes, interval=sweep_seconds, families=families(settings)
        )
        self._lookups = Lookups(cluster, clock)
        self._refused_jobs = RefusedJobs(self._let_try)
        self.cache.on_freed = self._refused_jobs.freed
        self._executor = Executor(cluster, self.cache, concurrent_requests, self.events.send)
        self._sender = Sender(self._executor, self.queue, self._refused_jobs, clock)
        self._parsed = ParsedJobs()
        self._memories: dict[Key, Memory] = {}
        self._token_key = secrets.token_bytes(32)

    async def run(self, stop: asyncio.Event, others: Iterable["asyncio.Task[None]"] = ()) -> None:
        """Reconcile until ``stop`` is set, then let running reconciles end and send the events that wait.

        others: tasks without which it does not go on.
        If the call is cancelled, running reconciles still end, but waiting events are not sent.
        """
        working = asyncio.create_task(self.queue.run(self.process, stop, GRACE_SECONDS), name="work queue")
        sweeping = asyncio.create_task(self.sweeper.run(), name="sweeper")
        try:
            # A task that returns before the stop has failed: its error is raised below.
            done, _ = await asyncio.wait({working, sweeping, *others}, return_when=asyncio.FIRST_COMPLETED)
            stop.set()
            await asyncio.wait({working})
            try:
                await asyncio.wait_for(self.events.flush(), FLUSH_SECONDS)
            except TimeoutError:
                logger.warning("some events were not sent within %g s", FLUSH_SECONDS)
            for task in {*done, working}:
                task.result()
        finally:
            stop.set()
            await asyncio.wait({working})
            sweeping.cancel()
            self.events.close()
            for key in list(self._memories):
                self._forget(key)
            await self.poller.close()

    def writes(self) -> Verdict:
        """Return whether the schema refuses no status. Called in another thread."""
        memories = list(self._memories.items())
        return readiness([(key, memory.written.wrong) for key, memory in memories if memory.written.wrong])

    async def process(self, key: Key) -> None:
        """Reconcile one job, and retry with backoff after an error."""
        started = self._clock()
        memory = self._memory(key)
        with logs.about(key.namespace, key.name):
            try:
                await self.reconcile(key, memory)
            except ClusterError as error:
                memory.stale = True
                delay = self.queue.retry(key, at_least=error.retry_after)
                result = "throttled" if isinstance(error, TooManyRequests) else "retry"
                logger.warning("retrying in %.1f s: %s: %s", delay, type(error).__name__, error)
            except Exception as error:
                result = "error"
                self.metrics.errors.labels(type(error).__name__).inc()
                self._report_unexpected(error, memory, self.queue.retry(key))
            else:
                result, memory.last_error = "done", ""
        self.metrics.reconcile_seconds.labels(result).observe(self._clock() - started)

    async def reconcile(self, key: Key, memory: Memory) -> None:
        """Run the phases of one reconcile, in order."""
        job = await self._job(key, memory)
        if job is None:
            self._forget(key)
            return
        plan = await self._made_plan(key, job, memory)
        plan = self._sender.without_early_repair(key, plan, memory.sent)
        self._refused_jobs.observe(key, plan.status or job.get("status") or {})
        self.poller.follow(key, plan.poll)
        self.pod_logs.follow(key, _attempt_of(job), plan.logs)
        if plan.requeue_after is not None:
            self.queue.add_after(key, plan.requeue_after)
        acts = (plan.deletes or plan.changes or plan.creates) and memory.sent.hold_until <= self._clock()
        # Also while creates are held: two operators would otherwise overwrite each other's problems without a pause.
        if not acts and (wait := self.recorder.wait(plan, memory.written)) > 0:
            self.queue.add_after(key, wait)
            return
        if plan.is_first and self.recorder.may_begin and not memory.written.failed:
            await self._begin(key, job, plan, memory)
        elif (recorded := await self.recorder.record(key, job, plan, memory.written)) is not None:
            try:
                outcome = await self._sender.act(key, recorded, plan, memory.sent)
            finally:
                # After acting, so that events do not delay it; also after a failure: the decision is recorded.
                self.recorder.announce(recorded, plan)
            self._sender.settle(key, outcome, memory.sent)

    async def _made_plan(self, key: Key, job: Json, memory: Memory) -> Plan:
        """Return the plan, after reading what it needs besides the cache."""
        read: dict[str, Any] = {}
        found = self._lookups.found()
        for _ in range(MAX_READS):
            observed = replace(self._observed(key, job, memory), found=found, **read)
            plan = make_plan(job, observed, self.now(), self.settings, self._parsed.parse)
            if plan.lookups:
                found |= await self._lookups.read(plan.lookups)
            elif plan.needs_live:
                workload = self._lookups.has_workload(self.cache, job, memory.absence, uses_kueue=self.settings.kueue)
                exists, live = await asyncio.gather(workload, self._live_pods(key, memory.uid))
                read = {"live": True, "has_workload": exists, "pods": owned_pods(job, live)}
            else:
                break
        if not read:
            memory.absence.end()  # this plan did not need to ask
        return plan

    async def _begin(self, key: Key, job: Json, plan: Plan, memory: Memory) -> None:
        """Create the pods of the first attempt while its status is written.

        If one of the two fails, the next reconcile adopts the pods by their names. Not before this process wrote some
        status: an API server with an older CRD might refuse all, and pods without a record must not run.

        The status is sent after the creates, but not later than ``RECORD_SECONDS``: for an API server with few cores
        a status patch of a custom resource is as much work as a pod, and would delay them.
        """
        acting = asyncio.create_task(self._sender.act(key, job, plan, memory.sent))
        try:
            await asyncio.wait({acting}, timeout=RECORD_SECONDS)
            is_deleted = self.cache.job_uid(key) != job["metadata"]["uid"]
            recorded = None if is_deleted else await self.recorder.record(key, job, plan, memory.written)
        except asyncio.CancelledError:
            acting.cancel()
            raise
        except (Forbidden, Invalid):  # perhaps for days
            await asyncio.gather(acting, return_exceptions=True)
            await self._remove_unrecorded(job, memory)
            raise
        finally:
            await asyncio.gather(acting, return_exceptions=True)  # which a cancellation ends, too
        if recorded is not None:
            self.recorder.announce(recorded, plan)
        self._sender.settle(key, acting.result(), memory.sent)

    async def _remove_unrecorded(self, job: Json, memory: Memory) -> None:
        """Delete the pods of a first attempt whose status was refused, because nothing would watch over them."""
        memory.sent.creates = Creates()
        pods = self.cache.pods(job["metadata"]["namespace"], job["metadata"]["uid"])
        deletes = tuple(Delete(names.PODS, pod.name, pod.uid) for pod in owned_pods(job, pods))
        await self._executor.act(job, Plan(deletes=deletes))

    async def _job(self, key: Key, memory: Memory) -> Json | None:
        """Return the cached job, or read it again if the cache may be stale after a lost response."""
        if memory.stale:
            await read_into(self.cache, self.cluster, names.DDPJOBS, key, self.cache.job_uid(key) or "")
            memory.stale = False
        job = self.cache.job(key)
        if job is not None:
            self.recorder.observe(job, memory.written)
        return job

    def _observed(self, key: Key, job: Json, memory: Memory) -> Observed:
        """Return what is known without a request."""
        meta, attempt = job["metadata"], _attempt_of(job)
        logs.set_attempt(attempt)
        cached = self.cache.pods(key.namespace, meta["uid"])
        memory.sent.creates.see(attempt, cached)
        name = names.service_name(key.name, meta["uid"])
        used = claim_in_use(job)
        claim = self.cache.get(names.CLAIMS, key.namespace, names.claim_name(key.name))
        return Observed(
            owned_pods(job, cached),
            former=() if attempt else self.cache.former_pods(key, meta["uid"], used),
            sharing=self.cache.sharing(key, used),
            service=self.cache.get(names.SERVICES, key.namespace, name),
            policy=self.cache.get(names.NETWORK_POLICIES, key.namespace, name),
            claim=claim if claim is not None and is_claim_of(claim, key.name) else None,
            problems=memory.sent.problems,
            round=memory.sent.creates.round(attempt),
            created=memory.sent.creates.names if memory.sent.creates.begun == attempt else frozenset(),
            progress=self.poller.polled(key),
            logs=self.pod_logs.found(key),
            objects=self.cache.groups(key.namespace, meta["uid"]),
            served=self.cache.served,
            elder=self.cache.elder(key),
            may_try=memory.sent.may_try,
            token_key=self._token_key,
        )

    async def _live_pods(self, key: Key, uid: str) -> Sequence[PodView]:
        """Return the pods of the job with this uid from a LIST, which also updates the cache."""
        await list_into(self.cache, self.cluster, names.PODS, key.namespace, job_uid=uid)
        return self.cache.pods(key.namespace, uid)

    def _let_try(self, key: Key) -> None:
        self._memory(key).sent.may_try = True
        self.queue.add(key)

    def _memory(self, key: Key) -> Memory:
        uid = self.cache.job_uid(key) or ""
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            self._forget(key)
            memory = self._memories[key] = Memory(uid)
        return memory

    def _forget(self, key: Key) -> None:
        """Drop the state of a deleted job; the API server deletes the objects that it owned."""
        if memory := self._memories.pop(key, None):
            self._parsed.forget(memory.uid)
        for part in (self.queue, self.poller, self.pod_logs, self._refused_jobs):
            part.forget(key)

    def _report_unexpected(self, error: Exception, memory: Memory, delay: float) -> None:
        """Log the traceback the first time, and one line if the error repeats."""
        text = f"{type(error).__name__}: {error}"
        known, memory.last_error = memory.last_error == text, text
        if known:
            logger.error("the same error again, retrying in %.1f s: %s", delay, text)
        else:
            logger.exception("unexpected error, retrying in %.1f s", delay)


def _attempt_of(job: Json) -> int:
    return int((job.get("status") or {}).get("attempt") or 0)
