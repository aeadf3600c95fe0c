"""Carry out the deletes and creates of a plan, and report what failed.

Names are deterministic, so a create that is sent twice fails with AlreadyExists. An existing object is adopted if the
job owns it, and otherwise left alone. Every response updates the cache at once, so the next plan does not repeat it.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ddpjob.api import names
from ddpjob.api.objects import Json, owner_uid
from ddpjob.engine.actions import (
    CHANGE_REFUSED,
    CREATE_FAILED,
    DELETE_REFUSED,
    NAME_TERMINATING,
    REFUSALS_TO_SHOW,
    Change,
    Create,
    Delete,
    Note,
    Plan,
    Problem,
    ProblemReason,
)
from ddpjob.engine.claims import adoption, is_claim_of
from ddpjob_operator.cluster.base import (
    AlreadyExists,
    Cluster,
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceTerminating,
    NotFound,
    NotServed,
    TooManyRequests,
    Unavailable,
)
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.listing import read_into
from ddpjob_operator.controller.slots import Slots

logger = logging.getLogger(__name__)

FAILURES = 8
"""How many creates may fail before it matters that more fail than succeed."""
DELETE_TRIES = 3
"""How many times a DELETE that got a conflict is sent in one reconcile."""


@dataclass
class Outcome:
    """What remains to be done after carrying out a plan.

    problems: refused deletes and changes, creates that failed, and names that are taken, for the status.
    created: names of the objects that were created or adopted.
    retry_after: seconds for which the API server wants no further request.
    namespace_gone: the namespace is being deleted, so nothing was created.
    """

    problems: list[Problem] = field(default_factory=list)
    created: set[str] = field(default_factory=set)
    retry_after: float = 0.0
    namespace_gone: bool = False

    def add(self, reason: ProblemReason, create: Create, text: str) -> None:
        if create.optional:
            logger.info("%s %s is not created: %s", create.resource.kind, create.name, reason)
            return
        self.problems.append(Problem(reason, create.resource, create.name, text))

    @property
    def failed_creates(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.reason not in REFUSALS_TO_SHOW]

    @property
    def is_over(self) -> bool:
        """Whether to send no more: a create was refused, or more creates fail than succeed."""
        failed = self.failed_creates
        refused = any(problem.reason != CREATE_FAILED for problem in failed)
        return self.namespace_gone or refused or len(failed) > max(FAILURES, len(self.created))


class Executor:
    """Carries out plans of all jobs, with at most ``concurrency`` requests at a time, shared fairly (``Slots``)."""

    def __init__(
        self, cluster: Cluster, cache: Cache, concurrency: int, announce: Callable[[Json, Note], None] = lambda *_: None
    ) -> None:
        self._announce = announce
        self._cluster = cluster
        self._cache = cache
        self._concurrency = concurrency
        self._slots = Slots(concurrency)

    async def act(self, job: Json, plan: Plan) -> Outcome:
        """Send the deletes, then the creates phase by phase; a refused delete does not stop the creates.

        Raises:
            ClusterError: a request got no response, so its effect is unknown.
        """
        outcome, namespace = Outcome(), job["metadata"]["namespace"]
        requests = [self._delete(namespace, delete, outcome.problems) for delete in plan.deletes]
        requests += [self._change(namespace, change, outcome.problems) for change in plan.changes]
        _raise_first(await asyncio.gather(*requests, return_exceptions=True))
        for phase in plan.creates:
            first = asyncio.Event()
            for batch in _batches(phase, plan.cautious):
                await self._create_batch(job, batch, outcome, first)
                if outcome.namespace_gone:
                    logger.info("the namespace is being deleted; nothing is created in it")
                    return Outcome(namespace_gone=True)
                if outcome.failed_creates:
                    return outcome
        return outcome

    async def _change(self, namespace: str, change: Change, problems: list[Problem]) -> None:
        patch = self._cluster.patch if change.part == "spec" else self._cluster.patch_status
        is_waited_for = change.resource in names.SCHEDULING_KINDS  # by the next change of the object
        try:
            async with self._slots.take(namespace):
                changed = await patch(change.resource, namespace, change.name, change.body)
            self._cache.put(change.resource, changed, wake=is_waited_for)
        except NotFound:
            self._cache.remove(change.resource, namespace, change.name, change.uid)
        except NotServed:
            if not is_waited_for:
                raise  # otherwise the definition was removed; the next sweep shows it
        except Conflict as error:
            if not change.version:
                return self._refuse_change(change, error, problems)
            # The object has changed since the plan, perhaps only in what plans do not read: read it, and plan again.
            await read_into(self._cache, self._cluster, change.resource, (namespace, change.name), change.uid)
            self._cache.wake_job_of(change.resource, namespace, change.name)
        except ClusterError as error:
            # The webhook of a system that is away must keep no pod from its restart; the next plan sends it again.
            if not (is_waited_for or isinstance(error, Forbidden | Invalid)):
                raise
            self._refuse_change(change, error, problems)

    def _refuse_change(self, change: Change, error: ClusterError, problems: list[Problem]) -> None:
        text = f"{change.resource.kind} {change.name} cannot be changed: {error}"
        problems.append(Problem(CHANGE_REFUSED, change.resource, change.name, text))

    async def _delete(self, namespace: str, delete: Delete, problems: list[Problem]) -> None:
        uid = delete.uid
        try:
            left = await self._send_delete(namespace, delete)
        except (Conflict, Forbidden, Invalid) as error:
            text = f"{delete.resource.kind} {delete.name} cannot be deleted: {error}"
            problems.append(Problem(DELETE_REFUSED, delete.resource, delete.name, text))
            return
        meta = left.get("metadata", {})
        lingers = meta.get("finalizers") or (meta.get("deletionGracePeriodSeconds") or 0) > 0
        if meta.get("uid") == uid and lingers:
            self._cache.put(delete.resource, left)
        else:
            self._cache.remove(delete.resource, namespace, delete.name, uid)

    async def _send_delete(self, namespace: str, delete: Delete) -> Json:
        """Return the response to the DELETE; {} if the object no longer exists.

        A conflict means that another object has the name, or that another client changed the object at the same time,
        or that an admission plugin refused with this code. Only a GET shows whether the object still exists.
        """
        tries = DELETE_TRIES
        async with self._slots.take(namespace):
            while True:
                tries -= 1
                try:
                    return await self._cluster.delete(delete.resource, namespace, delete.name, uid=delete.uid)
                except NotFound:
                    return {}
                except NotServed:
                    if delete.resource not in names.SCHEDULING_KINDS:
                        raise
                    return {}  # the definition of the PodGroups was removed, and its objects with it
                except Conflict:
                    found = await self._existing(namespace, delete)
                    if found["metadata"].get("uid") != delete.uid:
                        return {}
                    if not tries:
                        raise

    async def _create_batch(self, job: Json, batch: Sequence[Create], outcome: Outcome, first: asyncio.Event) -> None:
        """Create all objects concurrently, then raise the first error.

        Each body is read when it is about to be sent, so that rendering a large job does not block the event loop.
        """
        creates = iter(batch)

        async def work() -> None:
            for create in creates:
                if create.after_first:
                    await first.wait()
                try:
                    await self._create(job, create, outcome)
                finally:
                    first.set()
                if outcome.is_over:
                    return

        tasks = min(len(batch), self._concurrency)
        results = await asyncio.gather(*(work() for _ in range(tasks)), return_exceptions=True)
        if not outcome.namespace_gone:
            _raise_first(results)

    async def _create(self, job: Json, create: Create, outcome: Outcome) -> None:
        """Create or adopt one object. What failed is not repeated here: its effect is not known, so it is planned."""
        meta = job["metadata"]
        try:
            async with self._slots.take(meta["namespace"], meta["uid"]):
                if outcome.is_over:
                    return
                exists = False
                try:
                    found = await self._cluster.create(create.resource, meta["namespace"], create.body)
                except AlreadyExists:
                    exists, found = True, await self._existing(meta["namespace"], create)
            await (self._adopt if exists else self._take)(job, create, found, outcome)
        except (NamespaceTerminating, NotFound):
            outcome.namespace_gone = True
        except (Forbidden, Invalid) as error:
            outcome.add("CreateRefused", create, str(error))
        except (Unavailable, TooManyRequests, Conflict) as error:
            # For example an admission webhook or etcd is down for a moment, or the response was lost.
            outcome.add(CREATE_FAILED, create, f"{create.resource.kind} {create.name} cannot be created: {error}")
            outcome.retry_after = max(outcome.retry_after, error.retry_after)

    async def _existing(self, namespace: str, wanted: Create | Delete) -> Json:
        """Return the object of this name. If it is gone, return an object that is marked as being deleted."""
        try:
            return await self._cluster.get(wanted.resource, namespace, wanted.name)
        except NotFound:
            return {"metadata": {"deletionTimestamp": ""}}

    async def _take(self, job: Json, create: Create, found: Json, outcome: Outcome) -> None:
        """Count an object as created. A pod that an admission webhook made unrecognizable is deleted and reported.

        Without the owner the pod is never deleted, and without the labels no plan sees it: each attempt added pods that
        used the volume and the GPUs.
        """
        if create.resource is not names.PODS or (field := _changed_field(create.body, found)) is None:
            self._cache.put(create.resource, found)
            outcome.created.add(create.name)
            return
        meta, problems = found["metadata"], list[Problem]()
        await self._delete(meta["namespace"], Delete(names.PODS, meta["name"], meta["uid"]), problems)
        left = f"; {problems[0].message}" if problems else "; the pod was deleted"
        text = f"an admission webhook changed {field} of Pod {create.name}, which the operator needs as it is{left}"
        outcome.add("CreateRefused", create, f"{text}: exclude the pods of DDPJobs from that webhook")

    async def _adopt(self, job: Json, create: Create, found: Json, outcome: Outcome) -> None:
        """Adopt the existing object of this name, or report a conflict; its create may be ours with a lost response."""
        meta = job["metadata"]
        owners = (found["metadata"].get("ownerReferences") or ()) if create.shared else ()
        # A deleted job of this name owns the claim, so the garbage collector will delete it.
        is_collected = any(each.get("kind") == names.DDPJOBS.kind and each.get("uid") != meta["uid"] for each in owners)
        if is_collected or "deletionTimestamp" in found["metadata"]:
            outcome.add(NAME_TERMINATING, create, f"{create.resource.kind} {create.name} is being deleted")
            return
        if owner_uid(found) == meta["uid"] or (create.shared and is_claim_of(found, meta["name"])):
            await self._take(job, create, found, outcome)
            if create.shared and (note := adoption(found, job)):
                self._announce(job, note)
            return
        what = f"{create.resource.kind} {create.name} exists and does not belong to this DDPJob"
        todo = "delete or rename it, name it in checkpoint.claimName" if create.shared else "delete or rename it"
        outcome.add("NameConflict", create, f"{what}: {todo}, or give the DDPJob another name")


def _changed_field(sent: Json, found: Json) -> str | None:
    """Return the field by which the operator recognizes a pod and that is not as it was sent; None if all are."""
    wanted, meta = sent["metadata"], found["metadata"]
    if meta["name"] != wanted["name"]:
        return "metadata.name"
    if owner_uid(found) != owner_uid(sent):
        return "metadata.ownerReferences"
    given, labels = meta.get("labels") or {}, (key for key in wanted["labels"] if key.startswith(f"{names.GROUP}/"))
    return next((f"the label {key}" for key in labels if given.get(key) != wanted["labels"][key]), None)


def _batches(items: Sequence[Create], cautious: bool) -> Iterator[Sequence[Create]]:
    """Yield all items at once, or if ``cautious`` batches of 1, 2, 4, ... items."""
    if not cautious:
        yield items
        return
    start, size = 0, 1
    while start < len(items):
        yield items[start : start + size]
        start, size = start + size, size * 2


def _raise_first(results: Sequence[BaseException | None]) -> None:
    for error in filter(None, results):
        raise error
