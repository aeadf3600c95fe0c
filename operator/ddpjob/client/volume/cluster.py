"""The volume of a job of a cluster: a pod with the job's image reads it, from the first use to the end."""

import secrets
import time
from collections.abc import Generator, Iterator

from pydantic import ValidationError

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.pod_view import PodView, pod_view
from ddpjob.client.connection import ApiConnection, is_absent, path_of
from ddpjob.client.job import DDPJob
from ddpjob.client.volume import reader_pod
from ddpjob.client.volume.contents import CutError, OnProgress, PullProgress, Volume, ignore, no_volume
from ddpjob.engine.desired import Job
from ddpjob.errors import DDPJobError, InvalidJobError, JobExistsError, NotAllowedError, UnavailableError

START_SECONDS = 300.0
"""How long a pod may take to start: the image may have to be pulled."""
_PAUSE = 0.5
_STARTING = "the pod that reads the volume starts"


class PodReader:
    """Runs ``reader`` in a pod. Use as a context manager, which returns the volume and deletes the pod.

    start_seconds: limit for the start of the pod.

    Raises:
        InvalidJobError: the job has no volume.
    """

    def __init__(self, connection: ApiConnection, job: DDPJob, on_progress: OnProgress | None) -> None:
        try:
            self._job = Job.of(job.manifest)
        except ValidationError as error:
            raise InvalidJobError(f"the DDPJob {job.name} is wrong", str(error), f"ddpjob why {job.name}") from error
        if self._job.spec.checkpoint is None:
            raise no_volume(job.name)
        self._directory = self._job.spec.checkpoint.mount_path
        self._connection, self._on_progress = connection, on_progress or ignore
        self._pod = ""
        self.start_seconds = START_SECONDS

    def __enter__(self) -> Volume:
        return Volume(self._job.name, self._job.namespace, self._job.claim, self._directory, self.output)

    def __exit__(self, *_: object) -> None:
        self._delete()

    def output(self, command: str, *arguments: str) -> Generator[bytes, None, None]:
        """Yield the output of ``list`` or ``send`` on the volume. Raises ``CutError``."""
        from ddpjob.client.volume.pod_exec import output_of  # noqa: PLC0415 - the WebSocket takes a while to import

        self._until_ready()
        words = reader_pod.command(command, self._directory, *arguments)
        yield from output_of(self._connection, self._job.namespace, self._pod, names.TRAINER_CONTAINER, words)

    def _until_ready(self) -> None:
        """Return when the pod runs; make another one if it has ended."""
        pod = self._read() if self._pod else None
        if pod is None or pod.ended or pod.deleting:
            if self._pod:
                self._delete()
                self._connection.request("GET", path_of(names.DDPJOBS, self._job.namespace, self._job.name))
            pod = self._create()
        begin = time.monotonic()
        while pod.state != "running" or pod.deleting:
            if (error := reader_pod.hopeless(pod, self._job.name)) is not None:
                raise error
            if pod.ended or pod.deleting:
                raise CutError(f"the pod {self._pod} has ended")
            if time.monotonic() - begin > self.start_seconds:
                raise reader_pod.late(pod, self._job.namespace, self.start_seconds)
            why = reader_pod.obstacle(pod)
            self._on_progress(PullProgress(waiting=f"{_STARTING}: {why}" if why else _STARTING))
            time.sleep(_PAUSE)
            if (found := self._read()) is None:
                raise CutError(f"the pod {self._pod} was deleted")
            pod = found

    def _create(self) -> PodView:
        claim = self._claim()
        node = reader_pod.node_for(claim, self._pods())
        self._on_progress(PullProgress(waiting=_STARTING))
        # The name is known before the request, so that the pod can be deleted also if the answer never comes.
        self._pod = f"{self._job.service}-reader-{secrets.token_hex(3)}"
        body = reader_pod.reader_pod(self._job, self._pod, node)
        try:
            return pod_view(self._connection.request("POST", path_of(names.PODS, self._job.namespace), body=body))
        except JobExistsError:  # the answer to the first try was lost
            if (found := self._read()) is None:
                raise CutError(f"the pod {self._pod} was deleted") from None
            return found
        except NotAllowedError:
            self._pod = ""  # there is none to delete
            raise

    def _claim(self) -> Json:
        name, namespace = self._job.claim, self._job.namespace
        claim = self._connection.found(names.CLAIMS, namespace, name) or {"status": {"phase": "absent"}}
        phase = (claim.get("status") or {}).get("phase", "Pending")
        if phase != "Bound":  # a pod would bind it where the job may not be able to run
            raise UnavailableError(
                f"the claim {name} of {self._job.name} is {phase}, so it holds nothing",
                "it was deleted with its checkpoints, no pod of the job has mounted it yet, or nothing provisions its "
                "storage class",
                f"ddpjob why {self._job.name}; kubectl get pvc -n {namespace}",
            )
        return claim

    def _pods(self) -> Iterator[Json]:
        """Yield the pods of the namespace that have not ended."""
        query = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
        yield from self._connection.request("GET", path_of(names.PODS, self._job.namespace), query)["items"]

    def _read(self) -> PodView | None:
        """Return the pod, None if it is gone. Raises ``CutError`` while the API server does not answer."""
        try:
            found = self._connection.found(names.PODS, self._job.namespace, self._pod)
        except UnavailableError as error:
            raise CutError(error.error) from error
        return None if found is None else pod_view(found)

    def _delete(self) -> None:
        if not self._pod:
            return
        name, self._pod = self._pod, ""
        try:
            self._connection.request("DELETE", path_of(names.PODS, self._job.namespace, name))
        except DDPJobError as error:
            if not is_absent(error, names.PODS):
                self._on_progress(PullProgress(waiting=f"the pod {name} could not be deleted, and ends by itself"))
