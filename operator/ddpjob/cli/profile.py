"""``ddpjob profile``: some steps of all ranks as one Chrome trace, and which ranks wait for which."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.table import Cell, Row, show, table
from ddpjob.cli.text import number_of, one_line

if TYPE_CHECKING:
    from rich.table import Table

    from ddpjob.client.profile import Profile, RankProfile

_WAITING = 0.1
"""A share of a step that is abnormal for a wait."""


def profile(
    name: Name,
    output: Form = "text",
    *,
    steps: Annotated[int, Option("--steps", min=1, max=100, metavar="N", help="Number of steps.")] = 5,
    to: Annotated[
        Path | None,
        Option(
            "--to",
            metavar="FILE",
            help="Write the trace to FILE, compressed by gzip.",
            show_default="NAME-profile.json.gz",
        ),
    ] = None,
    timeout: Annotated[
        int, Option("--timeout", min=1, max=600, metavar="SECONDS", help="Time for the steps to end.")
    ] = 120,
    where: Where,
) -> int:
    """Profile the next steps of all ranks: one Chrome trace with aligned clocks, and a table of the longest waits.

    The training goes on and loses no step; no line of the script is needed. Open the file at https://ui.perfetto.dev
    or chrome://tracing. It needs torch.profiler, ddprun or ddptrain as the launcher, and on a cluster the rights to get
    and create pods/proxy. The JSON has the schema docs/reference/schemas/profile.json.

    \b
    Example:
      ddpjob profile mnist-cpu --steps 5
    """
    shown = ""

    def say(text: str) -> None:
        nonlocal shown
        if text != shown:
            shown = text
            print(text, file=sys.stderr, flush=True)

    with find(name, where) as client:
        found = client.profile(name, steps=steps, to=to, timeout=timeout, on_progress=say)
    if output == "json":
        print(json.dumps(found.wire(), indent=2))
        return 0
    print(headline(found))
    show(ranks_table(found))
    if found.waits:
        print("longest waits:")
        rows = [[w.rank, _seconds(w.seconds), w.collective, w.step, w.for_rank] for w in found.waits]
        show(table(["RANK", "WAIT", "IN", "STEP", "FOR RANK"], rows))
    print(f"{one_line(found.file)}: open it at https://ui.perfetto.dev; each process is a rank")
    return 0


def headline(found: "Profile") -> str:
    """Return what is said about all ranks."""
    done = sum(rank.state == "done" for rank in found.ranks)
    parts = [f"{one_line(found.job)} attempt {found.attempt}", f"traces of {done} of {found.world_size} ranks"]
    aligned = [abs(offset) for node, offset in found.clock_offsets.items() if node not in found.not_aligned]
    if len(aligned) > 1:
        parts.append(f"clocks of {number_of(len(aligned), 'node')} aligned by up to {_seconds(max(aligned))}")
    if found.not_aligned:
        parts.append(f"not aligned: node {', '.join(map(str, found.not_aligned[:8]))}")
    if found.has_unknown_groups:
        parts.append("without the waits in gloo, because PyTorch does not say of which process group")
    if found.is_cut:
        parts.append("events of the last ranks are left out, because the file is too long")
    return f"{', '.join(parts)} ({one_line(found.place)})"


def ranks_table(found: "Profile") -> "Table":
    """Return one row for each rank."""
    header = ["RANK", "STEPS", "STEP TIME", "WAITS", "FOR RANK", "DATA", "TRACE"]
    return table(header, list(map(_row, found.ranks)), whole=("RANK",))


def _row(rank: "RankProfile") -> Row:
    return [
        f"n{rank.node}r{rank.rank}",
        f"{rank.first}-{rank.first + rank.steps - 1}" if rank.steps > 0 else "-",
        _seconds(rank.step_seconds),
        _share(rank.wait_seconds, rank.step_seconds),
        "-" if rank.waits_for is None else rank.waits_for,
        _share(rank.data_seconds, rank.step_seconds),
        Cell(f"{rank.state}{f': {rank.error}' if rank.error else ''}", rank.state != "done"),
    ]


def _share(part: float | None, whole: float | None) -> Cell:
    if part is None or not whole:
        return Cell("-")
    return Cell(f"{_seconds(part)} ({part / whole:.0%})", part / whole >= _WAITING)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
