"""``Client.local``: the jobs of this machine, in the state folder that ``ddpjob run`` uses, too."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.client.base import (
    INTERRUPTED,
    Checks,
    Client,
    Jobs,
    Pods,
    already_finished,
    identity,
    no_metrics,
    require_same,
    timed_out,
)
from ddpjob.client.job import DDPJob
from ddpjob.client.local_jobs import RecordedJobs, seen_job
from ddpjob.client.log_lines import LogChoice, LogLine
from ddpjob.errors import (
    DDPJobError,
    JobExistsError,
    JobNotFoundError,
    StoppedError,
    UnavailableError,
    did_you_mean,
)
from ddpjob.local import LocalError
from ddpjob.local.state import JobFolder, StateFolder, remove_tree
from ddpjob.local.translate import LOOPBACK

if TYPE_CHECKING:
    from ddpjob.client.snapshot import Snapshot
    from ddpjob.client.verdict.explanation import Explanation
    from ddpjob.client.volume.contents import PullProgress, Volume

_PAUSE = 0.1  # seconds between two looks at a record or a log
_LOOK_SECONDS = 1.0  # between two looks whether a process runs the job, which take its lock for a moment
_STOP_SECONDS = 120.0  # longer than a pod's grace period


class LocalClient(Client):
    """The jobs of one state folder; see ``Client``. Jobs that it submits run in the background, after this process."""

    def __init__(self, state_dir: str | Path | None = None, *, namespace: str | None = None) -> None:
        self.folder = StateFolder(Path(state_dir).expanduser() if state_dir else None)
        self.namespace = namespace
        self._closed = threading.Event()

    @property
    def host(self) -> str:
        return "this machine"

    def submit(self, job: DDPJob, *, workdir: str | Path | None = None, dry_run: bool = False) -> DDPJob:
        from ddpjob.client.workdir.mount import at_directory
        from ddpjob.local.admission import admit
        from ddpjob.local.programs import require_programs

        job = job if workdir is None else at_directory(job, workdir)
        metadata = {"namespace": self.namespace or "default"} | job.manifest["metadata"]
        admitted = admit(job.manifest | {"metadata": metadata})
        record = self.folder.job(admitted.job.namespace, admitted.job.name)
        if record.job() is not None or record.runner() is not None:
            raise JobExistsError.of(job.name, record.namespace)
        require_programs(admitted)
        if dry_run:
            return DDPJob.from_manifest(admitted.body)
        self._start(record, job.manifest["spec"], metadata, job, is_new=True)
        return seen_job(record)

    def get(self, job: str | DDPJob) -> DDPJob:
        return seen_job(self.record(job))

    def list(
        self,
        *,
        all_namespaces: bool = False,
        label_selector: str | None = None,
        on_error: Callable[[DDPJobError], None] | None = None,
    ) -> Jobs:
        """Return the jobs. on_error: called for each damaged record, instead of raising its error."""
        return self._jobs(label_selector, all_namespaces=all_namespaces).read(on_error)

    def watch_list(
        self,
        *,
        all_namespaces: bool = False,
        label_selector: str | None = None,
        on_trouble: Callable[[DDPJobError | None], None] | None = None,
    ) -> Iterator[Jobs]:
        jobs = self._jobs(label_selector, all_namespaces=all_namespaces)
        last: Jobs | None = None
        while True:
            damaged: list[DDPJobError] = []
            found = jobs.read(damaged.append if on_trouble is not None else None)
            if last is None or list(map(id, found)) != list(map(id, last)):
                last = found
                yield found
            if on_trouble is not None:
                on_trouble(damaged[0] if damaged else None)
            self._pause(_LOOK_SECONDS)

    def _jobs(self, label_selector: str | None, *, all_namespaces: bool) -> RecordedJobs:
        return RecordedJobs(self.folder, None if all_namespaces else self.namespace, label_selector)

    def _log(self, job: DDPJob, choice: LogChoice, *, follow: bool) -> Iterator[LogLine]:
        from ddpjob.client.local_logs import LogReader

        record, version = self.record(job), None
        if choice.since is not None:
            raise LocalError(
                "lines of the last seconds cannot be selected on this machine",
                "its logs have no times",
                f"ddpjob logs {record.name} --tail 100 shows the last lines",
            )
        reader = LogReader(record, choice)
        while follow and record.runner() is not None:
            if (now := record.version()) != version:
                version, recorded = now, record.job()
                if recorded is None or recorded["metadata"]["uid"] != job.uid:
                    return  # the job was deleted, and its logs with it
            yield from reader.read()
            self._pause(_PAUSE)
        yield from reader.read(to_the_end=True)
        if not reader.found:
            raise _no_logs(record, choice)

    def explain(self, job: str | DDPJob) -> "Explanation":
        record, found = self._recorded(job)
        return explained(record, found.manifest, is_run=_is_run(found))

    def _story(self, job: str | DDPJob) -> "Snapshot":
        from ddpjob.client.local_snapshot import read_record

        record, found = self._recorded(job)
        return read_record(record, found.manifest)

    def pods(self, job: str | DDPJob) -> Pods:
        from ddpjob.client.timeline import job_pods

        return job_pods(self._recorded(job)[0].pods())

    def _volume(
        self, job: str | DDPJob, on_progress: "Callable[[PullProgress], None] | None"
    ) -> "contextlib.AbstractContextManager[Volume]":
        from ddpjob.client.volume.contents import Volume, ignore, no_volume
        from ddpjob.client.volume.reader import output_of_folder
        from ddpjob.engine.claims import claim_of_checkpoints

        found = self._recorded(job)[1]
        if not (claim := claim_of_checkpoints(found.manifest)):
            raise no_volume(found.name)
        if not (path := self.metrics(job)).is_dir():
            raise DDPJobError(
                f"the volume of {found.name} is gone: there is no directory {path}",
                "it was deleted or moved, or the job has never started",
                f"ddpjob get {found.name} shows whether it has run",
            )
        read = partial(output_of_folder, str(path))
        volume = Volume(found.name, str(found.namespace), claim, str(path), read, on_progress or ignore)
        return contextlib.nullcontext(volume)

    def metrics(self, job: str | DDPJob) -> Path:
        """Return the directory for the metrics of a job. Raises ``UnavailableError`` if it has no volume."""
        record, found = self._recorded(job)
        if found.manifest["spec"].get("checkpoint") is None:
            raise no_metrics(found)  # without the imports
        from ddpjob.client.local_snapshot import checkpoints_of

        if (directory := checkpoints_of(self.folder, record, found.manifest)) is None:
            raise no_metrics(found)
        return directory

    def _ask_launcher(self, job: DDPJob, attempt: int, method: str = "GET", path: str = "/ranks") -> bytes:
        from http.client import HTTPConnection, HTTPException

        from ddpjob.client.ranks import LONGEST, SECONDS, no_ranks

        name = names.pod_name(job.name, str(job.uid), attempt, 0)
        pod = next((pod for pod in self.record(job).pods() if pod["metadata"]["name"] == name), {})
        port = ((pod.get("metadata") or {}).get("annotations") or {}).get(names.ANNOTATION_PROGRESS_PORT)
        if port is None:
            raise no_ranks(job, "its pod has not started")
        connection = HTTPConnection(LOOPBACK, int(port), timeout=SECONDS)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            body = response.read(LONGEST)
        except (OSError, HTTPException) as error:
            raise no_ranks(job, f"port {port}: {error}", f"{method} {path}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise no_ranks(job, f"port {port} answers with HTTP {response.status}", f"{method} {path}")
        return body

    def suspend(self, job: str | DDPJob) -> DDPJob:
        record, found = self._unfinished(job)
        if record.runner() is not None:
            stop(record)
        elif found.state != "Suspended":
            self._start(record, found.manifest["spec"] | {"suspend": True}, found.manifest["metadata"], job)
            self._until_nothing_runs(record)
        return seen_job(record)

    def resume(self, job: str | DDPJob) -> DDPJob:
        record, found = self._unfinished(job)
        if record.runner() is None:
            self._start(record, found.manifest["spec"] | {"suspend": False}, found.manifest["metadata"], job)
        return seen_job(record)

    def restart(self, job: str | DDPJob) -> DDPJob:
        """Restart all pods after they saved a checkpoint: suspend the job, and resume it in the background."""
        record, found = self._unfinished(job)
        if record.runner() is not None:
            stop(record)
            if (found := seen_job(record)).finished:  # it ended before the signal came
                return found
        asked = {"suspend": False, "restartedAt": datetime.now(UTC).isoformat().replace("+00:00", "Z")}
        self._start(record, found.manifest["spec"] | asked, found.manifest["metadata"], job)
        return seen_job(record)

    def change(self, job: str | DDPJob, spec: Json) -> DDPJob:
        from ddpjob.client.jobspec import changed_spec
        from ddpjob.local.admission import admit

        record, found = self._unfinished(job)
        if "suspend" in spec:
            raise LocalError(
                f"suspend of {found.name} is not changed here", "a process of this machine has to start or end the job",
                f"ddpjob suspend {found.name}, or ddpjob resume {found.name}",
            )  # fmt: skip
        if record.runner() is not None or not found.spec.suspend:
            raise LocalError(
                f"{found.name} is not suspended, and on this machine a job changes only while it is suspended",
                "its process has read the spec",
                f"ddpjob suspend {found.name}, then the change, then ddpjob resume {found.name}",
            )
        stored = found.manifest["spec"] | {"suspend": True}
        made = changed_spec(found.name, stored, spec) | {"suspend": True}
        admit(found.manifest | {"spec": made})
        self._start(record, made, found.manifest["metadata"], job)
        self._until_nothing_runs(record)
        return seen_job(record)

    def delete(self, job: str | DDPJob, *, volume: bool = False) -> None:
        record = self.record(job)
        with contextlib.suppress(LocalError):  # a damaged record, whose job can be deleted
            if (recorded := record.job()) is not None:
                require_same(job, recorded["metadata"]["uid"])
                checkpoint = recorded["spec"].get("checkpoint") or {}
                volume = volume or checkpoint.get("claimRetention") == "Delete"
        if record.runner() is not None:
            stop(record)
        with record.locked(to_run=False):
            remove_tree(record.path, self.folder.root)
        path = self.volume(record)
        if volume and path is not None:
            remove_tree(path, self.folder.root)

    def close(self) -> None:
        self._closed.set()

    def _pause(self, seconds: float) -> None:
        """Wait. Raises ``StoppedError`` once the client is closed."""
        if self._closed.wait(seconds):
            raise StoppedError

    def volume(self, record: JobFolder) -> Path | None:
        """Return the directory of the volume made from a job's claimTemplate, or None if there is none."""
        path = self.folder.volume(record.namespace, names.claim_name(record.name))
        return path if path.is_dir() or path.is_symlink() else None

    def record(self, job: str | DDPJob) -> JobFolder:
        """Return the folder of a job. Raises ``JobNotFoundError``, or ``LocalError`` if several have this name."""
        name, namespace = identity(job)
        namespace = namespace or self.namespace
        jobs = [record for record in self.folder.jobs() if namespace in (None, record.namespace)]
        found = [record for record in jobs if record.name == name]
        if len(found) == 1:
            return found[0]
        if found:
            spaces = ", ".join(record.namespace for record in found)
            raise LocalError(
                f"there are {len(found)} jobs named {name}, in the namespaces {spaces}",
                "names are unique only within a namespace",
                f'add --namespace {found[0].namespace}, in Python namespace="{found[0].namespace}" of the client',
            )
        where = f" in namespace {namespace}" if namespace else ""
        raise JobNotFoundError(
            f"there is no job {name}{where} in {self.folder.root}",
            did_you_mean(name, [record.name for record in jobs], "it never ran here, or it was deleted"),
            "ddpjob get lists the jobs",
        )

    def check(self) -> Checks:
        from ddpjob.client.checkup import check_torch
        from ddpjob.local.resources import visible_gpus

        return [check_torch(len(visible_gpus()))]

    def _snapshot(self, job: str | DDPJob, *, logs: bool) -> "Snapshot":
        from ddpjob.client.local_snapshot import read_all

        record, found = self._recorded(job)
        return read_all(record, found.manifest, is_run=_is_run(found), logs=logs)

    def _watched(self, job: str | DDPJob, timeout: float | None) -> Iterator[DDPJob]:
        record, first = self._recorded(job)
        last = first
        end = None if timeout is None else time.monotonic() + timeout
        yield last
        version, looked = None, time.monotonic()
        while not last.finished:
            if end is not None and time.monotonic() > end:
                raise timed_out(last, timeout)
            self._pause(_PAUSE)
            # A change of the record is seen at once; that its process ended without one, a little later.
            before, version = version, record.version()
            if version == before and time.monotonic() - looked < _LOOK_SECONDS:
                continue
            looked, seen = time.monotonic(), seen_job(record)
            if seen.uid != first.uid:
                raise JobNotFoundError(
                    f"the job {first.name} was replaced by another of this name while it was watched"
                )
            if seen.status != last.status:
                last = seen
                yield seen
            elif seen.state == INTERRUPTED:
                why = self.explain(seen)
                raise UnavailableError(why.sentence, why.hint or "", why.next or "")

    def _recorded(self, job: str | DDPJob) -> tuple[JobFolder, DDPJob]:
        """Return folder and job. Raises ``JobNotFoundError`` if another job has taken the name of a given one."""
        record = self.record(job)
        found = seen_job(record)
        require_same(job, found.uid)
        return record, found

    def _unfinished(self, job: str | DDPJob) -> tuple[JobFolder, DDPJob]:
        record, found = self._recorded(job)
        if found.finished:
            raise already_finished(found)
        return record, found

    def _start(self, record: JobFolder, spec: Json, metadata: Json, job: str | DDPJob, *, is_new: bool = False) -> None:
        """Run the job in the background, where its last run or its YAML file has its directories."""
        from ddpjob.local import background

        given = job if isinstance(job, DDPJob) else None
        place: Json = {
            "directory": str((given.directory if given else None) or Path.cwd()),
            "volumes": {},
        } | record.place()
        head = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": metadata}
        others = given.others if given else ()
        order = background.Order(head | {"spec": spec}, str(self.folder.root), others=others, is_new=is_new, **place)
        background.start(order)

    def _until_nothing_runs(self, record: JobFolder) -> None:
        end = time.monotonic() + _STOP_SECONDS
        while record.runner() is not None:
            if time.monotonic() > end:
                raise LocalError(f"{record.name} still runs after {_STOP_SECONDS:g} s", "", "try again")
            time.sleep(_PAUSE)


