"""``GET /ranks`` of a job on a cluster: the API server connects to the pod of node 0, with the rights of the user."""

from collections.abc import Iterable, Iterator

from ddpjob.api import names
from ddpjob.client.connection import TROUBLES, Connection, path_of, request_error
from ddpjob.client.job import DDPJob
from ddpjob.client.ranks import LONGEST, SECONDS, no_ranks, require_running
from ddpjob.errors import NotAllowedError


def ask_launcher(connection: Connection, job: DDPJob) -> bytes:
    """Return the answer of the launcher of node 0. Raises ``DDPJobError``."""
    pod = names.pod_name(job.name, str(job.uid), require_running(job), 0)
    port = job.spec.rendezvous.progress_port
    path = path_of(names.PODS, job.namespace, f"{pod}:{port}", "proxy/ranks")
    try:
        response = connection.send("GET", path, seconds=min(SECONDS, connection.timeout))
        try:
            return b"".join(_at_most(response.stream(65_536)))
        finally:
            response.close()
            response.release_conn()
    except ValueError as fault:
        raise no_ranks(job, f"the answer of port {port} of {pod} is too long") from fault
    except TROUBLES as trouble:
        error = request_error(trouble)
        if error.status == 403:
            raise NotAllowedError(
                f"you may not reach the launcher of {job.name}: {error.message}",
                "top needs the right to get pods/proxy, which the role edit of Kubernetes has and view has not",
                f"kubectl auth can-i get pods --subresource=proxy -n {job.namespace}",
            ) from trouble
        if error.status == 401:
            raise connection.explained(error) from trouble
        raise no_ranks(job, f"port {port} of {pod}: {error.message}") from trouble


def _at_most(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the blocks. Raises ``ValueError`` if they are too long."""
    size = 0
    for block in blocks:
        size += len(block)
        if size > LONGEST:
            raise ValueError
        yield block
