"""The logs of a job's pods: each line once, through lost connections, and of attempts that begin later.

The API server does not say where a client stopped reading, so each line is requested with its timestamp. After a
lost connection the log is requested from the second of the last line, and the known lines of that second are left out.
"""

import contextlib
import math
import queue
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import datetime

from urllib3.exceptions import ReadTimeoutError

from ddpjob.api import names
from ddpjob.api.backoff import Patience
from ddpjob.api.objects import element
from ddpjob.client.connection import (
    TROUBLES,
    ApiConnection,
    Query,
    RequestError,
    Response,
    lines_of,
    path_of,
    pause_after,
    request_error,
)
from ddpjob.client.job import DDPJob
from ddpjob.client.log_lines import LogChoice, LogLine, Redrawn, log_line
from ddpjob.errors import DDPJobError, InvalidJobError, JobNotFoundError, StoppedError, UnavailableError

_QUIET_SECONDS = 60.0
"""A log that is silent for so long is asked for again: the connection may be dead without an error. This is no error of
its own: a download is silent for longer, and a kubelet sends the head of its answer with the first line."""
_CONNECT_SECONDS = 10.0
_PAUSE = 0.5  # seconds between two looks at a pod that has not started
_MOST_FOLLOWED = 200  # pods, with a connection and a thread each
_MOST_WAITING = 10_000  # lines
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.\d+)?(Z|[+-]\d\d:\d\d)(?: |$)")


class Position:
    """How far a log is read. If the node's clock is set back, lines may be repeated after a lost connection."""

    def __init__(self) -> None:
        self.since: str | None = None
        """The second of the last line, for ``sinceTime``, which has whole seconds."""
        self._time: datetime | None = None
        self._known: Counter[bytes] = Counter()
        self._repeated: Counter[bytes] = Counter()

    def reconnect(self) -> None:
        """Expect the known lines of the last second again."""
        self._repeated = self._known.copy()

    def text(self, line: bytes) -> bytes | None:
        """Return a line without its timestamp, or None if it is known. Raises ``ValueError`` without a timestamp."""
        if (stamp := _STAMP.match(line)) is None:
            raise ValueError(line.decode(errors="replace"))
        if self._repeated[line] > 0:
            self._repeated[line] -= 1
            return None
        since = (stamp.group(1) + stamp.group(2)).decode()
        if since != self.since:
            time = datetime.fromisoformat(since)
            if self._time is None or time > self._time:
                self._known.clear()
            self.since, self._time = since, time
        self._known[line] += 1
        return line[stamp.end() :]