def stop(record: JobFolder) -> None:
    """Stop the run, unless it stops already, and wait until it ends: its nodes save and exit.

    Raises ``LocalError`` if it does not end.
    """
    pid = record.runner()
    if pid is None:
        return
    if record.runs_elsewhere():
        raise LocalError(
            f"{record.name} runs in process {pid} of another machine or container, which shares this state folder",
            "this machine may have another process with that number",
            "give the command there, or stop the job there with Ctrl-C",
        )
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The pid may belong to another process by now; from here on the descriptor identifies the process.
        if record.runner() != pid:
            return
        if not _ends(process, record):
            raise LocalError(
                f"{record.name} still runs, in process {pid}, {_STOP_SECONDS:g} s after SIGTERM",
                "its trainer may be saving a large checkpoint",
                f"try again to wait longer, or kill it: kill -KILL {pid} (this ends all its processes)",
            )
    except PermissionError as error:
        raise LocalError(
            f"{record.name} runs in process {pid}, which belongs to another user",
            "only the owner of a process can stop it",
            "ask the owner, or name another folder with DDPJOB_STATE_DIR",
        ) from error
    finally:
        os.close(process)


def _ends(process: int, record: JobFolder) -> bool:
    """Send SIGTERM to a run that is not stopping yet, since a second one kills it. Return whether it ends in time."""
    end, is_told = time.monotonic() + _STOP_SECONDS, False
    while time.monotonic() < end:
        if not is_told and not _is_suspended(record):
            with contextlib.suppress(ProcessLookupError):  # it has ended, which the descriptor shows
                signal.pidfd_send_signal(process, signal.SIGTERM)
            is_told = True
        if select.select([process], [], [], _STOP_SECONDS if is_told else _PAUSE)[0]:
            return True
    return False


