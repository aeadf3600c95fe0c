"""Act, the last phase of a reconcile: carries out a plan's deletes and creates, and says what could not be done.

Deterministic names make the API server the lock: an object that exists already is ours and adopted, or somebody
else's and never touched. Every answer goes into the cache at once, so that the next plan does not act twice.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ddpjob.api import names
from ddpjob.api.wire import Json
from ddpjob.cluster.base import (
    AlreadyExists,
    Cluster,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceTerminating,
    NotFound,
    Unavailable,
)
from ddpjob.controller.cache import Cache
from ddpjob.engine.actions import Create, Delete, Plan, Problem
from ddpjob.engine.observe import owner_uid

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What is left to do after acting.

    problems: refusals and conflicts for the next plan to show.
    again: an object of the wanted name is on its way out; try again a little later.
    held: creates were put off because the last ones were refused; nothing was learnt.
    """

    problems: tuple[Problem, ...] = ()
    again: bool = False
    held: bool = False


class _TerminatingError(Exception):
    """An object of the wanted name still exists, but not for long."""


class _NamespaceGoneError(Exception):
    """Nothing can be made in this namespace any more, and nothing needs to be."""


class Executor:
    """Carries out plans with at most ``concurrency`` requests at a time, over all jobs."""

    def __init__(self, cluster: Cluster, cache: Cache, concurrency: int) -> None:
        self._cluster = cluster
        self._cache = cache
        self._slots = asyncio.Semaphore(concurrency)

    async def act(self, job: Json, plan: Plan, *, cautious: bool = False) -> Outcome:
        """Deletes, then the creates phase by phase. Raises the ``ClusterError`` of a call without an answer.

        cautious: the last try was refused; feel the way with 1, 2, 4, ... creates at a time.
        """
        namespace = job["metadata"]["namespace"]
        await self.delete(namespace, plan.deletes)
        for phase in plan.creates:
            try:
                outcome = await self._create_phase(job, phase, cautious)
            except _NamespaceGoneError:
                logger.info("namespace %s is going away: nothing is created there", namespace)
                return Outcome()
            if outcome.problems or outcome.again:
                return outcome
        return Outcome()

    async def delete(self, namespace: str, deletes: Sequence[Delete]) -> None:
        """All deletes at once; one that fails does not keep the others from being tried."""
        if not deletes:
            return
        results = await asyncio.gather(*(self._delete(namespace, d) for d in deletes), return_exceptions=True)
        _raise_first(results)

    async def _delete(self, namespace: str, delete: Delete) -> None:
        uid = delete.uid
        try:
            async with self._slots:
                left = await self._cluster.delete(delete.resource, namespace, delete.name, uid=uid)
        except (NotFound, Conflict):  # gone, or replaced by another object of that name
            left = {}
        meta = left.get("metadata", {})
        lingers = meta.get("finalizers") or (meta.get("deletionGracePeriodSeconds") or 0) > 0
        if meta.get("uid") == uid and lingers:
            self._cache.put(delete.resource, left)
        else:
            self._cache.remove(delete.resource, namespace, delete.name, uid)

    async def _create_phase(self, job: Json, phase: Sequence[Create], cautious: bool) -> Outcome:
        problems: list[Problem] = []
        again = False
        for batch in _batches(phase, cautious):
            results = await asyncio.gather(
                *(self._create(job, create, problems) for create in batch), return_exceptions=True
            )
            again = again or any(isinstance(result, _TerminatingError) for result in results)
            _raise_first([result for result in results if not isinstance(result, _TerminatingError)])
            if problems:
                break
        if any(problem.reason != "CreateFailed" for problem in problems):
            await self._take_back(job, phase)
        return Outcome(tuple(problems), again)

    async def _create(self, job: Json, create: Create, problems: list[Problem]) -> None:
        namespace = job["metadata"]["namespace"]
        try:
            async with self._slots:
                if problems:
                    return  # a sibling was refused meanwhile: what is not there need not be taken back
                created = await self._cluster.create(create.resource, namespace, create.body)
            self._cache.put(create.resource, created)
        except AlreadyExists:
            await self._adopt(job, create, problems)
        except (NamespaceTerminating, NotFound) as error:
            raise _NamespaceGoneError from error
        except (Forbidden, Invalid) as error:
            problems.append(Problem("CreateRefused", create.resource, create.name, str(error)))
        except Unavailable as error:
            if error.code is None:
                raise
            # The server did answer, an admission webhook that is down for example: that is worth showing.
            problems.append(Problem("CreateFailed", create.resource, create.name, str(error)))

    async def _adopt(self, job: Json, create: Create, problems: list[Problem]) -> None:
        """Somebody made an object of this name before: we, perhaps, in an answer that was lost."""
        meta = job["metadata"]
        try:
            async with self._slots:
                found = await self._cluster.get(create.resource, meta["namespace"], create.name)
        except NotFound as error:
            raise _TerminatingError from error
        ours = owner_uid(found) == meta["uid"]
        leaving = "deletionTimestamp" in found["metadata"] or _of_another_ddpjob(found, meta["uid"])
        if (ours or create.shared) and leaving:
            raise _TerminatingError
        if ours or create.shared:
            self._cache.put(create.resource, found)
            return
        message = (
            f"{create.resource.kind} {create.name} exists already and does not belong to this DDPJob: "
            f"delete it or rename it, or give the DDPJob another name"
        )
        problems.append(Problem("NameConflict", create.resource, create.name, message))

    async def _take_back(self, job: Json, phase: Sequence[Create]) -> None:
        """No part of a gang holds resources while the rest is refused: it would wait for peers that cannot come."""
        attempts = {_attempt(create.body) for create in phase if create.resource is names.PODS}
        pods = [pod for pod in self._cache.pods(job["metadata"]["uid"]) if _attempt(pod) in attempts]
        deletes = [
            Delete(names.PODS, pod["metadata"]["name"], pod["metadata"]["uid"])
            for pod in pods
            if owner_uid(pod) == job["metadata"]["uid"] and not pod["metadata"].get("deletionTimestamp")
        ]
        await self.delete(job["metadata"]["namespace"], deletes)


def _of_another_ddpjob(found: Json, uid: str) -> bool:
    """A claim of a deleted job of this name (claimRetention: Delete), which the garbage collector is about to take."""
    owners = found["metadata"].get("ownerReferences") or ()
    return any(owner.get("kind") == names.DDPJOBS.kind and owner.get("uid") != uid for owner in owners)


def _attempt(pod: Json) -> str | None:
    attempt: str | None = pod["metadata"].get("labels", {}).get(names.LABEL_ATTEMPT)
    return attempt


def _batches(items: Sequence[T], cautious: bool) -> Iterator[Sequence[T]]:
    """All at once, or doubling from one."""
    start, size = 0, 1 if cautious else len(items)
    while start < len(items):
        yield items[start : start + size]
        start, size = start + size, size * 2


def _raise_first(results: Sequence[BaseException | None]) -> None:
    """After all have ended: a namespace that is gone settles everything, then whatever else went wrong."""
    errors = [result for result in results if result is not None]
    for error in sorted(errors, key=lambda error: not isinstance(error, _NamespaceGoneError)):
        raise error