class JobLogs:
    """The logs of one job."""

    def __init__(self, connection: ApiConnection, job: DDPJob, choice: LogChoice) -> None:
        self.connection = connection
        self.job = job
        self.choice = choice
        self._lines: queue.Queue[LogLine | Exception] = queue.Queue(_MOST_WAITING)
        self._readers: dict[tuple[int, int], tuple[PodLog, threading.Thread]] = {}
        self._given_up: set[threading.Thread] = set()  # readers of logs that cannot be read
        self._has_ended = False

    def read(self) -> Iterator[LogLine]:
        """Yield the lines of the chosen attempt, or of the newest that has pods."""
        newest, attempt = self.job.status.attempt or 0, self.choice.attempt
        for number in (attempt,) if attempt else range(newest, max(newest - 2, 0), -1):
            logs = [PodLog(self, number, node) for node in self._wanted(number)]
            unread = []
            for log in logs:
                try:
                    yield from log.lines(follow=False)
                except DDPJobError as error:
                    unread.append(error)
            if unread and len(unread) == len(logs):
                raise unread[0]
            for failure in unread:
                _warn(failure)
            if any(log.existed for log in logs):
                return
        raise _no_logs(self.job, attempt)

    def follow(self, watch: Callable[[ApiConnection], Iterable[DDPJob]]) -> Generator[LogLine, None, None]:
        """Yield the lines of the chosen attempt, or also those of later attempts, until the job has finished.

        watch: returns the job and each of its changes.
        """
        if len(wanted := self._wanted(self.choice.attempt or 1)) > _MOST_FOLLOWED:
            raise InvalidJobError(
                f"the logs of {len(wanted)} nodes cannot be followed at a time",
                f"each needs a connection; at most {_MOST_FOLLOWED} are possible",
                "--node 0 selects a node, in Python nodes={0, 1} several",
            )
        with self.connection.part() as self.connection:  # whose streams end when the caller closes the generator
            watched = watch(self.connection)
            watcher = threading.Thread(target=self._watch, args=(watched,), name="ddpjob-watch", daemon=True)
            watcher.start()
            while True:
                try:
                    line = self._lines.get(timeout=_PAUSE / 2)
                except queue.Empty:
                    if self.connection.closed.is_set():
                        raise StoppedError from None
                    if watcher.is_alive() or any(thread.is_alive() for _, thread in self._readers.values()):
                        continue
                    if not self._lines.empty():
                        continue
                    if self.job.finished and not any(log.existed for log, _ in self._readers.values()):
                        raise _no_logs(self.job, self.choice.attempt) from None
                    return
                if isinstance(line, Exception):
                    raise line
                yield line

    def is_over(self, attempt: int) -> bool:
        """Return whether no pod of this attempt is created any more."""
        return self._has_ended or (self.job.status.attempt or 0) > attempt

    def _watch(self, watched: Iterable[DDPJob]) -> None:
        """Start a reader for each wanted pod of the attempts that begin."""
        attempt = self.choice.attempt
        try:
            first = attempt or self.job.status.attempt or 1
            for job in watched:
                self.job = job
                newest = job.status.attempt or 0
                for number in range(first, (attempt if attempt and newest >= attempt else newest) + 1):
                    for node in self._wanted(number):
                        self._start(number, node)
                if self.connection.closed.is_set() or (attempt and newest > attempt):
                    break
        except JobNotFoundError:
            pass  # the pods go with it; their readers end
        except Exception as error:  # raised to the user, in the thread that iterates
            self._put(error)
        finally:
            self._has_ended = True

    def _start(self, attempt: int, node: int) -> None:
        if (attempt, node) in self._readers:
            return
        log = PodLog(self, attempt, node)
        thread = threading.Thread(target=self._read, args=(log,), name=f"ddpjob-log-{attempt}-{node}", daemon=True)
        self._readers[attempt, node] = log, thread
        thread.start()

    def _read(self, log: "PodLog") -> None:
        try:
            for line in log.lines(follow=True):
                self._put(line)
        except StoppedError:
            pass
        except DDPJobError as error:
            self._given_up.add(threading.current_thread())
            readers = [thread for _, thread in list(self._readers.values())]
            if self.is_over(log.attempt) or any(t.is_alive() and t not in self._given_up for t in readers):
                _warn(error)
            else:
                self._put(error)
        except Exception as error:  # as above
            self._put(error)

    def _put(self, line: LogLine | Exception) -> None:
        """Wait for a place in the queue, as long as lines are taken from it."""
        while not self.connection.closed.is_set():
            with contextlib.suppress(queue.Full):
                return self._lines.put(line, timeout=_PAUSE)
        return None

    def _wanted(self, attempt: int) -> list[int]:
        is_all = self.choice.all_nodes
        nodes = int(self.job.manifest["spec"].get("numNodes") or 1)
        return sorted(range(nodes) if is_all else self.choice.of_attempt(self.job, attempt))


