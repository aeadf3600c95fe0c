"""Apply what the API server answers to a GET or a LIST to the cache."""

from collections.abc import Callable

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import Cluster, NotFound, Page
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.entries import Entry, version_number


class VersionsWentBackError(Exception):
    """A LIST is older than what was seen before: etcd was restored. No cached version says anything any more.

    It ends the process, because a new one begins with an empty cache.
    """

    def __init__(self) -> None:
        super().__init__("the API server's versions went back (was etcd restored?)")


class Listing:
    """Applies a LIST to the cache page by page: ``take`` each page, then ``finish``. Create it before the request.

    covers: whether the LIST would contain a given object. Cached objects that it covers, but does not contain, and that
    are not newer than it, are removed at the end. Of earlier pages only the uids are kept. ``take`` raises
    ``VersionsWentBackError``.
    """

    def __init__(
        self, cache: Cache, resource: Resource, covers: Callable[[Entry], bool], *, same_version: bool = False
    ) -> None:
        self._cache = cache
        self._same_version = same_version
        self._resource = resource
        self._covers = covers
        self._present: set[str] = set()
        self._newest = cache.newest(resource)
        self._limit = 0
        self._changes = 0

    def take(self, page: Page) -> None:
        """Store the objects of a page."""
        if page.is_first:
            self._present.clear()
            self._limit = version_number(page.resource_version)
            if 0 < self._limit < self._newest:
                raise VersionsWentBackError
        for obj in page.items:
            if self._cache.contradicts(self._resource, obj, self._limit):
                raise VersionsWentBackError
            self._changes += self._cache.put(self._resource, obj, same_version=self._same_version)
            self._present.add(obj["metadata"]["uid"])

    def finish(self) -> int:
        """Remove what no page contained; return the number of changed objects."""
        for entry in self._cache.entries(self._resource):
            if entry.uid in self._present or not self._covers(entry) or entry.version > self._limit:
                continue
            place = entry.namespace, entry.name, entry.uid
            self._changes += self._cache.remove(self._resource, *place, version=self._limit or None)
        return self._changes


async def read_into(
    cache: Cache, cluster: Cluster, resource: Resource, place: tuple[str, str], uid: str, *, wake: bool = True
) -> Json | None:
    """Apply a GET to the cache; return the object, or None if none has the name.

    uid: of the cached object, which is removed if none has the name; empty if none is cached.
    wake: as of ``Cache.put``.
    """
    try:
        found = await cluster.get(resource, *place)
    except NotFound:
        if uid:
            cache.remove(resource, *place, uid)
        return None
    cache.put(resource, found, wake=wake)
    return found


async def list_into(cache: Cache, cluster: Cluster, resource: Resource, scope: str | None) -> tuple[int, str]:
    """Apply a LIST of the operator's objects to the cache; return the number of changed objects, and its version.

    scope: the namespace, or None for all.
    """
    listing = Listing(cache, resource, lambda entry: scope in (None, entry.namespace) and entry.is_labelled)
    version = ""
    async for page in cluster.pages(resource, scope, names.SELECTORS.get(resource)):
        version = page.resource_version if page.is_first else version
        listing.take(page)
        del page  # or this task would hold it while the next one arrives
    return listing.finish(), version
