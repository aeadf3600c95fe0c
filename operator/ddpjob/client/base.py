"""``Client``: what a user can do with jobs, on this machine and on a cluster alike."""

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from ddpjob.api.objects import Json
from ddpjob.api.status import DDPJobStatus
from ddpjob.client.job import DDPJob
from ddpjob.client.log_lines import LogChoice, LogLine, nodes_of, of_ranks
from ddpjob.errors import DDPJobError, InvalidJobError, JobNotFoundError, UnavailableError, WaitTimeoutError

if TYPE_CHECKING:
    from ddpjob.client.bundle.archive import Manifest
    from ddpjob.client.checkup import Check
    from ddpjob.client.profile import Profile
    from ddpjob.client.ranks import RankTable
    from ddpjob.client.snapshot import Snapshot
    from ddpjob.client.stacks import Ask, StackTable
    from ddpjob.client.timeline import JobPod, Timeline
    from ddpjob.client.verdict.explanation import Explanation
    from ddpjob.client.volume.contents import Pulled, PullProgress, Volume, VolumeContents

INTERRUPTED = "Interrupted"
"""State of a job of this machine that is not finished and that no process runs: its process was killed."""
Checks = list["Check"]
Jobs = list[DDPJob]  # these are named, because in the class ``list`` is the method
Pods = list["JobPod"]


def is_finished(status: DDPJobStatus) -> bool:
    """Return whether a job has succeeded or failed."""
    return status.is_true("Finished")