class PodLog:
    """The log of one pod. existed: whether the pod was seen."""

    def __init__(self, logs: JobLogs, attempt: int, node: int) -> None:
        self._logs = logs
        self.attempt = attempt
        self._node = node
        self._pod = names.pod_name(logs.job.name, str(logs.job.uid), attempt, node)
        self._namespace = str(logs.job.namespace)
        self._position, self._redrawn = Position(), Redrawn()
        self._rest = b""
        self._response: Response | None = None
        self.existed = False

    def lines(self, *, follow: bool) -> Iterator[LogLine]:
        """Yield the lines of the log; with ``follow`` until the trainer has ended and all its lines are read.

        Raises ``DDPJobError`` if it cannot be read for long.
        """
        patience, state = Patience(None if follow else self._logs.connection.timeout), "absent"
        while not self._logs.connection.closed.is_set():
            over = self._logs.is_over(self.attempt)
            try:
                state = self._state()
                if state == "absent" and (self.existed or over or not follow):
                    return
                self.existed = self.existed or state != "absent"
                if state in ("absent", "waiting"):
                    if not follow:
                        return
                    self._logs.connection.closed.wait(_PAUSE)
                    continue
                for line, unfinished in self._stream(patience, follow=follow and state == "running"):
                    patience.reset()
                    yield self._line(line, unfinished=unfinished)
                if not follow or state == "ended":
                    last = self._position.text(self._rest) if self._rest else None
                    yield from [] if last is None else [self._line(last)]
                    return
            except TROUBLES as trouble:
                error = request_error(trouble)
                if error.status == 400 and (state == "ended" or not follow):
                    return  # the container never started
                self._wait_after(error, patience)
            except ValueError as fault:  # the kubelet's own text in place of a line
                self._wait_after(RequestError(str(fault), 500, {}), patience)

    def _wait_after(self, error: RequestError, patience: Patience) -> None:
        """Wait before the next try; after a long time raise the error."""
        pause = _PAUSE if error.status == 400 else pause_after(error, patience)  # 400: the container has not started
        if pause is None and not self._logs.connection.closed.is_set():
            raise _unreadable(self._pod, self._logs.connection.explained(error)) from error
        if error.status == 401:
            self._logs.connection.renew()
        self._logs.connection.closed.wait(pause)

    def _state(self) -> str:
        """Return absent, waiting, running or ended, of the pod's trainer."""
        try:
            pod = self._logs.connection.once("GET", path_of(names.PODS, self._namespace, self._pod)).body
        except RequestError as error:
            if error.names(names.PODS.plural):
                return "absent"
            raise
        status = pod.get("status") or {}
        state = element(status.get("containerStatuses"), "name", names.TRAINER_CONTAINER).get("state") or {}
        if "terminated" in state or status.get("phase") in ("Succeeded", "Failed"):
            return "ended"
        return "running" if "running" in state else "waiting"

    def _stream(self, patience: Patience, *, follow: bool) -> Iterator[tuple[bytes, bool]]:
        """Yield the new lines of one connection, without their timestamps, and whether they are unfinished.

        What is behind the last line feed is kept.
        """
        self._position.reconnect()
        self._rest, self._response = b"", None
        try:
            response = self._response = self._open(follow)
            with contextlib.closing(lines_of(response, begun=follow)) as lines:
                for line in lines:
                    if line.startswith(b"\r"):
                        if (state := self._redrawn.now(line)) is not None:
                            yield _STAMP.sub(b"", state), True
                    elif not line.endswith(b"\n"):
                        self._rest = line
                    elif (text := self._position.text(line[:-1])) is not None:
                        yield text, False
        except TROUBLES as trouble:
            # The API server has shown the running pod, so that a log which is silent, or cut, is no error in a row.
            silent = self._response is not None or isinstance(trouble.__cause__, ReadTimeoutError)
            if follow and silent and not self._logs.is_over(self.attempt):
                patience.reset()
            raise

    def _open(self, follow: bool) -> Response:
        since, choice = self._position.since, self._logs.choice
        query: Query = {
            "container": names.TRAINER_CONTAINER,
            "timestamps": True,
            "follow": follow,
            "sinceTime": since,
            "tailLines": choice.tail if since is None else None,
            "sinceSeconds": None if since or choice.since is None else max(1, math.ceil(choice.since)),
        }
        path = path_of(names.PODS, self._namespace, self._pod, "log")
        return self._logs.connection.send("GET", path, query, seconds=(_CONNECT_SECONDS, _QUIET_SECONDS))

    def _line(self, text: bytes, *, unfinished: bool = False) -> LogLine:
        world = self._logs.job.status.world
        nproc = world.nproc_per_node if world else None
        return log_line(self._node, self.attempt, text.decode(errors="replace"), nproc, unfinished=unfinished)


def _warn(error: DDPJobError) -> None:
    """Warn of a log that cannot be read: a lost node must not end what others print."""
    warnings.warn(error.error, RuntimeWarning, stacklevel=2)


def _unreadable(pod: str, error: DDPJobError) -> DDPJobError:
    return type(error)(f"the log of {pod} cannot be read: {error.error}", error.hint, error.next_step)


def _no_logs(job: DDPJob, attempt: int | None) -> DDPJobError:
    if not job.status.attempt:
        return UnavailableError(
            f"{job.name} has no logs yet", "no attempt has started", f"{_command('why', job)} says why"
        )
    of = f" of attempt {attempt}" if attempt else ""
    kept = any(failure.log_tail for failure in job.status.failures or ())
    return UnavailableError(
        f"{job.name} has no pods{of}, so there are no logs{of}",
        "the operator keeps the pods of the last attempt and of the failure before it; spec.podRetention changes that",
        f"{_command('get', job)} -o yaml has the end of the log of a failed pod: status.failures[].logTail"
        if kept
        else f"{_command('why', job)} says what is known",
    )


def _command(verb: str, job: DDPJob) -> str:
    return f"ddpjob {verb} {job.name} --namespace {job.namespace}"
