"""List all objects at the start and once a minute, to find changes that the watches missed.

When its watch of the jobs expires, kopf lists again, but reports no objects that were deleted in between. Claims are
not watched. A change that a sweep finds updates the cache like a watch event.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpjob.api import names
from ddpjob.api.backoff import doubling
from ddpjob.api.names import Resource
from ddpjob_operator.cluster.base import (
    Cluster,
    ClusterError,
    Forbidden,
    NotServed,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.listing import list_into, read_into

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
"""Delay after the first failure in a row; it doubles."""
MAX_START_SECONDS = 5.0
"""The longest delay before the first sweep has succeeded. Later, it is the interval."""
KINDS = (names.CLAIMS, names.SERVICES, names.NETWORK_POLICIES, names.PODS, names.DDPJOBS)
"""Pods before jobs, so that a job's pods are cached when it is reconciled."""
OPTIONAL = frozenset({names.NETWORK_POLICIES, *names.SCHEDULING_KINDS})
"""Kinds that only some jobs use, whose watch need not be open: a refused create, or a waiting job, shows it."""


@dataclass(kw_only=True)
class Sweeper:
    """Fills the cache, and then sweeps every ``interval`` seconds: each scope by itself, none waits for another.

    A sweep that failed is repeated sooner: events that an interrupted watch has missed are found by nothing else.

    families: kinds of PodGroups and Workloads to list, of each sequence the first that the API server serves.
    ``failures``: why the last sweep of a scope failed.
    """

    cluster: Cluster
    cache: Cache
    scopes: Sequence[str | None]
    interval: float
    families: Sequence[Sequence[Resource]] = ()
    failures: dict[str | None, str] = field(default_factory=dict, init=False)
    _served_changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _filled: dict[str | None, asyncio.Event] = field(init=False)
    _wanted: dict[str | None, asyncio.Event] = field(init=False)

    def __post_init__(self) -> None:
        self._filled = {scope: asyncio.Event() for scope in self.scopes}
        self._wanted = {scope: asyncio.Event() for scope in self.scopes}

    def want(self, scope: str | None = None) -> None:
        """Sweep a scope soon, because a watch was interrupted and may have missed events."""
        self._wanted[scope].set()

    async def filled(self, scope: str | None) -> None:
        """Wait until all objects of a scope have been listed once."""
        await self._filled[scope].wait()

    async def serves(self, kind: Resource) -> None:
        """Wait until the API server serves a kind of PodGroup or Workload."""
        while kind.api_version not in (self.cache.served or ()):
            self._served_changed.clear()
            await self._served_changed.wait()

    async def run(self) -> None:
        """Sweep every scope, for the first time and then periodically, until cancelled."""
        # The scopes sweep in turn, not all at the same time.
        turns = (self.interval * number / len(self.scopes) for number in range(1, len(self.scopes) + 1))
        await asyncio.gather(*map(self._serve, self.scopes, turns))

    async def _serve(self, scope: str | None, second: float) -> None:
        """Sweep one scope until cancelled: at once, after ``second`` seconds, and then once in each interval.

        A failed sweep is repeated soon, and then ever less often.
        """
        wanted, filled, failures, delay = self._wanted[scope], self._filled[scope], 0, 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wanted.wait(), delay)
                await asyncio.sleep(1.0)  # both watches are often interrupted together; sweep once for both
            wanted.clear()
            try:
                changed = await self.sweep(scope)
            except ClusterError as error:
                failures += 1
                delay = doubling(RETRY_SECONDS, failures, self.interval if filled.is_set() else MAX_START_SECONDS)
                known, why = self.failures.get(scope), explain(error)
                self.failures[scope] = why
                level = logging.DEBUG if why == known else logging.WARNING
                where = f"namespace {scope}" if scope else "the objects"
                logger.log(level, "cannot list %s, trying again: %s", where, why)
                continue
            failures, delay = 0, self.interval if filled.is_set() else second
            if changed and filled.is_set():
                logger.info("the sweep found %d changed object(s) that watch events missed", changed)
            filled.set()

    async def sweep(self, scope: str | None) -> int:
        """List all objects of a scope, which queues the jobs of the changed ones; return their number."""
        changed = await self._sweep_groups(scope)
        for resource in KINDS:
            try:
                changes, _ = await list_into(self.cache, self.cluster, resource, scope)
            except Forbidden:
                if resource not in OPTIONAL:
                    raise
                continue  # the watch of this kind logs it
            changed += changes
        for resource in (names.SERVICES, names.NETWORK_POLICIES, names.CLAIMS, *names.SCHEDULING_KINDS):
            await self._verify_unlabelled(resource, scope)
        if self.failures.pop(scope, ""):
            logger.info("%s is listed again", f"namespace {scope}" if scope else "everything")
        return changed

    async def _sweep_groups(self, scope: str | None) -> int:
        """List PodGroups and Workloads, and so learn which kinds are served: their systems may come at any time."""
        served, changed = frozenset[str](), 0
        for family in self.families:
            version, changes = await self._sweep_family(scope, family)
            served |= {version} if version else frozenset()
            changed += changes
        if self.families and served != self.cache.served:
            logger.info("of PodGroups and Workloads the API server serves %s", ", ".join(sorted(served)) or "none")
            self.cache.served = served
            self._served_changed.set()
            self.cache.wake_jobs()
        return changed

    async def _sweep_family(self, scope: str | None, family: Sequence[Resource]) -> tuple[str, int]:
        """List the first kind that is served; return its API version, empty if none is, and the number of changes."""
        for kind in family:
            try:
                changes, _ = await list_into(self.cache, self.cluster, kind, scope)
            except NotServed:
                continue
            except (Forbidden, Unavailable, TooManyRequests) as error:
                logger.warning("cannot list %s of %s: %s", kind.plural, kind.api_version, explain(error))
                if self.cache.served is not None:
                    return next((each.api_version for each in family if each.api_version in self.cache.served), ""), 0
                # Never listed: a refused create then shows in the status of the job that needs it.
                return kind.api_version, 0
            return kind.api_version, changes
        return "", 0

    async def _verify_unlabelled(self, resource: Resource, scope: str | None) -> None:
        """Read adopted objects without the operator's label, which the LISTs do not return."""
        for entry in self.cache.entries(resource):
            if entry.is_labelled or scope not in (None, entry.namespace):
                continue
            try:
                await read_into(self.cache, self.cluster, resource, (entry.namespace, entry.name), entry.uid)
            except ClusterError:
                if resource in OPTIONAL:
                    continue  # Kueue or a gang scheduler is away, which keeps no other object from being read
                raise


def explain(error: ClusterError) -> str:
    """Return the error's text with what to do about it."""
    if isinstance(error, NotServed):
        return (
            f"the API server does not serve {names.DDPJOBS.plural}.{names.GROUP}/{names.VERSION}: install the "
            "CustomResourceDefinition (kubectl apply -f manifests/crd.yaml, or helm install of the chart)"
        )
    if isinstance(error, Forbidden):
        return f"{error}: give the operator's service account the role of manifests/rbac.yaml or of the chart"
    if isinstance(error, Unauthorized):
        return f"the API server does not accept the operator's credentials: {error}"
    return str(error)
