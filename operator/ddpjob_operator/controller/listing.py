"""Apply what the API server answers to a GET or a LIST to the cache."""

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import Cluster, NotFound
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.entries import version_number


class VersionsWentBackError(Exception):
    """A LIST is older than what was seen before: etcd was restored. No cached version says anything any more.

    It ends the process, because a new one begins with an empty cache.
    """

    def __init__(self) -> None:
        super().__init__("the API server's versions went back (was etcd restored?)")


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


async def list_into(
    cache: Cache, cluster: Cluster, resource: Resource, scope: str | None, *, job_uid: str = ""
) -> tuple[int, str]:
    """Apply a LIST of the operator's objects to the cache; return the number of changed objects, and its version.

    Cached objects that it would contain, but does not, and that are not newer than it, are removed. Of earlier pages
    only the uids are kept.

    scope: the namespace, or None for all.
    job_uid: list the pods of this job only. They also replace cached ones of the same version, which may stand for
    another state since a restore of etcd.

    Raises:
        VersionsWentBackError
    """
    selector = f"{names.LABEL_JOB_UID}={job_uid}" if job_uid else names.SELECTORS.get(resource)
    present, newest, limit, version, changes = set[str](), cache.newest(resource), 0, "", 0
    async for page in cluster.pages(resource, scope, selector):
        if page.is_first:
            present.clear()
            version, limit = page.resource_version, version_number(page.resource_version)
            if 0 < limit < newest:
                raise VersionsWentBackError
        for obj in page.items:
            if cache.contradicts(resource, obj, limit):
                raise VersionsWentBackError
            changes += cache.put(resource, obj, same_version=bool(job_uid))
            present.add(obj["metadata"]["uid"])
        del page  # or this task would hold it while the next one arrives
    for entry in cache.entries(resource):
        is_covered = entry.value.job_uid == job_uid if job_uid else entry.is_labelled
        if is_covered and scope in (None, entry.namespace) and entry.uid not in present and entry.version <= limit:
            place = entry.namespace, entry.name, entry.uid
            changes += cache.remove(resource, *place, version=limit or None)
    return changes, version
