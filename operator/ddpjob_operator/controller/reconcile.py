"""Reconcile a job: observe, plan, record, act, report.

The input is the state of the cluster, never an event. The status patch with the decision is written before any delete
or create, with the resourceVersion that the decision is based on, so a crash at any point leaves the decision recorded.
"""

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json, owner_uid
from ddpjob.api.pod_view import PodView
from ddpjob.api.text import shorten
from ddpjob.engine.actions import REFUSALS_TO_SHOW, Change, Delete, EngineSettings, Note, Plan, Problem, patch_between
from ddpjob.engine.attempt import MAX_RETRY_SECONDS, retry_seconds
from ddpjob.engine.claims import claim_in_use, is_claim_of
from ddpjob.engine.observed import Observed, owned_pods
from ddpjob.engine.plan import plan as make_plan
from ddpjob.engine.scheduling.base import LOOKUP_SECONDS
from ddpjob.progress.poller import ProgressPoller
from ddpjob_operator.cluster.base import Cluster, ClusterError, Conflict, Forbidden, Invalid, NotFound, TooManyRequests
from ddpjob_operator.cluster.job_json import labels_in_use
from ddpjob_operator.controller import logs
from ddpjob_operator.controller.apply import Executor, Outcome
from ddpjob_operator.controller.cache import Cache, Listing
from ddpjob_operator.controller.events import EventSender
from ddpjob_operator.controller.lookups import Lookups
from ddpjob_operator.controller.metrics import Metrics
from ddpjob_operator.controller.parsed_jobs import ParsedJobs
from ddpjob_operator.controller.pod_logs import PodLogs
from ddpjob_operator.controller.refused_jobs import RefusedJobs
from ddpjob_operator.controller.schema import STATUS_REFUSED, SchemaMonitor, refused_fields
from ddpjob_operator.controller.sweep import read_into
from ddpjob_operator.controller.unbound_claims import UnboundClaims
from ddpjob_operator.controller.workqueue import WorkQueue

logger = logging.getLogger(__name__)

COSMETIC_SECONDS = 0.25
MAX_READS = 4
"""How many plans of one reconcile may ask for more: flavors, the live pods, and flavors again."""
MAX_GAP_SECONDS = 2 * LOOKUP_SECONDS
"""Answers with a longer gap between them are not in a row: nothing was asked meanwhile."""
MAX_CONFLICTS = 20
"""How many conflicts in a row a new plan follows at once: each has the same chance, however often others edit the job.
With growing delays, 34 edits of the metadata a second delayed a restart by 10 s, and 25 by four writers by a minute."""
_REPAIRED = frozenset({names.SERVICES, names.NETWORK_POLICIES})
MAX_REFUSAL = 512
"""Characters of the API server's message in an event: it may quote the object."""
RECORD_SECONDS = 0.05
"""The status of a first attempt waits no longer for the answer to its first create."""


@dataclass
class Memory:
    """State of one job in memory between reconciles. Losing it costs a retry, but is always safe.

    problems: the creates and deletes that failed last time.
    refusals: how many times in a row requests were refused; hold_until: monotonic time before which none is sent again.
    may_try: the creates that were refused are sent again without a delay (``refused_jobs``).
    edition: generation and labels of the job when requests were last sent.
    begun, complete: number of the last attempt whose creates began, and of the last whose creates all had success.
    created: names of the pods of the attempt ``begun`` that were created, or were seen after a create without response.
    repairs: how many times in a row Service, policy or labels were repaired. repair_after: when the next may follow.
    patched_at: monotonic time of the last status patch. conflicts: how many met a conflict since.
    unannounced: status before and after a patch whose response was lost, and its events.
    unrecorded: the last status write failed, so nothing is done before the next one has succeeded.
    refused_status: the last event about a status that was refused, so that it is sent once.
    stale: a write got no response, so the job must be read again before the next plan.
    absent: monotonic times of the first and the last of the GETs in a row that showed that the job has no Workload.
    rival: the log says that another operator writes the status.
    """

    uid: str
    problems: tuple[Problem, ...] = ()
    refusals: int = 0
    hold_until: float = 0.0
    may_try: bool = False
    edition: tuple[int, Json] | None = None
    begun: int = 0
    complete: int = 0
    created: frozenset[str] = frozenset()
    repairs: int = 0
    repair_after: float = float("-inf")
    patched_at: float = float("-inf")
    conflicts: int = 0
    unannounced: tuple[Json, Json, Plan] | None = None
    unrecorded: bool = False
    refused_status: str = ""
    stale: bool = False
    absent: tuple[float, float] | None = None
    rival: bool = False
    last_error: str = ""


