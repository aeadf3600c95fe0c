"""``Client``: what a user can do with jobs, on this machine and on a cluster alike."""

import importlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from ddpjob.api.objects import Json
from ddpjob.api.status import DDPJobStatus
from ddpjob.client.job import DDPJob
from ddpjob.client.log_lines import LogLine
from ddpjob.errors import (
    DDPJobError,
    InvalidJobError,
    JobNotFoundError,
    StoppedError,
    UnavailableError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from ddpjob.client.bundle.archive import Manifest
    from ddpjob.client.checkup.check import Checks
    from ddpjob.client.ranks import RankTable
    from ddpjob.client.snapshot import Snapshot
    from ddpjob.client.timeline import JobEvent, JobPod
    from ddpjob.client.verdict.explanation import Explanation
    from ddpjob.client.volume.contents import Pulled, PullProgress, VolumeContents

INTERRUPTED = "Interrupted"
"""State of a job of this machine that is not finished and that no process runs: its process was killed."""
Jobs = list[DDPJob]  # these are named, because in the class ``list`` is the method
Events = list["JobEvent"]
Pods = list["JobPod"]
Items = list[Json]
OnOutput = Callable[[bytes, bool], object]


def is_finished(status: DDPJobStatus) -> bool:
    """Return whether a job has succeeded or failed."""
    return status.is_true("Finished")


class Client(Protocol):
    """The jobs of this machine or of a cluster.

    A job is given by its name or as a ``DDPJob``, which also has a namespace. All errors are ``DDPJobError``. Every
    request has a time limit; ``watch``, ``wait`` and ``logs`` with ``follow`` survive lost connections and restarts of
    the API server for five minutes each.
    """

    namespace: str | None
    """Of jobs that are given by their name alone; None: any of this machine."""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Refuse ``Client()``, which names no place. Raises ``TypeError``."""
        if cls is Client:
            raise TypeError("Client() names no place: use Client.local() or Client.cluster()")
        return super().__new__(cls)

    @staticmethod
    def local(state_dir: str | Path | None = None, *, namespace: str | None = None) -> "Client":
        """Return a client for the jobs of this machine.

        Args:
            state_dir: instead of $DDPJOB_STATE_DIR or ~/.local/state/ddpjob.
            namespace: of the jobs; without it a job is found in any namespace, and a new one is in ``default``.
        """
        return cast(Client, _load("local").LocalClient(state_dir, namespace=namespace))

    @staticmethod
    def cluster(
        context: str | None = None,
        *,
        namespace: str | None = None,
        kubeconfig: str | Path | None = None,
        timeout: float = 30.0,
        retries: bool = True,
    ) -> "Client":
        """Return a client for the jobs of a cluster.

        Args:
            context: of the kubeconfig; default: the current context, or in a pod its service account.
            namespace: default: the namespace of the context, else ``default``.
            kubeconfig: instead of $KUBECONFIG or ~/.kube/config.
            timeout: seconds for one request, retries included.
            retries: send a request again if the API server does not answer it.

        Raises:
            UnavailableError: there is no usable configuration.
        """
        made = _load("cluster").ClusterClient(
            context, namespace=namespace, kubeconfig=kubeconfig, timeout=timeout, retries=retries
        )
        return cast(Client, made)

    @property
    def host(self) -> str:
        """Where its jobs are, for a person: this machine, or the cluster."""
        ...

    @property
    def place(self) -> str:
        """Where its jobs are, for a person: this machine, or cluster and namespace."""
        return self.host

    def submit(self, job: DDPJob, *, workdir: str | Path | None = None, dry_run: bool = False) -> DDPJob:
        """Create the job and return it as stored; on this machine it runs in the background.

        Args:
            workdir: directory that is the working directory of the job: here itself, on a cluster a copy of its files
                in each pod, without those that ``.gitignore`` names or that often hold credentials. Without it a
                cluster gets the script of ``DDPJob.from_script`` alone.
            dry_run: check all that ``submit`` does, on a cluster with its admission, and create nothing.

        Raises:
            JobExistsError: there is a job of that name.
            InvalidJobError: the job breaks a rule; the error names the field. Or the files cannot be sent.
        """
        ...

    def get(self, job: str | DDPJob) -> DDPJob:
        """Return the job with its status. Raises ``JobNotFoundError``."""
        ...

    def list(self, *, all_namespaces: bool = False, label_selector: str | None = None) -> Jobs:
        """Return the jobs, sorted by namespace and name.

        Args:
            label_selector: only jobs with these labels, for example ``team=a,stage in (test, prod)``.

        Raises:
            NotServedError: the cluster has no DDPJobs, because the CustomResourceDefinition is not installed.
        """
        ...

    def watch_all(self, *, all_namespaces: bool = False, label_selector: str | None = None) -> Iterator[Jobs]:
        """Yield the jobs now and after each change, sorted as by ``list``; it never ends by itself."""
        ...

    def watch(
        self, job: str | DDPJob, *, timeout: float | None = None, stop: Callable[[], object] | None = None
    ) -> Iterator[DDPJobStatus]:
        """Yield the status now and after each change, and end after the status of the finished job.

        Statuses that follow each other at once may be left out; the last is never left out and never repeated.

        Args:
            stop: called several times a second, maybe in another thread; if it returns true, the watch ends.

        Raises:
            JobNotFoundError: there is no such job, or it was deleted.
            WaitTimeoutError: the job has not finished after ``timeout`` seconds.
            StoppedError: ``stop`` returned true, or the client was closed.
        """
        require_arguments(timeout=timeout, stop=stop)
        return (watched.status for watched in self._watched(job, timeout, stop))

    def wait(
        self,
        job: str | DDPJob,
        *,
        until: Callable[[DDPJobStatus], object] = is_finished,
        timeout: float | None = None,
        stop: Callable[[], object] | None = None,
    ) -> DDPJob:
        """Return the job as soon as ``until`` holds for its status, or it has finished. Raises as ``watch``."""
        require_arguments(until=until, timeout=timeout, stop=stop)
        watched = None
        for watched in self._watched(job, timeout, stop):
            if until(watched.status):
                break
        return cast(DDPJob, watched)

    def as_completed(
        self,
        jobs: Iterable[str | DDPJob],
        *,
        timeout: float | None = None,
        stop: Callable[[], object] | None = None,
    ) -> Iterator[DDPJob]:
        """Yield each of the jobs as soon as it has finished. Raises as ``watch``, if it does so for one of them.

        All jobs of a namespace are watched at once, for which the user needs the right to ``list`` them.
        """
        require_arguments(jobs=jobs, timeout=timeout, stop=stop)
        return (job for _, job in self._completed(jobs, timeout, stop))

    def wait_all(
        self,
        jobs: Iterable[str | DDPJob],
        *,
        timeout: float | None = None,
        stop: Callable[[], object] | None = None,
    ) -> Jobs:
        """Return all jobs when the last has finished, in the order in which they are given. Raises as ``watch``."""
        require_arguments(jobs=jobs, timeout=timeout, stop=stop)
        done = dict(self._completed(jobs, timeout, stop))
        return [done[number] for number in sorted(done)]

    def logs(
        self,
        job: str | DDPJob,
        *,
        nodes: Collection[int] | None = None,
        ranks: Collection[int] | None = None,
        all_nodes: bool = False,
        attempt: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        since: float | None = None,
    ) -> Iterator[LogLine]:
        """Yield what the nodes of a job printed, each line once; with ``follow`` also the course of a progress bar.

        Args:
            nodes: default: node 0 and the nodes that failed.
            ranks: only the lines of these ranks, in place of ``nodes``.
            attempt: default: the newest, and with ``follow`` those that begin later.
            follow: go on until the job is finished, on this machine until no process runs it.
            tail: only so many last lines of each node; does not limit what is printed later.
            since: only lines of the last so many seconds; not on this machine, where lines have no time.
        """
        ...

    def explain(self, job: str | DDPJob) -> "Explanation":
        """Return why the job is in its state, with the evidence, also after its pods are gone.

        What the user may not read is named in ``unread``; only the job itself must be readable.

        Raises:
            JobNotFoundError: there is no such job.
        """
        ...

    def bundle(self, job: str | DDPJob, path: str | Path, *, logs: bool = False) -> "Manifest":
        """Write one zip with what can be read of a job, without the values of its user, and return what is in it.

        Args:
            path: of the new file.
            logs: with logs and messages of its program. Secrets that it printed are not removed.

        Raises:
            JobNotFoundError: there is no such job. Only the job itself must be readable.
            DDPJobError: the file exists, or cannot be written.
        """
        require_arguments(path=path)
        made = self._snapshot(job, logs=logs)
        archive, redaction = _load("bundle.archive"), _load("bundle.redaction")
        return cast("Manifest", archive.write(path, *redaction.redacted(made, os.urandom(32), logs=logs)))

    def check(self) -> "Checks":
        """Return the checks of this machine, or of the cluster with the rights of the user."""
        ...

    def events(self, job: str | DDPJob) -> Events:
        """Return what happened to the job, the oldest first: from its status, its pods, and the Events of the cluster.

        Raises:
            JobNotFoundError: there is no such job.
            NotAllowedError: the user may not read pods or Events.
        """
        ...

    def pods(self, job: str | DDPJob) -> Pods:
        """Return the pods of the job that there still are, the newest attempt first. Raises as ``events``.

        Of a job of a cluster that was deleted, these are the pods that have not ended yet, if there are any.
        """
        return cast(Pods, _load("timeline").job_pods(self.pod_manifests(job)))

    def pod_manifests(self, job: str | DDPJob) -> Items:
        """Return the pods of ``pods`` as Kubernetes has them."""
        ...

    def checkpoints(
        self,
        job: str | DDPJob,
        *,
        verify: bool = True,
        on_progress: "Callable[[PullProgress], None] | None" = None,
    ) -> "VolumeContents":
        """Return what the volume of the job holds: checkpoints, metrics and other files.

        Of a cluster, a pod with the image of the job reads the volume; it is deleted at the end.

        Args:
            verify: read the checkpoints and compare their digests.
            on_progress: called with what it waits for or reads.

        Raises:
            InvalidJobError: the job has no volume.
            NotAllowedError: the user may not create a pod, or run a program in it.
            UnavailableError: the volume cannot be reached.
        """
        ...

    def pull(
        self,
        job: str | DDPJob,
        to: str | Path | None = None,
        *,
        steps: Collection[int] = (),
        metrics: bool = False,
        everything: bool = False,
        on_progress: "Callable[[PullProgress], None] | None" = None,
    ) -> "Pulled":
        """Copy the newest checkpoint of the job, or what else is wanted, and return what was copied.

        The digests are compared. A connection that is cut is made again; after any other end the same call continues.

        Args:
            to: directory, which gets the layout of the volume; default: one named as the job.
            steps: the checkpoints of these steps.
            metrics: the metrics, and with ``steps`` both.
            everything: all files, without those that are hidden: git, shells and editors run some.
            on_progress: called with what it waits for, and with each part that has arrived.

        Raises:
            InvalidJobError: the job has no volume, or the volume holds nothing of the kind.
            TransferError: the disk refuses a file, or it was deleted meanwhile.
            DamagedFileError: a digest differs.
            NotAllowedError, UnavailableError: as ``checkpoints``.
        """
        ...

    def metrics(self, job: str | DDPJob) -> Path:
        """Return the directory of this machine for the metrics of a job: that of its checkpoints.

        Raises:
            UnavailableError: they are not on this machine, as those of a cluster's job, or the job has no volume.
            JobNotFoundError: there is no such job.
        """
        ...

    def ranks(self, job: str | DDPJob) -> "RankTable":
        """Return what each rank does now: step, time of a step, wait for data, memory, last heartbeat.

        The launcher of node 0 knows it: ``ddprun`` or ``ddptrain``. On a cluster the API server is asked to connect to
        the pod, for which the user needs the right to ``get`` ``pods/proxy``.

        Raises:
            JobNotFoundError: there is no such job.
            NotAllowedError: the user may not reach the port of a pod.
            UnavailableError: no rank runs, or another program than ``ddprun`` or ``ddptrain`` started them.
        """
        ...

    def suspend(self, job: str | DDPJob) -> DDPJob:
        """Stop the pods after they saved a checkpoint; ``resume`` starts them again. Return the changed job."""
        ...

    def resume(self, job: str | DDPJob) -> DDPJob:
        """Start a suspended job again, on this machine also a job that nothing runs. This is not a restart."""
        ...

    def restart(self, job: str | DDPJob) -> DDPJob:
        """Restart all pods after they saved a checkpoint. This restart does not count towards the limit."""
        ...

    def change(self, job: str | DDPJob, spec: Json) -> DDPJob:
        """Change fields that may change: of a running job for example its limits, of a suspended one also its size.

        Args:
            spec: the new values, as a JSON merge patch with the names of docs/reference/fields.md: None removes a
                field.

        Raises:
            InvalidJobError: a field is fixed, unknown or wrong.
            DDPJobError: the job has finished, or runs on this machine, where it must be suspended.
        """
        ...

    def exec(self, job: str | DDPJob, command: Sequence[str], *, node: int = 0, on_output: OnOutput) -> int:
        """Run a command in the trainer's container of a node, and return its exit code; only on a cluster.

        Args:
            on_output: called with each part of the output, and whether it is of standard error.

        Raises:
            NotAllowedError: the user may not run commands in pods.
            UnavailableError: the node does not run, or the connection was cut.
        """
        ...

    def delete(self, job: str | DDPJob, *, volume: bool = False) -> None:
        """Stop the job if it runs, and delete it with its pods and logs.

        Args:
            volume: also delete the volume made from ``checkpoint.claimTemplate``: checkpoints, metrics, data. With
                ``claimRetention: Delete`` it goes in any case.
        """
        ...

    def close(self) -> None:
        """Close the connections. Waits, watches and followed logs of all threads end by ``StoppedError``."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _snapshot(self, job: str | DDPJob, *, logs: bool) -> "Snapshot":
        """Return all that can be read of a job. logs: with the ends of the logs of its pods."""
        ...

    def _same(self, job: str | DDPJob) -> DDPJob:
        """Return the job as it is now. Raises ``JobNotFoundError`` if another one has taken the name of a given job."""
        found = self.get(job)
        require_same(job, found.uid)
        return found

    def _watched(
        self, job: str | DDPJob, timeout: float | None, stop: Callable[[], object] | None = None
    ) -> Iterator[DDPJob]:
        """Yield the job as ``watch`` yields its status."""
        ...

    def _lists(
        self, namespace: str | None, label_selector: str | None, stop: Callable[[], object] | None = None
    ) -> Iterator[Jobs]:
        """Yield the jobs of a namespace, or without it of all, as ``watch_all``, until ``stop`` returns true."""
        ...

    def _require_run(self, job: DDPJob) -> None:
        """Raise ``UnavailableError`` if nothing runs a job of this machine that has not finished."""

    def _completed(
        self, jobs: Iterable[str | DDPJob], timeout: float | None, stop: Callable[[], object] | None
    ) -> Iterator[tuple[int, DDPJob]]:
        """Yield number and job of each of the jobs as ``as_completed``, with one watch for each namespace.

        300 jobs had 300 watches, of which an API server or a proxy before it allows fewer.
        """
        ended, found = threading.Event(), queue.Queue[tuple[int, DDPJob] | Exception]()
        end = math.inf if timeout is None else time.monotonic() + timeout
        by_namespace: dict[str | None, dict[int, str | DDPJob]] = {}
        for number, job in enumerate(jobs):
            by_namespace.setdefault(identity(job)[1] or self.namespace, {})[number] = job

        def is_over() -> bool:
            return ended.is_set() or time.monotonic() > end or bool(stop is not None and stop())

        def follow(namespace: str | None, left: dict[int, str | DDPJob]) -> None:
            try:
                for there in self._lists(namespace, None, is_over):
                    for number, job in self._finished(there, left):
                        found.put((number, job))
                    if not left:
                        return
            except StoppedError as error:
                last = [job for job in left.values() if isinstance(job, DDPJob)]
                found.put(timed_out(last[0], timeout) if last and time.monotonic() > end else error)
            except Exception as error:  # raised to the caller
                found.put(error)

        count = sum(map(len, by_namespace.values()))
        try:
            for one in by_namespace.items():
                threading.Thread(target=follow, args=one, name="ddpjob-wait", daemon=True).start()
            for _ in range(count):
                if isinstance(done := found.get(), Exception):
                    raise done
                yield done
        finally:
            ended.set()

    def _finished(self, there: Jobs, left: dict[int, str | DDPJob]) -> Iterator[tuple[int, DDPJob]]:
        """Remove from ``left`` what has finished, and yield it; the others are then the jobs as they are."""
        by_name: dict[str, Jobs] = {}
        for job in there:
            by_name.setdefault(job.name, []).append(job)
        stopped: list[DDPJob] = []
        for number, given in [*left.items()]:
            same = by_name.get(identity(given)[0], [])
            now = same[0] if len(same) == 1 else self._same(given)  # raises unless it was created just now
            require_same(given, now.uid)
            left[number] = now
            if now.finished:
                del left[number]
                yield number, now
            else:
                stopped.append(now)
        for job in stopped:
            self._require_run(job)


def _load(module: str) -> Any:
    """Import a module of this package by its name, because it imports this module."""
    return importlib.import_module(f"ddpjob.client.{module}")


def identity(job: str | DDPJob) -> tuple[str, str | None]:
    """Return name and namespace of a job.

    Raises:
        InvalidJobError: it is no job. The request of None would be that of all jobs of the namespace, also to delete.
    """
    if isinstance(job, DDPJob):
        return job.name, job.namespace
    if not isinstance(job, str) or not job:
        raise InvalidJobError(
            f"{job!r} is not a name of a DDPJob", "a job is given by its name, or as a DDPJob", "ddpjob ls"
        )
    return job, None


_KINDS: Mapping[str, tuple[str, Any]] = {
    "job": ("a DDPJob", (DDPJob,)),
    "jobs": ("a list of jobs", (Iterable,)),
    "spec": ("a mapping of fields", (Mapping,)),
    "command": ("a list of words", (Sequence,)),
    "steps": ("a collection of numbers", (Collection,)),
    **dict.fromkeys(("nodes", "ranks"), ("a collection of numbers", (Collection, NoneType))),
    "node": ("a whole number", (int,)),
    **dict.fromkeys(("attempt", "tail"), ("a whole number", (int, NoneType))),
    **dict.fromkeys(("timeout", "since"), ("a number of seconds", (int, float, NoneType))),
    "until": ("a function", (Callable,)),
    "stop": ("a function", (Callable, NoneType)),
    "label_selector": ("a text", (str, NoneType)),
    "path": ("a path", (str, PathLike)),
    **dict.fromkeys(("to", "workdir"), ("a path", (str, PathLike, NoneType))),
}
"""What the arguments of the public methods are."""


def require_arguments(**given: object) -> None:
    """Raise ``InvalidJobError`` for an argument of another type: its error would be that of a line far below.

    A text is no collection here, although Python iterates over its characters.
    """
    for name, value in given.items():
        kind, types = _KINDS[name]
        if not isinstance(value, types) or (isinstance(value, str) and str not in types):
            raise InvalidJobError(f"{name} is {value!r:.100}, not {kind}", "it has another type", f"pass {kind}")


def require_same(given: str | DDPJob, uid: str | None) -> None:
    """Raise ``JobNotFoundError`` if another job, with this uid, has taken the name of the given one."""
    if isinstance(given, DDPJob) and given.uid not in (None, uid):
        raise JobNotFoundError(
            f"the job {given.name} was deleted, and there is another of this name",
            "a job that is submitted again is a new job",
            f"client.get({given.name!r}) returns the new one",
        )


def timed_out(job: DDPJob, seconds: float | None) -> WaitTimeoutError:
    """Return the error of a wait that ended without the awaited state."""
    return WaitTimeoutError(
        f"the job {job.name} is {job.state} after {seconds:g} s",
        "it goes on; only the wait has ended",
        "wait longer, or look at its logs",
    )


def no_metrics(job: DDPJob) -> UnavailableError:
    """Return the error of a job that keeps no metrics."""
    return UnavailableError(
        f"the job {job.name} has no volume for its metrics",
        "ddptrain, and a script that calls ddprun.report, write them beside the checkpoints",
        "set spec.checkpoint; or name the directory of the metrics with --metrics DIR",
    )


def already_finished(job: DDPJob) -> DDPJobError:
    """Return the error of a change that a finished job cannot have."""
    return DDPJobError(
        f"the job {job.name} has finished: it {job.state.lower()}",
        "a finished job does not run again",
        "delete it and submit it again: it resumes from its checkpoints",
    )
