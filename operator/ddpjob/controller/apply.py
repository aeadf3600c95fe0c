"""Carry out the deletes and creates of a plan, and report what failed.

Names are deterministic, so a create that is sent twice fails with AlreadyExists. An existing object is adopted if the
job owns it, and otherwise left alone. Every response updates the cache at once, so the next plan does not repeat it.
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
from ddpjob.controller.slots import Slots
from ddpjob.engine.actions import Create, Delete, Plan, Problem
from ddpjob.engine.observe import owner_uid

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What remains to be done after carrying out a plan.

    problems: refused creates and name conflicts, for the status.
    again: an object with the name to create is being deleted; retry soon.
    """

    problems: tuple[Problem, ...] = ()
    again: bool = False


class _TerminatingError(Exception):
    """An object with the name to create is being deleted."""


class _NamespaceGoneError(Exception):
    """The namespace is being deleted; nothing can be created in it."""


class Executor:
    """Carries out plans of all jobs, with at most ``concurrency`` requests at a time, shared fairly (``Slots``)."""

    def __init__(self, cluster: Cluster, cache: Cache, concurrency: int) -> None:
        self._cluster = cluster
        self._cache = cache
        self._slots = Slots(concurrency)

    async def act(self, job: Json, plan: Plan, *, cautious: bool = False) -> Outcome:
        """Send the deletes, then the creates phase by phase.

        cautious: the last creates were refused; send 1, 2, 4, ... creates at a time until one is refused.

        Raises:
            ClusterError: a request got no response, so its effect is unknown.
        """
        namespace = job["metadata"]["namespace"]
        await self.delete(namespace, plan.deletes)
        for phase in plan.creates:
            try:
                outcome = await self._create_phase(job, phase, cautious)
            except _NamespaceGoneError:
                logger.info("namespace %s is being deleted; nothing is created in it", namespace)
                return Outcome()
            if outcome.problems or outcome.again:
                return outcome
        return Outcome()

    async def delete(self, namespace: str, deletes: Sequence[Delete]) -> None:
        """Send all deletes concurrently, then raise the first error."""
        if not deletes:
            return
        results = await asyncio.gather(*(self._delete(namespace, d) for d in deletes), return_exceptions=True)
        _raise_first(results)

    async def _delete(self, namespace: str, delete: Delete) -> None:
        uid = delete.uid
        try:
            async with self._slots.take(namespace):
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
            async with self._slots.take(namespace, job["metadata"]["uid"]):
                if problems:
                    return  # another create was refused meanwhile
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
            # The server responded, for example because an admission webhook is down; the status shows its message.
            problems.append(Problem("CreateFailed", create.resource, create.name, str(error)))

    async def _adopt(self, job: Json, create: Create, problems: list[Problem]) -> None:
        """Adopt the existing object of this name, or report a conflict; its create may be ours with a lost response."""
        meta = job["metadata"]
        try:
            async with self._slots.take(meta["namespace"], meta["uid"]):
                found = await self._cluster.get(create.resource, meta["namespace"], create.name)
        except NotFound as error:
            raise _TerminatingError from error
        ours = owner_uid(found) == meta["uid"]
        is_terminating = "deletionTimestamp" in found["metadata"] or _of_another_ddpjob(found, meta["uid"])
        if (ours or create.shared) and is_terminating:
            raise _TerminatingError
        if ours or create.shared:
            self._cache.put(create.resource, found)
            return
        message = (
            f"{create.resource.kind} {create.name} exists and does not belong to this DDPJob: "
            f"delete or rename it, or give the DDPJob another name"
        )
        problems.append(Problem("NameConflict", create.resource, create.name, message))

    async def _take_back(self, job: Json, phase: Sequence[Create]) -> None:
        """Delete the created pods of a gang that is incomplete; they would hold resources and wait for their peers."""
        attempts = {_attempt(create.body) for create in phase if create.resource is names.PODS}
        pods = [pod for pod in self._cache.pods(job["metadata"]["uid"]) if _attempt(pod) in attempts]
        deletes = [
            Delete(names.PODS, pod["metadata"]["name"], pod["metadata"]["uid"])
            for pod in pods
            if owner_uid(pod) == job["metadata"]["uid"] and not pod["metadata"].get("deletionTimestamp")
        ]
        await self.delete(job["metadata"]["namespace"], deletes)


def _of_another_ddpjob(found: Json, uid: str) -> bool:
    """Return whether a deleted job of this name owns the claim, so that the garbage collector will delete it."""
    owners = found["metadata"].get("ownerReferences") or ()
    return any(owner.get("kind") == names.DDPJOBS.kind and owner.get("uid") != uid for owner in owners)


def _attempt(pod: Json) -> str | None:
    attempt: str | None = pod["metadata"].get("labels", {}).get(names.LABEL_ATTEMPT)
    return attempt


def _batches(items: Sequence[T], cautious: bool) -> Iterator[Sequence[T]]:
    """Yield all items at once, or if ``cautious`` batches of 1, 2, 4, ... items."""
    start, size = 0, 1 if cautious else len(items)
    while start < len(items):
        yield items[start : start + size]
        start, size = start + size, size * 2


def _raise_first(results: Sequence[BaseException | None]) -> None:
    """Raise the first error, but a namespace that is being deleted before any other."""
    errors = [result for result in results if result is not None]
    for error in sorted(errors, key=lambda error: not isinstance(error, _NamespaceGoneError)):
        raise error