def _is_suspended(record: JobFolder) -> bool:
    """Return whether the record says that the job is to stop. At a resume it says so until the new run writes it."""
    with contextlib.suppress(LocalError):  # a damaged record, whose job can be deleted
        return bool(((record.job() or {}).get("spec") or {}).get("suspend"))
    return False


def explained(record: JobFolder, job: Json, *, is_run: bool) -> "Explanation":
    """Return why a job of this machine is in its state. is_run: a process runs it, or it has finished."""
    from ddpjob.client.local_snapshot import end_of_log, read_record
    from ddpjob.client.verdict.explain import explain, needed

    found = read_record(record, job, is_run=is_run)
    return explain(replace(found, logs={pod: end_of_log(record, pod) for pod in needed(found).logs}))


def _is_run(job: DDPJob) -> bool:
    return job.state not in (INTERRUPTED, "Suspended")


def _no_logs(record: JobFolder, choice: LogChoice) -> LocalError:
    from ddpjob.client.local_logs import attempts

    kept = attempts(record, record.job())
    if not kept:
        return LocalError(
            f"{record.name} has no logs yet", "none of its nodes has started", "ddpjob get shows its state"
        )
    wanted = choice.attempt or max(kept)
    if wanted not in kept:
        missing, there = f"attempt {wanted}", f"attempt {', '.join(map(str, sorted(kept)))}"
    else:
        asked = ", ".join(map(str, sorted(choice.nodes or {0})))
        missing, there = f"node {asked} in attempt {wanted}", f"node {', '.join(map(str, sorted(kept[wanted])))}"
    return LocalError(
        f"{record.name} has no logs of {missing}", f"there are logs of {there}", f"ddpjob logs {record.name} --all"
    )
