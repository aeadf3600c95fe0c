"""``Client.cluster``: the jobs of a cluster, through the official ``kubernetes`` package."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddpjob.api import names
from ddpjob.api.names import DDPJOBS
from ddpjob.api.objects import Json
from ddpjob.client.base import (
    Checks,
    Client,
    Jobs,
    Pods,
    already_finished,
    identity,
    require_same,
    timed_out,
)
from ddpjob.client.connection import (
    CONNECT_SECONDS,
    TROUBLES,
    Answer,
    ApiConnection,
    RequestError,
    path_of,
    request_error,
)
from ddpjob.client.job import DDPJob
from ddpjob.client.log_lines import LogChoice, LogLine
from ddpjob.errors import DDPJobError, InvalidJobError, NotAllowedError, UnavailableError
from ddpjob.version import __version__

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ddpjob.client.snapshot import Snapshot
    from ddpjob.client.verdict.explanation import Explanation
    from ddpjob.client.volume.contents import PullProgress, Volume

_STRICT = {"fieldValidation": "Strict"}  # without it an API server drops a field that it does not know


class ClusterClient(Client):
    """The jobs of one cluster; see ``Client``. namespace: where jobs are that are given by their name alone."""

    def __init__(
        self,
        context: str | None = None,
        *,
        namespace: str | None = None,
        kubeconfig: str | Path | None = None,
        timeout: float = 30.0,
        retries: bool = True,
    ) -> None:
        self._context = context
        self.connection = ApiConnection(context, kubeconfig, timeout, retries=retries)
        self.namespace: str = namespace or self.connection.namespace

    @property
    def host(self) -> str:
        return f"cluster {self._context or self.connection.server}"

    @property
    def place(self) -> str:
        return f"{self.host}, namespace {self.namespace}"

    def submit(self, job: DDPJob, *, workdir: str | Path | None = None, dry_run: bool = False) -> DDPJob:
        from ddpjob.client.cluster_submit import Submission
        from ddpjob.client.workdir.mount import with_files
        from ddpjob.local.admission import require_valid

        _require_submittable(job)
        require_valid(job.manifest)
        submission = Submission(self.connection, with_files(job, workdir), job.namespace or self.namespace)
        return DDPJob.from_manifest(submission.rehearse() if dry_run else submission.carry_out())

    def get(self, job: str | DDPJob) -> DDPJob:
        return DDPJob.from_manifest(self.connection.request("GET", self._path(job)))

    def list(self, *, all_namespaces: bool = False, label_selector: str | None = None) -> Jobs:
        namespace = None if all_namespaces else self.namespace
        found = self.connection.items(path_of(DDPJOBS, namespace), {"labelSelector": label_selector})
        found.sort(key=lambda item: (item["metadata"]["namespace"], item["metadata"]["name"]))
        return list(map(DDPJob.from_manifest, found))

    def watch_list(
        self,
        *,
        all_namespaces: bool = False,
        label_selector: str | None = None,
        on_trouble: Callable[[DDPJobError | None], None] | None = None,
    ) -> Iterator[Jobs]:
        from ddpjob.client.cluster_watch import WatchedJobs

        with self.connection.part() as connection:
            namespace = None if all_namespaces else self.namespace
            yield from WatchedJobs(connection, namespace, label_selector, on_trouble).lists()

    def _log(self, job: DDPJob, choice: LogChoice, *, follow: bool) -> Iterator[LogLine]:
        from ddpjob.client.cluster_logs import JobLogs

        logs = JobLogs(self.connection, job, choice)
        return logs.follow(partial(self._changes, job, None)) if follow else logs.read()

    def explain(self, job: str | DDPJob) -> "Explanation":
        from ddpjob.client.cluster_reader import Requests

        requests = Requests()
        asked = requests.submit(self.connection.answer, "GET", self._path(job))
        # These imports take as long as the answer.
        from ddpjob.client.cluster_snapshot import read_needed
        from ddpjob.client.verdict.explain import explain

        seen = read_needed(self.connection, requests, asked.result())
        require_same(job, seen.job["metadata"]["uid"])
        return explain(seen)

    def _story(self, job: str | DDPJob) -> "Snapshot":
        from ddpjob.client.cluster_snapshot import read_story

        return read_story(self.connection, self._answer(job))

    def pods(self, job: str | DDPJob) -> Pods:
        from ddpjob.client.cluster_snapshot import pods_of
        from ddpjob.client.timeline import job_pods

        return job_pods(pods_of(self.connection, self._answer(job).body))

    def _volume(
        self, job: str | DDPJob, on_progress: "Callable[[PullProgress], None] | None"
    ) -> "AbstractContextManager[Volume]":
        from ddpjob.client.volume.reader_pod import PodReader

        return PodReader(self.connection, self._same(job), on_progress)

    def _ask_launcher(self, job: DDPJob, attempt: int, method: str = "GET", path: str = "/ranks") -> bytes:
        from ddpjob.client.ranks import LONGEST, SECONDS, no_ranks

        pod = names.pod_name(job.name, str(job.uid), attempt, 0)
        port, seconds = job.spec.rendezvous.progress_port, min(SECONDS, self.connection.timeout)
        proxied = path_of(names.PODS, job.namespace, f"{pod}:{port}", f"proxy{path}")
        try:
            with closing(self.connection.send(method, proxied, seconds=seconds)) as response:
                answer = response.read(LONGEST + 1)
        except TROUBLES as trouble:
            error = request_error(trouble)
            if error.status == 403:
                verb = {"GET": "get", "POST": "create"}[method]
                raise NotAllowedError(
                    f"you may not reach the launcher of {job.name}: {error.message}",
                    f"it needs the right to {verb} pods/proxy, which the role edit of Kubernetes has and view has not",
                    f"kubectl auth can-i {verb} pods --subresource=proxy -n {job.namespace}",
                ) from trouble
            if error.status == 401:
                raise self.connection.explained(error) from trouble
            raise no_ranks(job, f"port {port} of {pod}: {error.message}", f"{method} {path}") from trouble
        if len(answer) > LONGEST:
            raise no_ranks(job, f"the answer of port {port} of {pod} is too long", f"{method} {path}")
        return answer

    def suspend(self, job: str | DDPJob) -> DDPJob:
        return self.change(job, {"suspend": True})

    def resume(self, job: str | DDPJob) -> DDPJob:
        return self.change(job, {"suspend": False})

    def restart(self, job: str | DDPJob) -> DDPJob:
        """Restart all pods after they saved a checkpoint; a suspended job starts."""
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return self.change(job, {"suspend": False, "restartedAt": now})

    def change(self, job: str | DDPJob, spec: Json) -> DDPJob:
        found = self._same(job)
        if found.finished:
            raise already_finished(found)
        return DDPJob.from_manifest(self.connection.request("PATCH", self._path(found), _STRICT, {"spec": spec}))

    def check(self) -> Checks:
        from ddpjob.client import checkup
        from ddpjob.client.cluster_reader import Reader

        try:
            answer = self.connection.once("GET", "/version", seconds=min(CONNECT_SECONDS, self.connection.timeout))
            skew = (datetime.now(UTC) - answer.time).total_seconds() if answer.time else None
            server = checkup.server(answer.body, skew, "")
        except RequestError as error:
            server = checkup.server({}, None, error.message)
        reader = Reader(self.connection, self.namespace)
        found = reader.operators()
        if found is None:
            return [server, checkup.of_cluster("operator", "unknown", reader.unread["operator"])]
        return [server, checkup.operator(found, self.namespace, __version__)]

    def delete(self, job: str | DDPJob, *, volume: bool = False) -> None:
        uid = job.uid if isinstance(job, DDPJob) else None
        try:
            self.connection.request("DELETE", self._path(job), body=_deletion(uid, propagationPolicy="Background"))
        except UnavailableError as error:
            if isinstance(error.__cause__, RequestError) and error.__cause__.status == 409:
                self._same(job)  # raises that another job has its name
            raise
        if volume:
            self._delete_claim(*self._key(job))

    def _snapshot(self, job: str | DDPJob, *, logs: bool) -> "Snapshot":
        from ddpjob.client.cluster_snapshot import read_all

        return read_all(self.connection, self._answer(job), logs=logs)

    def _answer(self, job: str | DDPJob) -> Answer:
        """Return the job as ``_same``, with the time of the server."""
        found = self.connection.answer("GET", self._path(job))
        require_same(job, found.body["metadata"]["uid"])
        return found

    def close(self) -> None:
        self.connection.close()

    def _delete_claim(self, namespace: str, job: str) -> None:
        """Delete the claim that the operator made for the job, not another of the same name."""
        claim = self.connection.found(names.CLAIMS, namespace, names.claim_name(job))
        if claim is not None and (claim["metadata"].get("labels") or {}).get(names.LABEL_JOB_NAME) == job:
            path = path_of(names.CLAIMS, namespace, names.claim_name(job))
            self.connection.request("DELETE", path, body=_deletion(claim["metadata"]["uid"]))

    def _key(self, job: str | DDPJob) -> names.Key:
        name, namespace = identity(job)
        return names.Key(namespace or self.namespace, name)

    def _path(self, job: str | DDPJob) -> str:
        return path_of(DDPJOBS, *self._key(job))

    def _watched(self, job: str | DDPJob, timeout: float | None) -> Iterator[DDPJob]:
        found = self._same(job)
        with self.connection.part() as connection:
            yield from self._changes(found, timeout, connection)

    def _changes(self, last: DDPJob, timeout: float | None, connection: ApiConnection) -> Iterator[DDPJob]:
        """Yield the job and each change of its status until it has finished."""
        from ddpjob.client.cluster_watch import WATCH_SECONDS, JobVersions

        end = math.inf if timeout is None else time.monotonic() + timeout
        yield last
        versions = JobVersions(connection, last, self._key(last))
        while not last.finished:
            if time.monotonic() > end:
                raise timed_out(last, timeout)
            for seen in versions.after_last(min(WATCH_SECONDS, end - time.monotonic())):
                if seen.status != last.status:
                    last = seen
                    yield seen
                    if seen.finished:
                        return


def _deletion(uid: str | None, **options: object) -> Json:
    """Return the options of a DELETE; with a uid another object of the same name is kept."""
    return options | ({"preconditions": {"uid": uid}} if uid else {})


def _require_submittable(job: DDPJob) -> None:
    from ddpjob.client.jobfile import SCRIPT_IMAGE

    if job.others:
        kinds = ", ".join(f"{other['kind']} {(other.get('metadata') or {}).get('name')}" for other in job.others)
        raise InvalidJobError(
            f"the YAML of {job.name} also holds {kinds}",
            "submit creates the DDPJob alone",
            "kubectl apply -f FILE creates all of them; client.watch and the other methods then work as usual",
        )
    if job.manifest["spec"].get("image") == SCRIPT_IMAGE:
        raise InvalidJobError(
            f"the job {job.name} has no image",
            "pods of a cluster run an image, which must hold Python and PyTorch",
            'ddpjob submit SCRIPT.py --image IMAGE, in Python DDPJob.from_script(…, image="…")',
        )
