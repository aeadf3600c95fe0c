"""``ddpjob logs``: prints what the nodes of a job printed, also while it runs."""

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ddpjob.api.text import clean_line
from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.text import is_coloured, one_line
from ddpjob.errors import InvalidJobError

if TYPE_CHECKING:
    from ddpjob.api.objects import Json
    from ddpjob.client.job import DDPJob
    from ddpjob.client.log_lines import LogLine

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")
_UNITS = (86_400, 3600, 60, 1)


def logs(
    name: Name,
    *,
    node: Annotated[int | None, Option("--node", min=0, metavar="N", help="Only this node.")] = None,
    rank: Annotated[
        list[int] | None, Option("--rank", min=0, metavar="N", help="Only this global rank. May be repeated.")
    ] = None,
    attempt: Annotated[
        int | None, Option("--attempt", min=1, metavar="N", help="Logs of this attempt.", show_default="the newest")
    ] = None,
    all_nodes: Annotated[bool, Option("--all", help="All nodes, not only node 0 and nodes that failed.")] = False,
    follow: Annotated[bool, Option("--follow", "-f", help="Follow the logs until the run ends.")] = False,
    tail: Annotated[
        int | None, Option("--tail", min=0, metavar="N", help="Only the last N lines of each node.")
    ] = None,
    since: Annotated[
        str | None, Option("--since", metavar="TIME", help="Only lines of the last TIME, for example 90s or 1h30m.")
    ] = None,
    output: Form = "text",
    where: Where,
) -> int:
    """Print the logs of a job: of node 0 and of nodes that failed.

    Lines begin with node and rank where they say which rank printed them, for example n1r3, else with the node if there
    are several. Control characters are escaped. Standard error says where the job is, and if the newest attempt has no
    logs, of which attempt they are. The JSON, an object a line, has the schema docs/reference/schemas/logs.json.

    \b
    Example:
      ddpjob logs mnist-cpu --all --tail 20
    """
    if node is not None and rank:
        raise InvalidJobError("--node and --rank exclude each other", "a rank is on one node", "leave out one of them")
    seconds = None if since is None else _seconds(since)
    with find(name, where) as client:
        job = client.get(name)
        found = client.logs(
            job,
            nodes=None if node is None else {node},
            ranks=set(rank) if rank else None,
            all_nodes=all_nodes,
            attempt=attempt,
            follow=follow,
            tail=tail,
            since=seconds,
        )
        if output == "json":
            for line in found:
                if not line.unfinished:
                    print(json.dumps(_object(line)), flush=follow)
        else:
            print_lines(job, _announced(found, job, client.place, is_any=attempt is None), flush=follow)
    return 0


def _announced(lines: "Iterator[LogLine]", job: "DDPJob", place: str, *, is_any: bool) -> "Iterator[LogLine]":
    """Yield the lines, and say before the first what they are; an error is raised before that.

    is_any: no attempt was asked for.
    """
    first = next(lines, None)
    older, newest = first.attempt if first is not None else 0, job.status.attempt or 0
    note = f", attempt {older}: attempt {newest} has no logs" if is_any and 0 < older < newest else ""
    print(one_line(f"logs of {job.name} on {place}{note}:"), file=sys.stderr, flush=True)
    if first is not None:
        yield first
        yield from lines


def print_lines(job: "DDPJob", lines: Iterable["LogLine"], *, flush: bool) -> None:
    """Print lines of a job, each after the node or rank that printed it.

    On a terminal the next line replaces a progress bar, cut to the width; elsewhere each state of it is a line.
    """
    several, width = job.manifest["spec"].get("numNodes", 1) > 1, shutil.get_terminal_size().columns - 8
    is_terminal = sys.stdout.isatty()
    erase = ""
    for line in lines:
        if is_terminal and line.unfinished:
            bar = replace(line, text=line.text[:width])
            print(f"{shown(bar, several=several)}\x1b[K", end="\r", flush=flush)
            erase = "\x1b[K"
        else:
            print(shown(line, several=several) + erase, flush=flush)
            erase = ""


def shown(line: "LogLine", *, several: bool) -> str:
    """Return a line with the node, or the rank, that printed it; in colour on a terminal."""
    from ddpjob.client.log_lines import RANK_PREFIX

    if RANK_PREFIX.match(line.text):
        return _prefix(f"n{line.node}r{line.rank}", line.rank or 0) + _text(line)
    return (_prefix(f"n{line.node}", line.node) if several else "") + _text(line)


def _text(line: "LogLine") -> str:
    """Return a line as a terminal shows it, which is the last state of a progress bar, without the prefix of ddprun."""
    from ddpjob.client.log_lines import RANK_PREFIX

    prefix = RANK_PREFIX.match(line.text)
    return clean_line(line.text[prefix.end() :] if prefix else line.text)


def _object(line: "LogLine") -> "Json":
    from ddpjob.client.log_lines import PrintedLine

    return PrintedLine(node=line.node, rank=line.rank, attempt=line.attempt, line=_text(line)).wire()


def _prefix(name: str, number: int) -> str:
    return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{name}\x1b[0m " if is_coloured() else f"{name} "


def _seconds(text: str) -> float:
    """Return the seconds of ``90``, ``90s``, ``10m`` or ``1h30m``."""
    found = _DURATION.fullmatch(text)
    seconds = sum(int(part or 0) * unit for part, unit in zip(found.groups(), _UNITS, strict=True)) if found else 0
    if not seconds:
        raise InvalidJobError(
            f"--since {text}: this is no duration", "it takes days, hours, minutes, seconds", "--since 1h30m"
        )
    return seconds
