"""``ddpjob logs``: prints what the nodes of a job printed, also while it runs. Holds the reader of log files."""

import contextlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.pod_view import pod_view
from ddpjob.cli.options import Name, Namespace, StateDir, find, state_folder
from ddpjob.cli.text import sanitize_line
from ddpjob.local import LocalError
from ddpjob.local.state import JobFolder

_PAUSE = 0.1  # seconds between two reads
_BLOCK = 65_536
_LONGEST = 1_048_576  # bytes; a longer line is printed in parts
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


def logs(
    name: Name,
    *,
    node: Annotated[int | None, Option("--node", min=0, metavar="N", help="Only this node.")] = None,
    attempt: Annotated[
        int | None, Option("--attempt", min=1, metavar="N", help="Logs of this attempt.", show_default="the newest")
    ] = None,
    all_nodes: Annotated[bool, Option("--all", help="All nodes, not only node 0 and nodes that failed.")] = False,
    follow: Annotated[bool, Option("--follow", "-f", help="Follow the logs until the run ends.")] = False,
    tail: Annotated[
        int | None, Option("--tail", min=0, metavar="N", help="Only the last N lines of each node.")
    ] = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Print the logs of a job: of node 0 and of nodes that failed.

    Lines of a job with several nodes begin with the node, for example n1. Control characters are escaped.

    \b
    Example:
      ddpjob logs mnist-cpu --all --tail 20
    """
    record = find(state_folder(state_dir), name, namespace)

    def show(rank: int, line: str) -> None:
        print((_prefix(rank) if reader.several else "") + sanitize_line(line))

    reader = LogReader(record, show, node=node, attempt=attempt, all_nodes=all_nodes, tail=tail)
    while follow and record.runner() is not None:
        reader.read()
        sys.stdout.flush()
        time.sleep(_PAUSE)
    reader.read(to_the_end=True)
    if not reader.logs:
        raise _nothing(record, node, attempt)
    return 0


def _prefix(rank: int) -> str:
    """Return the node, in colour on a terminal; see https://no-color.org."""
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}mn{rank}\x1b[0m " if coloured else f"n{rank} "


@dataclass(kw_only=True)
class LogReader:
    """Reads new lines of the requested logs; when a new attempt begins, it switches to the logs of that attempt.

    show: called with the node and each line. several: whether the job has several nodes.
    """

    record: JobFolder = field(kw_only=False)
    show: Callable[[int, str], None] = field(kw_only=False)
    node: int | None = None
    attempt: int | None = None
    all_nodes: bool = False
    tail: int | None = None
    logs: dict[int, "LogFile"] = field(default_factory=dict)
    several: bool = False
    _shown_attempt: int = 0

    def read(self, *, to_the_end: bool = False) -> None:
        """Show new lines; with ``to_the_end`` also a last line without a line feed."""
        self._show_lines()  # of the current attempt, which may have ended
        self._open_new_logs()
        self._show_lines(to_the_end=to_the_end)

    def _show_lines(self, *, to_the_end: bool = False) -> None:
        for rank, log in sorted(self.logs.items()):
            for line in log.lines(to_the_end=to_the_end):
                self.show(rank, line)

    def _open_new_logs(self) -> None:
        """Open the logs of new nodes, and of a new attempt."""
        job = self.record.job()
        found = attempts(self.record, job)
        if not found:
            return
        attempt = self.attempt or max(found)
        if attempt != self._shown_attempt:
            self._show_lines(to_the_end=True)
            self.logs, self._shown_attempt = {}, attempt
        ranks = found.get(attempt, {})
        self.several = len(ranks) > 1 or bool(job and job["spec"]["numNodes"] > 1)
        for rank in self._wanted(ranks, attempt, job):
            if rank in ranks and rank not in self.logs:
                self.logs[rank] = LogFile(self.record.log(ranks[rank]), last=self.tail)

    def _wanted(self, ranks: Iterable[int], attempt: int, job: Json | None) -> set[int]:
        if self.node is not None:
            return {self.node}
        return set(ranks) if self.all_nodes else {0, *failed_nodes(self.record, attempt, job)}


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


def failed_nodes(record: JobFolder, attempt: int, job: Json | None) -> set[int]:
    """Return the nodes that failed in that attempt, according to the job's failures and its pods."""
    failures = ((job or {}).get("status") or {}).get("failures") or ()
    found = {f["nodeRank"] for f in failures if f.get("attempt") == attempt and f.get("nodeRank") is not None}
    return found | {pod.node_rank for pod in map(pod_view, record.pods()) if pod.exit_code and pod.attempt == attempt}


def _nothing(record: JobFolder, node: int | None, attempt: int | None) -> LocalError:
    kept = attempts(record, record.job())
    if not kept:
        return LocalError(
            f"{record.name} has no logs yet", "none of its nodes has started", "ddpjob get shows its state"
        )
    wanted = attempt or max(kept)
    if wanted not in kept:
        missing, there = f"attempt {wanted}", f"attempt {', '.join(map(str, sorted(kept)))}"
    else:
        missing, there = f"node {node or 0} in attempt {wanted}", f"node {', '.join(map(str, sorted(kept[wanted])))}"
    return LocalError(
        f"{record.name} has no logs of {missing}", f"there are logs of {there}", f"ddpjob logs {record.name} --all"
    )


class LogFile:
    """Returns each line of a growing file once. The file may be created later."""

    def __init__(self, path: Path, last: int | None = None) -> None:
        """last: begin with that many lines before the end; None: with the first line."""
        self._path = path
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
                    complete, self._rest = [*complete, self._rest], b""
                yield from (line.decode(errors="replace") for line in complete)
        if to_the_end and self._rest:
            rest, self._rest = self._rest, b""
            yield rest.decode(errors="replace")


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