class Client(ABC):
    """The jobs of this machine or of a cluster.

    A job is given by its name or as a ``DDPJob``, which also has a namespace. All errors are ``DDPJobError``. Every
    request has a time limit; ``watch``, ``watch_list``, ``wait`` and ``logs`` with ``follow`` survive lost connections
    and restarts of the API server for five minutes each.
    """

    namespace: str | None
    """Of jobs that are given by their name alone; None: any of this machine."""

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
    @abstractmethod
    def host(self) -> str:
        """Where its jobs are, for a person: this machine, or the cluster."""

    @property
    def place(self) -> str:
        """Where its jobs are, for a person: this machine, or cluster and namespace."""
        return self.host

    @abstractmethod
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

    @abstractmethod
    def get(self, job: str | DDPJob) -> DDPJob:
        """Return the job with its status. Raises ``JobNotFoundError``."""

    @abstractmethod
    def list(self, *, all_namespaces: bool = False, label_selector: str | None = None) -> Jobs:
        """Return the jobs, sorted by namespace and name.

        Args:
            label_selector: only jobs with these labels, for example ``team=a``; on a cluster also ``stage in (a, b)``.

        Raises:
            NotServedError: the cluster has no DDPJobs, because the CustomResourceDefinition is not installed.
        """

    @abstractmethod
    def watch_list(
        self,
        *,
        all_namespaces: bool = False,
        label_selector: str | None = None,
        on_trouble: Callable[[DDPJobError | None], None] | None = None,
    ) -> Iterator[Jobs]:
        """Yield the jobs as ``list``, and all of them again after each change, until the client is closed.

        Args:
            on_trouble: called with the error while an API server does not answer, and with None when it does; on this
                machine with the error of a damaged record, which is left out then.
        """

    def watch(self, job: str | DDPJob, *, timeout: float | None = None) -> Iterator[DDPJobStatus]:
        """Yield the status now and after each change, and end after the status of the finished job.

        Statuses that follow each other at once may be left out; the last is never left out and never repeated.

        Raises:
            JobNotFoundError: there is no such job, or it was deleted.
            WaitTimeoutError: the job has not finished after ``timeout`` seconds.
            StoppedError: the client was closed.
        """
        return (watched.status for watched in self._watched(job, timeout))

    def wait(
        self,
        job: str | DDPJob,
        *,
        until: Callable[[DDPJobStatus], object] = is_finished,
        timeout: float | None = None,
    ) -> DDPJob:
        """Return the job as soon as ``until`` holds for its status, or it has finished. Raises as ``watch``."""
        watched = None
        for watched in self._watched(job, timeout):
            if until(watched.status):
                break
        return cast(DDPJob, watched)

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
        found = self._same(job)
        if ranks is not None:
            nodes = nodes_of(found, ranks)
            all_nodes = nodes is None
        lines = self._log(found, LogChoice(nodes, all_nodes, attempt, tail, since), follow=follow)
        return lines if ranks is None else of_ranks(lines, found, ranks)

    @abstractmethod
    def explain(self, job: str | DDPJob) -> "Explanation":
        """Return why the job is in its state, with the evidence, also after its pods are gone.

        What the user may not read is named in ``unread``; only the job itself must be readable.

        Raises:
            JobNotFoundError: there is no such job.
        """

    def bundle(self, job: str | DDPJob, path: str | Path, *, logs: bool = False) -> "Manifest":
        """Write one zip with what can be read of a job, without the values of its user, and return what is in it.

        Args:
            path: of the new file.
            logs: with logs and messages of its program. Secrets that it printed are not removed.

        Raises:
            JobNotFoundError: there is no such job. Only the job itself must be readable.
            DDPJobError: the file exists, or cannot be written.
        """
        from ddpjob.client.bundle.archive import write
        from ddpjob.client.bundle.redaction import redacted

        return write(path, *redacted(self._snapshot(job, logs=logs), os.urandom(32), logs=logs))

    @abstractmethod
    def check(self) -> Checks:
        """Return the checks of torch on this machine, or of the cluster with the rights of the user."""

    def timeline(self, job: str | DDPJob) -> "Timeline":
        """Return the Events about the job, its pods and its claims, sorted by time, and its pods.

        A cluster deletes Events after an hour; what the status says of attempts and failures remains.

        What the user may not read is named in ``unread``; only the job itself must be readable.

        Raises:
            JobNotFoundError: there is no such job.
        """
        from ddpjob.client.timeline import timeline_of

        return timeline_of(self._story(job), self.place)

    @abstractmethod
    def pods(self, job: str | DDPJob) -> Pods:
        """Return the pods of the job that there still are, the newest attempt first.

        Raises:
            JobNotFoundError: there is no such job.
            NotAllowedError: the user may not read pods.
        """

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
        from ddpjob.client.volume.contents import list_volume

        with self._volume(job, on_progress) as volume:
            return list_volume(volume, verify=verify)[0]

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
        from ddpjob.client.volume.receive import pull

        known = self._same(job).status.checkpoint
        with self._volume(job, on_progress) as volume:
            done = pull(volume, Path(to or volume.job), steps=steps, metrics=metrics, everything=everything)
        if known is not None and known.agreed_path in {file.path for file in done.files}:
            return done.model_copy(update={"agreed": known.agreed_path})
        return done

    def ranks(self, job: str | DDPJob) -> "RankTable":
        """Return what each rank does now: step, time of a step, wait for data, memory, last heartbeat.

        The launcher of node 0 knows it: ``ddprun`` or ``ddptrain``. On a cluster the API server is asked to connect to
        the pod, for which the user needs the right to ``get`` ``pods/proxy``.

        Raises:
            JobNotFoundError: there is no such job.
            NotAllowedError: the user may not reach the port of a pod.
            UnavailableError: no rank runs, or another program than ``ddprun`` or ``ddptrain`` started them.
        """
        from ddpjob.client.ranks import asked_twice, rank_table, require_running

        found = self._same(job)
        attempt = require_running(found)
        return asked_twice(lambda: rank_table(found, self.place, self._ask_launcher(found, attempt)))

    def stacks(self, job: str | DDPJob) -> "StackTable":
        """Return the Python stacks of all ranks, taken now. No rank loses a step for it.

        On a cluster it needs the right to ``create`` ``pods/proxy``, too. Errors: as ``ranks``.
        """
        from ddpjob.client.stacks import take_stacks

        return take_stacks(*self._looking_into(job))

    def profile(
        self,
        job: str | DDPJob,
        *,
        steps: int = 5,
        to: str | Path | None = None,
        timeout: float = 120,
        on_progress: Callable[[str], None] | None = None,
    ) -> "Profile":
        """Profile the next steps of all ranks with ``torch.profiler``; write one Chrome trace, and return the waits.

        Args:
            steps: how many, from 1 to 100.
            to: the file, in the format of gzip; default: ``JOB-profile.json.gz``.
            timeout: seconds in which the steps are to end, at most 600.
            on_progress: called with what it waits for.

        Raises:
            UnavailableError: as ``ranks``, or no rank has made steps that can be profiled.
            NotAllowedError: as ``stacks``.
        """
        from ddpjob.client.profile import take_profile

        head, ask = self._looking_into(job)
        file = Path(to or f"{head['job']}-profile.json.gz")
        return take_profile(head, ask, steps, file, timeout=timeout, on_progress=on_progress)

    def _looking_into(self, job: str | DDPJob) -> "tuple[Json, Ask]":
        """Return what is known of a job whose ranks run, and what sends requests to look inside them."""
        from ddpjob.client.ranks import require_running

        found = self._same(job)
        attempt = require_running(found)
        head = {"job": found.name, "namespace": found.namespace, "place": self.place, "attempt": attempt}
        return head, lambda method, path: self._ask_launcher(found, attempt, method, f"/jobs/{found.uid}/{path}")

    @abstractmethod
    def suspend(self, job: str | DDPJob) -> DDPJob:
        """Stop the pods after they saved a checkpoint; ``resume`` starts them again. Return the changed job."""

    @abstractmethod
    def resume(self, job: str | DDPJob) -> DDPJob:
        """Start a suspended job again, on this machine also a job that nothing runs. This is not a restart."""

    @abstractmethod
    def restart(self, job: str | DDPJob) -> DDPJob:
        """Restart all pods after they saved a checkpoint. This restart does not count towards the limit."""

    @abstractmethod
    def change(self, job: str | DDPJob, spec: Json) -> DDPJob:
        """Change fields that may change: of a running job for example its limits, of a suspended one also its size.

        Args:
            spec: the new values, as a JSON merge patch with the names of docs/reference/fields.md: None removes a
                field.

        Raises:
            InvalidJobError: a field is fixed, unknown or wrong.
            DDPJobError: the job has finished, or runs on this machine, where it must be suspended.
        """

    @abstractmethod
    def delete(self, job: str | DDPJob, *, volume: bool = False) -> None:
        """Stop the job if it runs, and delete it with its pods and logs.

        Args:
            volume: also delete the volume made from ``checkpoint.claimTemplate``: checkpoints, metrics, data. With
                ``claimRetention: Delete`` it goes in any case.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections. Waits, watches and followed logs of all threads end by ``StoppedError``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _log(self, job: DDPJob, choice: LogChoice, *, follow: bool) -> Iterator[LogLine]:
        """Yield the chosen lines, of all ranks of a node."""

    @abstractmethod
    def _snapshot(self, job: str | DDPJob, *, logs: bool) -> "Snapshot":
        """Return all that can be read of a job. logs: with the ends of the logs of its pods."""

    @abstractmethod
    def _story(self, job: str | DDPJob) -> "Snapshot":
        """Return a job with its pods and Events."""

    @abstractmethod
    def _volume(
        self, job: str | DDPJob, on_progress: "Callable[[PullProgress], None] | None"
    ) -> "AbstractContextManager[Volume]":
        """Return what reads the volume of a job."""

    @abstractmethod
    def _ask_launcher(self, job: DDPJob, attempt: int, method: str = "GET", path: str = "/ranks") -> bytes:
        """Return the answer of the launcher of node 0 to a request."""

    def _same(self, job: str | DDPJob) -> DDPJob:
        """Return the job as it is now. Raises ``JobNotFoundError`` if another one has taken the name of a given job."""
        found = self.get(job)
        require_same(job, found.uid)
        return found

    @abstractmethod
    def _watched(self, job: str | DDPJob, timeout: float | None) -> Iterator[DDPJob]:
        """Yield the job as ``watch`` yields its status."""


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
            f"{job!r} is not a name of a DDPJob", "a job is given by its name, or as a DDPJob", "ddpjob get"
        )
    return job, None


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
