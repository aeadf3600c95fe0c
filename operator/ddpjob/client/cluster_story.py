"""The pods of a job on a cluster, and the Events about them and about the job."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.client.connection import Connection, Query, path_of
from ddpjob.client.job import DDPJob

_PAGE = 500  # a pod takes 20 KB
_MOST_PAGES = 20


def pods_of(connection: Connection, job: DDPJob) -> list[Json]:
    """Return the pods of all attempts that the cluster still has. Raises ``DDPJobError``."""
    return list(_pages(connection, names.PODS, job, {"labelSelector": f"{names.LABEL_JOB_UID}={job.uid}"}))


def events_of(connection: Connection, job: DDPJob) -> list[Json]:
    """Return the Events about the job, its pods, also those that are gone, and its claim. Raises ``DDPJobError``."""
    uid, prefix = str(job.uid), f"{names.service_name(job.name, str(job.uid))}-"
    about: tuple[Query, ...] = (
        {"fieldSelector": f"involvedObject.kind={names.DDPJOBS.kind},involvedObject.uid={uid}"},
        {"fieldSelector": f"involvedObject.kind=Pod,involvedObject.namespace={job.namespace}"},
        {"fieldSelector": f"involvedObject.kind={names.CLAIMS.kind},involvedObject.name={names.claim_name(job.name)}"},
    )
    with ThreadPoolExecutor(len(about), thread_name_prefix="ddpjob-events") as pool:
        of_job, of_pods, of_claim = pool.map(lambda query: list(_pages(connection, names.EVENTS, job, query)), about)
    own = [event for event in of_pods if str(event["involvedObject"].get("name")).startswith(prefix)]
    return [*of_job, *own, *of_claim]


def _pages(connection: Connection, resource: Resource, job: DDPJob, query: Query) -> Iterator[Json]:
    token: str | None = None
    for _ in range(_MOST_PAGES):
        page = connection.request("GET", path_of(resource, job.namespace), {**query, "limit": _PAGE, "continue": token})
        yield from page.get("items") or ()
        token = (page.get("metadata") or {}).get("continue")
        if not token:
            return
