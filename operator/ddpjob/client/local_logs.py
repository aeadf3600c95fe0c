"""The logs of a local job: each line of its growing files once, also of attempts that begin later."""

import codecs
import contextlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.pod_view import pod_view
from ddpjob.client.job import DDPJob
from ddpjob.client.log_lines import LogChoice, LogLine, Redrawn, log_line
from ddpjob.local.state import JobFolder

_BLOCK = 65_536
_LONGEST = 1_048_576  # bytes; a longer line is returned in parts


@dataclass
class LogReader:
    """Reads new lines of the chosen logs.

    Without an attempt it begins with the newest, and goes on with all that follow. The log of an earlier attempt is
    read until its pod has ended, because pods save and exit while the next attempt already runs.
    """

    record: JobFolder
    choice: LogChoice
    redrawn_seconds: float = 1.0
    """Between two lines for what a progress bar shows."""
    found: set[tuple[int, int]] = field(default_factory=set)
    """Attempt and node of every log so far."""
    _open: dict[tuple[int, int], "LogFile"] = field(default_factory=dict)
    _first: int = 0
    _nproc: int | None = None

    def read(self, *, to_the_end: bool = False) -> Iterator[LogLine]:
        """Yield the new lines; with ``to_the_end`` also a last line without a line feed."""
        ended = self._open_logs()
        for (attempt, node), log in sorted(self._open.items()):
            for text in log.lines(to_the_end=to_the_end or (attempt, node) in ended):
                yield log_line(node, attempt, text, self._nproc)
            if (bar := log.redrawn()) is not None:
                yield log_line(node, attempt, bar, self._nproc, unfinished=True)
        for key in ended & self._open.keys():
            del self._open[key]
        if self.found:
            self.choice = replace(self.choice, tail=None)  # what is printed from now on is not limited

    def _open_logs(self) -> set[tuple[int, int]]:
        """Open the logs of new nodes and attempts. Return attempt and node of the pods that have ended."""
        job, pods = self.record.job(), [pod_view(pod) for pod in self.record.pods()]
        found = attempts(self.record, job)
        if job is None or not found:
            return set()
        shown = DDPJob.from_manifest(job)
        self._nproc = shown.status.world.nproc_per_node if shown.status.world else None
        self._first = self._first or self.choice.attempt or max(found)
        for attempt in (a for a in found if a == self._first or (self.choice.attempt is None and a > self._first)):
            failed = {pod.node_rank for pod in pods if pod.exit_code and pod.attempt == attempt}
            wanted = self.choice.of_attempt(shown, attempt, failed)
            for node, pod in found[attempt].items():
                if (self.choice.all_nodes or node in wanted) and (attempt, node) not in self.found:
                    self.found.add((attempt, node))
                    self._open[attempt, node] = LogFile(self.record.log(pod), self.choice.tail, self.redrawn_seconds)
        # A pod of an earlier attempt is no longer recorded when it has ended and is deleted.
        alive = {(pod.attempt, pod.node_rank) for pod in pods if pod.exit_code is None}
        newest = max(shown.status.attempt or 0, *found)
        return {key for key in self._open if key not in alive and key[0] < newest}


def attempts(record: JobFolder, job: Json | None) -> dict[int, dict[int, str]]:
    """Return attempt to node to pod for every log of this job; logs of a job that it replaced are excluded."""
    if job is None:
        return {}
    prefix = names.service_name(job["metadata"]["name"], job["metadata"]["uid"])
    found: dict[int, dict[int, str]] = {}
    folder = record.path / "pods"
    for path in folder.iterdir() if folder.is_dir() else ():
        name, _, numbers = path.name.rpartition(f"{prefix}-")
        attempt, _, rank = numbers.partition("-")
        if not name and attempt.isdigit() and rank.isdigit():
            found.setdefault(int(attempt), {})[int(rank)] = path.name
    return found


class LogFile:
    """Returns each line of a growing file once. The file may be created later."""

    def __init__(self, path: Path, last: int | None = None, redrawn_seconds: float = 1.0) -> None:
        """last: begin with that many lines before the end; None: with the first line."""
        self._path = path
        self._redrawn = Redrawn(redrawn_seconds)
        self._position = 0 if last is None else _start_of_last(path, last)
        self._rest = b""

    def lines(self, *, to_the_end: bool = False) -> Iterator[str]:
        """Yield the lines since the last call.

        A last line without a line feed is kept for a later call, unless ``to_the_end``: the writer has ended.
        """
        with contextlib.suppress(OSError), self._path.open("rb") as stream:
            stream.seek(self._position)
            while block := stream.read(_BLOCK):
                self._position += len(block)
                *complete, self._rest = (self._rest + block).split(b"\n")
                if len(self._rest) > _LONGEST:
                    end = codecs.utf_8_decode(self._rest, "replace")[1]  # not inside a character
                    complete, self._rest = [*complete, self._rest[:end]], self._rest[end:]
                yield from (line.decode(errors="replace") for line in complete)
        if to_the_end and self._rest:
            rest, self._rest = self._rest, b""
            yield rest.decode(errors="replace")

    def redrawn(self) -> str | None:
        """Return what a last line without a line feed shows, if it is a progress bar that has moved."""
        state = self._redrawn.now(self._rest)
        return None if state is None else state.decode(errors="replace")


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a file of any size; none if there is no file."""
    return list(LogFile(path, last=count).lines(to_the_end=True))[-count:] if count else []


def _start_of_last(path: Path, count: int) -> int:
    """Return where the last ``count`` lines begin; a last line without a line feed counts."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
            begin = len(text)
            for _ in range(count):
                if begin == 0:
                    break
                begin = text.rfind(b"\n", 0, begin - 1) + 1
            return begin
    except (OSError, ValueError):  # no file, or an empty one
        return 0
