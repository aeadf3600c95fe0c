"""``ddpjob logs``: prints what the nodes of a job printed, also while it runs. Holds the reader of log files."""

import mmap
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option

from ddpjob.api import names
from ddpjob.api.objects import Json
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
    reader = _Reader(record, node, attempt, all_nodes, tail)
    while follow and record.runner() is not None:
        reader.print_news()
        time.sleep(_PAUSE)
    reader.print_news()
    reader.print_rest()
    if not reader.logs:
        raise _nothing(record, node, attempt)
    return 0


@dataclass
class _Reader:
    """Prints new lines of the requested logs; when a new attempt begins, it switches to the logs of that attempt."""

    record: JobFolder
    node: int | None
    attempt: int | None
    all_nodes: bool
    tail: int | None
    logs: dict[int, "LogFile"] = field(default_factory=dict)
    _shown_attempt: int = 0
    _several: bool = False

    def print_news(self) -> None:
        """Print new lines; first the rest of the current attempt, which may have ended."""
        self._print_lines()
        self._open_new_logs()
        self._print_lines()
        sys.stdout.flush()

    def print_rest(self) -> None:
        """Print last lines that have no line feed."""
        for rank, log in sorted(self.logs.items()):
            if rest := log.remainder():
                self._print(rank, rest)

    def _print_lines(self) -> None:
        for rank, log in sorted(self.logs.items()):
            for line in log.lines():
                self._print(rank, line)

    def _open_new_logs(self) -> None:
        """Open the logs of new nodes, and of a new attempt."""
        job = self.record.job()
        found = attempts(self.record, job)
        if not found:
            return
        attempt = self.attempt or max(found)
        if attempt != self._shown_attempt and self.logs:
            self.print_rest()
            self.logs = {}
        self._shown_attempt = attempt
        ranks = found.get(attempt, {})
        self._several = len(ranks) > 1 or bool(job and job["spec"]["numNodes"] > 1)
        for rank in self._wanted(ranks, attempt, job):
            if rank in ranks and rank not in self.logs:
                self.logs[rank] = LogFile(self.record.log(ranks[rank]), last=self.tail)

    def _wanted(self, ranks: Iterable[int], attempt: int, job: Json | None) -> set[int]:
        if self.node is not None:
            return {self.node}
        return set(ranks) if self.all_nodes else {0, *failed_nodes(self.record, attempt, job)}

    def _print(self, rank: int, line: str) -> None:
        prefix = ""
        if self._several:
            colour = _COLOURS[rank % len(_COLOURS)]
            prefix = f"\x1b[{colour}mn{rank}\x1b[0m " if _is_coloured() else f"n{rank} "
        print(prefix + sanitize_line(line))


def _is_coloured() -> bool:
    """Return whether to print colours; see https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


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
    for pod in record.pods():
        labels = pod["metadata"].get("labels") or {}
        rank = str(labels.get(names.LABEL_NODE_RANK, ""))
        if (pod.get("status") or {}).get("phase") == "Failed" and labels.get(names.LABEL_ATTEMPT) == str(attempt):
            found |= {int(rank)} if rank.isdigit() else set()
    return found


def _nothing(record: JobFolder, node: int | None, attempt: int | None) -> LocalError:
    kept = attempts(record, record.job())
    if not kept:
        return LocalError(
            f"{record.name} has no logs yet", "none of its nodes has started", "ddpjob get shows its state"
        )
    if attempt is not None and attempt not in kept:
        listed = ", ".join(map(str, sorted(kept)))
        return LocalError(
            f"{record.name} has no logs of attempt {attempt}",
            f"there are logs of attempt {listed}",
            "omit --attempt for the newest",
        )
    ranks = sorted(kept[attempt or max(kept)])
    return LocalError(
        f"{record.name} has no logs of node {node if node is not None else 0} in attempt {attempt or max(kept)}",
        f"nodes are counted from 0; there are logs of {', '.join(map(str, ranks))}",
        f"ddpjob logs {record.name} --all",
    )


class LogFile:
    """Returns each complete line of a growing file once. The file may be created later."""

    def __init__(self, path: Path, last: int | None = None) -> None:
        """last: begin with that many lines before the end; None: with the first line."""
        self._path = path
        self._position = 0 if last is None else _start_of_last(path, last)
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """Yield the lines since the last call; a line without a line feed is kept for a later call."""
        try:
            stream = self._path.open("rb")
        except OSError:
            return
        with stream:
            stream.seek(self._position)
            while block := stream.read(_BLOCK):
                self._position += len(block)
                *complete, self._rest = (self._rest + block).split(b"\n")
                yield from (line.decode(errors="replace") for line in complete)
                if len(self._rest) > _LONGEST:
                    yield self.remainder()

    def remainder(self) -> str:
        """Return the last line if it has no line feed; to be called when the writer has ended."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a file of any size; none if there is no file."""
    log = LogFile(path, last=count)
    found = list(log.lines())
    if rest := log.remainder():
        found.append(rest)
    return found[-count:] if count else []


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
