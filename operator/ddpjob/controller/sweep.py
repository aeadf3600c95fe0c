"""List all objects at the start and once a minute, to find changes that the watches missed.

When its watch of the jobs expires, kopf lists again, but reports no objects that were deleted in between. Claims are
not watched. A change that a sweep finds updates the cache like a watch event.
"""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ddpjob.api import names
from ddpjob.api.backoff import doubling
from ddpjob.api.names import Resource
from ddpjob.cluster.base import Cluster, ClusterError, Forbidden, NotFound, Unauthorized
from ddpjob.controller.cache import Cache, Listing
from ddpjob.controller.metrics import Metrics

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
"""Delay after the first failure in a row; it doubles."""
MAX_START_SECONDS = 5.0
"""The longest delay before the first sweep has succeeded. Later, it is the interval."""
KINDS: Sequence[tuple[Resource, str | None]] = (
    # Pods before jobs, so that a job's pods are cached when it is reconciled.
    (names.CLAIMS, names.SELECTORS[names.CLAIMS]),
    (names.SERVICES, names.SELECTORS[names.SERVICES]),
    (names.PODS, names.SELECTORS[names.PODS]),
    (names.DDPJOBS, None),
)


@dataclass(kw_only=True)
class Sweeper:
    """``start`` fills the cache before the first reconcile; ``run`` sweeps every ``interval`` seconds.

    A sweep that failed is repeated sooner: events that an interrupted watch has missed are found by nothing else.
    """

    cluster: Cluster
    cache: Cache
    scopes: Sequence[str | None]
    interval: float
    metrics: Metrics
    _wanted: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _started: bool = field(default=False, init=False)

    def want(self) -> None:
        """Sweep soon, because a watch was interrupted and may have missed events."""
        self._wanted.set()

    async def start(self) -> None:
        """Sweep for the first time; log each failure and retry until the sweep succeeds."""
        for failures in itertools.count(1):
            try:
                await self.sweep()
                break
            except ClusterError as error:
                delay = doubling(RETRY_SECONDS, failures, MAX_START_SECONDS)
                logger.error("cannot start yet, retrying in %g s: %s", delay, explain(error))
            await asyncio.sleep(delay)
        self._started = True

    async def run(self) -> None:
        """Sweep periodically until cancelled; repeat a failed sweep soon, and then ever less often."""
        failures = 0
        while True:
            delay = doubling(RETRY_SECONDS, failures, self.interval) if failures else self.interval
            try:
                await asyncio.wait_for(self._wanted.wait(), delay)
                await asyncio.sleep(1.0)  # both watches are often interrupted together; sweep once for both
            except TimeoutError:
                pass
            self._wanted.clear()
            try:
                changed = await self.sweep()
            except ClusterError as error:
                failures += 1
                logger.warning("sweep failed, the watches continue: %s", explain(error))
                continue
            failures = 0
            if changed:
                logger.info("the sweep found %d changed object(s) that watch events missed", changed)

    async def sweep(self) -> int:
        """List all objects, which queues the jobs of the changed ones; return their number."""
        changed = 0
        for resource, selector in KINDS:
            changes = 0
            for scope in self.scopes:
                changes += (await list_into(self.cache, self.cluster, resource, scope, selector))[0]
            if changes and self._started:
                self.metrics.sweep_heals.labels(resource.kind).inc(changes)
            changed += changes
        for resource in (names.SERVICES, names.CLAIMS):
            await self._verify_unlabelled(resource)
        return changed

    async def _verify_unlabelled(self, resource: Resource) -> None:
        """Read adopted objects without the operator's label, which the LISTs do not return."""
        for entry in self.cache.entries(resource):
            if entry.is_labelled:
                continue
            try:
                self.cache.put(resource, await self.cluster.get(resource, entry.namespace, entry.name))
            except NotFound:
                self.cache.remove(resource, entry.namespace, entry.name, entry.uid)


async def list_into(
    cache: Cache, cluster: Cluster, resource: Resource, scope: str | None, selector: str | None
) -> tuple[int, str]:
    """Apply a LIST to the cache; return the number of changed objects and the version of the LIST.

    scope: the namespace, or None for all.
    """
    listing = Listing(
        cache,
        resource,
        lambda entry: (scope is None or entry.namespace == scope) and (selector is None or entry.is_labelled),
    )
    version = ""
    async for page in cluster.pages(resource, scope, selector):
        version = page.resource_version if page.is_first else version
        listing.take(page)
        del page  # or this task would hold it while the next one arrives
    return listing.finish(), version


def explain(error: ClusterError) -> str:
    """Return the error's text with what to do about it."""
    if isinstance(error, NotFound):
        return (
            f"the API server does not serve {names.DDPJOBS.plural}.{names.GROUP}/{names.VERSION}: install the "
            "CustomResourceDefinition (kubectl apply -f manifests/crd.yaml, or helm install of the chart)"
        )
    if isinstance(error, Forbidden):
        return f"{error}: give the operator's service account the role of manifests/rbac.yaml or of the chart"
    if isinstance(error, Unauthorized):
        return f"the API server does not accept the operator's credentials: {error}"
    return str(error)