@dataclass(kw_only=True)
class Reconciler:
    """Reconciles jobs; the work queue calls ``process``.

    served: returns ``Observed.served``.
    clock: monotonic seconds, for delays. now: the time that is written into the status.
    """

    cluster: Cluster
    cache: Cache
    queue: WorkQueue
    executor: Executor
    poller: ProgressPoller
    claims: UnboundClaims
    pod_logs: PodLogs
    events: EventSender
    metrics: Metrics
    schema: SchemaMonitor
    settings: EngineSettings
    clock: Callable[[], float]
    now: Callable[[], datetime]
    served: Callable[[], Collection[str] | None] = lambda: None
    _memories: dict[Key, Memory] = field(default_factory=dict, init=False)
    _parsed: ParsedJobs = field(default_factory=ParsedJobs, init=False)
    _has_recorded: bool = field(default=False, init=False)
    _lookups: Lookups = field(init=False)
    refused_jobs: RefusedJobs = field(init=False)
    _token_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), init=False, repr=False)

    def __post_init__(self) -> None:
        self.refused_jobs = RefusedJobs(self._let_try)
        self._lookups = Lookups(self.cluster, self.clock)

    async def process(self, key: Key) -> None:
        """Reconcile one job, and retry with backoff after an error."""
        started = self.clock()
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
        self.metrics.reconcile_seconds.labels(result).observe(self.clock() - started)

    async def reconcile(self, key: Key, memory: Memory) -> None:
        """Run the phases of one reconcile, in order."""
        job = await self._job(key, memory)
        if job is None:
            self._forget(key)
            return
        plan = await self._made_plan(key, job, memory)
        plan = self._without_early_repair(key, plan, memory)
        self.refused_jobs.observe(key, plan.status or job.get("status") or {})
        self.poller.follow(key, plan.poll)
        self.claims.follow(key, plan.claims)
        self.pod_logs.follow(key, int((job.get("status") or {}).get("attempt") or 0), plan.logs)
        if plan.requeue_after is not None:
            self.queue.add_after(key, plan.requeue_after)
        if self._is_too_soon(key, plan, memory):
            return
        if plan.is_first and self._has_recorded and not memory.unrecorded:
            await self._begin(key, job, plan, memory)
        elif (recorded := await self._record(key, job, plan, memory)) is not None:
            try:
                outcome = await self._act(key, recorded, plan, memory)
            finally:
                # After acting, so that events do not delay it; also after a failure: the decision is recorded.
                self._announce(recorded, plan)
            self._settle(key, outcome, memory)

    async def _made_plan(self, key: Key, job: Json, memory: Memory) -> Plan:
        """Return the plan, after reading what it needs besides the cache."""
        live: Sequence[PodView] | None = None
        has_workload: bool | None = None
        await self._read_hidden_workload(job)
        for _ in range(MAX_READS):
            plan = self._plan(key, job, memory, live, has_workload)
            if plan.lookups:
                await self._lookups.read(plan.lookups)
            elif plan.needs_live:
                has_workload, live = await asyncio.gather(self._has_workload(job, memory), self._live_pods(job))
            else:
                break
        if live is None:
            memory.absent = None  # this plan did not need to ask
        return plan

    async def _read_hidden_workload(self, job: Json) -> None:
        """Read the Workload that watch and LIST no longer show; if the GET fails, the next sweep sends it again."""
        if uid := self.cache.take_hidden(*_workload_of(job)):
            await self._read_workload(job, uid)

    async def _has_workload(self, job: Json, memory: Memory) -> bool | None:
        """Read the Workload again: an old one may show an admission that has ended, or not yet begun.

        Returns: ``Observed.has_workload``. While Kueue is being removed, the API server says for a moment that neither
        Workloads nor classes exist, so a single answer is not enough.
        """
        known = self.cache.get(names.WORKLOADS, *_workload_of(job))
        is_queued = bool(self.settings.kueue and (job["metadata"].get("labels") or {}).get(names.LABEL_QUEUE))
        uid = known["metadata"]["uid"] if known is not None else ""
        exists = await self._read_workload(job, uid) if uid or is_queued else None
        if exists is not False:
            memory.absent = None
            return exists
        now = self.clock()
        first, last = memory.absent or (now, now)
        first = first if now - last <= MAX_GAP_SECONDS else now
        memory.absent = first, now
        return False if now - first >= LOOKUP_SECONDS else None

    async def _read_workload(self, job: Json, uid: str) -> bool | None:
        """Return whether it exists and is the job's; None if the API server did not answer. uid: of the cached one."""
        place = _workload_of(job)
        try:
            found = await read_into(self.cache, self.cluster, names.WORKLOADS, place, uid, wake=False)
        except ClusterError as error:  # Kueue is away, which must keep no job from ending
            logger.info("Workload %s cannot be read: %s", place[1], error)
            return None
        return found is not None and owner_uid(found) == job["metadata"]["uid"]

    async def _begin(self, key: Key, job: Json, plan: Plan, memory: Memory) -> None:
        """Create the pods of the first attempt while its status is written.

        If one of the two fails, the next reconcile adopts the pods by their names. Not before this process wrote some
        status: an API server with an older CRD might refuse all, and pods without a record must not run.

        The status is sent after the creates, but not later than ``RECORD_SECONDS``: for an API server with few cores
        a status patch of a custom resource is as much work as a pod, and would delay them.
        """
        acting = asyncio.create_task(self._act(key, job, plan, memory))
        try:
            await asyncio.wait({acting}, timeout=RECORD_SECONDS)
            is_deleted = self.cache.job_uid(key) != job["metadata"]["uid"]
            recorded = None if is_deleted else await self._record(key, job, plan, memory)
        except asyncio.CancelledError:
            acting.cancel()
            raise
        except (Forbidden, Invalid):  # perhaps for days
            await _end_of(acting)
            await self._remove_unrecorded(job, memory)
            raise
        finally:
            await _end_of(acting)
        if recorded is not None:
            self._announce(recorded, plan)
        self._settle(key, acting.result(), memory)

    async def _remove_unrecorded(self, job: Json, memory: Memory) -> None:
        """Delete the pods of a first attempt whose status was refused, because nothing would watch over them."""
        memory.begun, memory.complete, memory.created = 0, 0, frozenset()
        pods = self.cache.pods(job["metadata"]["namespace"], job["metadata"]["uid"])
        deletes = tuple(Delete(names.PODS, pod.name, pod.uid) for pod in owned_pods(job, pods))
        await self.executor.act(job, Plan(deletes=deletes))

    async def _job(self, key: Key, memory: Memory) -> Json | None:
        """Return the cached job, or read it again if the cache may be stale after a lost response."""
        if memory.stale:
            await self._refresh(key)
            memory.stale = False
        job = self.cache.job(key)
        if job is not None and memory.unannounced is not None:
            before, status, unannounced = memory.unannounced
            memory.unannounced = None
            if job.get("status") == status:  # the write whose response was lost took place
                self.metrics.observe_status(before, status)
                self._announce(job, unannounced)
        return job

    async def _refresh(self, key: Key) -> None:
        await read_into(self.cache, self.cluster, names.DDPJOBS, key, self.cache.job_uid(key) or "")

    def _plan(
        self, key: Key, job: Json, memory: Memory, live: Sequence[PodView] | None, has_workload: bool | None
    ) -> Plan:
        meta = job["metadata"]
        attempt = int((job.get("status") or {}).get("attempt") or 0)
        logs.set_attempt(attempt)
        cached = self.cache.pods(key.namespace, meta["uid"])
        if memory.begun == attempt != memory.complete:
            memory.created |= {pod.name for pod in cached if pod.attempt == attempt}
        name = names.service_name(key.name, meta["uid"])
        used = claim_in_use(job)
        claim = self.cache.get(names.CLAIMS, key.namespace, names.claim_name(key.name))
        observed = Observed(
            owned_pods(job, cached if live is None else live),
            former=() if attempt else self.cache.former_pods(key, meta["uid"], used),
            sharing=self.cache.sharing(key, used),
            service=self.cache.get(names.SERVICES, key.namespace, name),
            policy=self.cache.get(names.NETWORK_POLICIES, key.namespace, name),
            claim=claim if is_claim_of(claim, key.name) else None,
            problems=memory.problems,
            round="complete" if memory.complete == attempt else "begun" if memory.begun == attempt else "unknown",
            created=memory.created if memory.begun == attempt else frozenset(),
            progress=self.poller.polled(key),
            logs=self.pod_logs.found(key),
            unbound=self.claims.text(key),
            objects=self.cache.groups(key.namespace, meta["uid"]),
            found=self._lookups.found(),
            served=self.served(),
            elder=self.cache.elder(key),
            may_try=memory.may_try,
            token_key=self._token_key,
            live=live is not None,
            has_workload=has_workload,
        )
        return make_plan(job, observed, self.now(), self.settings, self._parsed.parse)

    async def _live_pods(self, job: Json) -> Sequence[PodView]:
        """Return the job's pods from a LIST, which also updates the cache."""
        meta = job["metadata"]
        uid, namespace = meta["uid"], meta["namespace"]
        mine = (namespace, uid)
        # After a restore of etcd a version may be of another state than the cached one.
        listing = Listing(
            self.cache, names.PODS, lambda entry: (entry.namespace, entry.value.job_uid) == mine, same_version=True
        )
        async for page in self.cluster.pages(names.PODS, namespace, f"{names.LABEL_JOB_UID}={uid}"):
            listing.take(page)
        listing.finish()
        return self.cache.pods(*mine)

    def _without_early_repair(self, key: Key, plan: Plan, memory: Memory) -> Plan:
        """Return the plan without a repair that would follow the last one too soon.

        An admission webhook, another program or a second operator may undo each repair.
        """
        wait = memory.repair_after - self.clock()
        if wait <= 0 or not _repairs(plan):
            return plan
        self.queue.add_after(key, wait)
        return replace(plan, changes=tuple(change for change in plan.changes if not _is_repair(change)))

    def _is_too_soon(self, key: Key, plan: Plan, memory: Memory) -> bool:
        """Return whether to delay a status that is not urgent and combine it with the next one.

        Also while creates are held: two operators would otherwise overwrite each other's problems without a pause.
        """
        acts = (plan.deletes or plan.changes or plan.creates) and memory.hold_until <= self.clock()
        if plan.status is None or plan.urgent or acts:
            return False
        wait = memory.patched_at + COSMETIC_SECONDS - self.clock()
        if wait > 0:
            self.queue.add_after(key, wait)
        return wait > 0

    async def _record(self, key: Key, job: Json, plan: Plan, memory: Memory) -> Json | None:
        """Write the status if it changed; return None if the job changed since the plan was made."""
        patch = patch_between(job.get("status") or {}, plan.status) if plan.status is not None else {}
        if not patch:
            self.schema.clear(key)
            return job
        body = {"metadata": {"resourceVersion": job["metadata"]["resourceVersion"]}, "status": patch}
        memory.unannounced = job.get("status") or {}, dict(plan.status or {}), plan
        memory.unrecorded = True
        try:
            recorded = await self.cluster.patch_status(names.DDPJOBS, *key, body)
        except Conflict:
            await self._refresh(key)
            self._report_rival(key, job, memory)
            memory.conflicts += 1
            if memory.conflicts <= MAX_CONFLICTS:
                self.queue.add(key)
            else:
                self.queue.retry(key)
            return None
        except NotFound:
            self.cache.remove(names.DDPJOBS, *key, job["metadata"]["uid"])
            self._forget(key)
            return None
        except (Forbidden, Invalid) as error:
            raise self._refused(key, job, memory, error) from error
        self.schema.clear(key)
        memory.unannounced, memory.unrecorded, memory.conflicts = None, False, 0
        memory.patched_at = self.clock()
        self._has_recorded = True
        if recorded["metadata"]["resourceVersion"] == job["metadata"]["resourceVersion"]:
            # Nothing changed: the cached status lacked fields, because it was read while the CRD was replaced.
            self.cache.put(names.DDPJOBS, recorded, wake=False, same_version=True)
            self.queue.retry(key)
            return None
        self.metrics.observe_status(job.get("status") or {}, recorded["status"])
        # A decision is followed by another plan. What only shows the state follows from what was planned already.
        self.cache.put(names.DDPJOBS, recorded, wake=False)
        if plan.urgent:
            self.queue.add(key)
        logs.set_attempt(recorded["status"].get("attempt", 0))
        return recorded

    def _report_rival(self, key: Key, job: Json, memory: Memory) -> None:
        """Log once a job that another operator has written the status: users have no right to do so."""
        found = self.cache.job(key)
        if memory.rival or found is None or found["metadata"]["uid"] != job["metadata"]["uid"]:
            return
        if found.get("status") != job.get("status"):
            memory.rival = True
            logger.warning(
                "another operator writes the status of this job; two serve a namespace during an upgrade only"
            )

    def _refused(self, key: Key, job: Json, memory: Memory, error: ClusterError) -> ClusterError:
        """Report a status that the CRD's schema or an admission plugin refuses, in an event: the status cannot show it.

        Returns the error, without the object in its text if it is the schema's.
        """
        self._has_recorded = False  # from here on no pod is created beside its record, see ``_begin``
        if fields := refused_fields(error):
            note = self.schema.note(key, fields)
            error = Invalid(f"the schema refuses {', '.join(fields)}", code=error.code)
        else:
            text = f"the status cannot be written, so nothing is done for this job: {shorten(str(error), MAX_REFUSAL)}"
            note = Note("Warning", STATUS_REFUSED, text) if memory.refused_status != text else None
            memory.refused_status = text
        if note is not None:
            self.events.send(job, note)
        return error

    async def _act(self, key: Key, job: Json, plan: Plan, memory: Memory) -> Outcome | None:
        """Delete and create; return None if nothing is to do, or not before the delay after the last refusal."""
        if not (plan.deletes or plan.changes or plan.creates):
            if memory.problems:  # this plan has shown them, and nothing is left that could be refused
                memory.problems = ()
                self.queue.add(key)
            return None
        meta = job["metadata"]
        edition = meta.get("generation", 0), labels_in_use(meta.get("labels") or {})  # a queue is part of no spec
        if edition != memory.edition or plan.urgent:
            memory.refusals, memory.hold_until = 0, 0.0
            memory.edition = edition
        if (wait := memory.hold_until - self.clock()) > 0:
            self.queue.add_after(key, wait)
            return None
        number, was_let_try = plan.creates_attempt, memory.may_try
        if number is not None:
            memory.may_try = False
            memory.created = memory.created if memory.begun == number else frozenset()
            memory.begun, memory.problems = number, ()
        try:
            outcome = await self.executor.act(job, plan)
        except BaseException:
            memory.begun = 0  # the effect is not known, as after a restart of the operator
            raise
        if _repairs(plan) and not outcome.problems:  # a refused one is delayed and shown as a problem, see ``_settle``
            is_new = self.clock() - memory.repair_after > MAX_RETRY_SECONDS
            memory.repairs = 1 if is_new else memory.repairs + 1
            memory.repair_after = self.clock() + retry_seconds(memory.repairs)
        memory.created |= outcome.created
        refused = any(problem.reason not in REFUSALS_TO_SHOW for problem in outcome.problems)
        if number is not None and not refused and not outcome.namespace_gone:
            memory.complete, memory.created = number, frozenset()
            if was_let_try:
                self.refused_jobs.let_try(key.namespace)
        return outcome

    def _announce(self, job: Json, plan: Plan) -> None:
        for note in plan.events:
            # Only the reason: a message may contain the end of the user's log, and with it a secret.
            logger.info("event %s", note.reason)
            self.events.send(job, note)

    def _settle(self, key: Key, outcome: Outcome | None, memory: Memory) -> None:
        """Plan again at once after problems or the last create; what was refused is sent again with growing delay."""
        self.queue.forget(key)
        if outcome is None:
            return
        # Each event of a pod that ends in a namespace that is being deleted would otherwise cause creates.
        if outcome.problems or outcome.namespace_gone:
            memory.refusals = 1 if outcome.created else memory.refusals + 1
            delay = retry_seconds(memory.refusals) * random.uniform(0.75, 1.0)  # noqa: S311
            delay = max(delay, outcome.retry_after)
            memory.hold_until = self.clock() + delay
            self.queue.add_after(key, delay)
        else:
            memory.refusals = 0
        if outcome.problems != memory.problems:
            memory.problems = outcome.problems
            self.queue.add(key)

    def _let_try(self, key: Key) -> None:
        self._memory(key).may_try = True
        self.queue.add(key)

    def _memory(self, key: Key) -> Memory:
        uid = self.cache.job_uid(key) or ""
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            if memory is not None:
                self._parsed.forget(memory.uid)
            memory = self._memories[key] = Memory(uid)
            self.poller.forget(key)
            self.claims.forget(key)
            self.pod_logs.forget(key)
        return memory

    def _forget(self, key: Key) -> None:
        """Drop the state of a deleted job; the API server deletes the objects that it owned."""
        if memory := self._memories.pop(key, None):
            self._parsed.forget(memory.uid)
        self.schema.clear(key)
        self.refused_jobs.forget(key)
        self.poller.forget(key)
        self.claims.forget(key)
        self.pod_logs.forget(key)
        self.queue.forget(key)

    def _report_unexpected(self, error: Exception, memory: Memory, delay: float) -> None:
        """Log the traceback the first time, and one line if the error repeats."""
        text = f"{type(error).__name__}: {error}"
        known, memory.last_error = memory.last_error == text, text
        if known:
            logger.error("the same error again, retrying in %.1f s: %s", delay, text)
        else:
            logger.exception("unexpected error, retrying in %.1f s", delay)


def _workload_of(job: Json) -> tuple[str, str]:
    """Return namespace and name of the Workload of a job."""
    meta = job["metadata"]
    return meta["namespace"], names.service_name(meta["name"], meta["uid"])


def _repairs(plan: Plan) -> bool:
    return any(map(_is_repair, plan.changes))


def _is_repair(change: Change) -> bool:
    """Return whether a change restores the Service or the NetworkPolicy, or the labels of an object."""
    return change.resource in _REPAIRED or bool(change.labels)


async def _end_of(task: "asyncio.Task[Outcome | None]") -> None:
    """Wait until a task has ended. It does not outlive the caller: if the caller is cancelled, so is the task."""
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
