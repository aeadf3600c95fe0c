"""``ddpjob stacks``: where the code of all ranks is now, grouped by what they do."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ddpjob.api.text import clean_line, clean_lines
from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.table import Cell, show, table
from ddpjob.cli.text import duration, is_coloured, number_of, one_line, red

if TYPE_CHECKING:
    from rich.table import Table

    from ddpjob.client.stacks import RankStacks, StackTable

_GROUPS, _FRAMES = 4, 12
"""Groups whose stack is shown, the smallest first, and how many frames of it."""


def stacks(
    name: Name,
    output: Form = "text",
    *,
    rank: Annotated[
        list[int] | None,
        Option("--rank", min=0, metavar="RANK", help="Print the stacks of all threads of this rank. May be repeated."),
    ] = None,
    where: Where,
) -> int:
    """Show the Python stacks of all ranks as they are now, grouped: who waits in which collective, and who does not.

    The ranks go on; no line of the script is needed. It needs ddprun or ddptrain as the launcher, and on a cluster the
    rights to get and create pods/proxy. The JSON has the schema docs/reference/schemas/stacks.json.

    \b
    Example:
      ddpjob stacks mnist-cpu
    """
    with find(name, where) as client:
        seen = client.stacks(name)
    if output == "json":
        print(json.dumps(seen.wire(), indent=2))
        return 0
    if rank:
        for each in [each for each in seen.ranks if each.rank in rank]:
            print(f"rank {each.rank}:\n{clean_lines(each.stacks.strip() or 'no answer')}")
        return 0
    print(headline(seen))
    show(groups_table(seen))
    for group in seen.groups[::-1][:_GROUPS]:
        show_stack(group[0])
    return 0


def headline(seen: "StackTable") -> str:
    """Return what is said about all ranks."""
    parts = [f"{one_line(seen.job)} attempt {seen.attempt}", f"{len(seen.ranks)} of {seen.world_size} ranks"]
    if seen.missing_nodes:
        shown = ", ".join(map(str, seen.missing_nodes[:8])) + (" …" if len(seen.missing_nodes) > 8 else "")
        parts.append(f"no answer of node {shown}")
    if seen.omitted_ranks:
        parts.append(f"{seen.omitted_ranks} ranks are left out")
    groups = "; ".join(map(_sentence, seen.groups[:_GROUPS])) + ("; …" if len(seen.groups) > _GROUPS else "")
    return f"{', '.join(parts)}: {groups} ({one_line(seen.place)})"


def _sentence(group: "Sequence[RankStacks]") -> str:
    first = group[0]
    who = number_of(len(group), "rank") if len(group) > 1 else f"rank {first.rank}"
    return one_line(f"{who}: {first.does}" + (f" at {first.where}" if first.where else ""))


def groups_table(seen: "StackTable") -> "Table":
    """Return one row for ranks that do the same at the same place."""
    rows = []
    for group in seen.groups:
        first, steps = group[0], [rank.step for rank in group]
        rows.append(
            [
                Cell(listed([rank.rank for rank in group]), len(group) < len(seen.ranks) / 2),
                Cell(first.does, not first.answered),
                first.where or "-",
                steps[0] if min(steps) == max(steps) else f"{min(steps)}-{max(steps)}",
                f"{duration(max(rank.quiet for rank in group))} ago",
            ]
        )
    return table(["RANKS", "DO", "AT", "STEP", "HEARTBEAT"], rows, whole=("AT",))


def listed(numbers: Sequence[int]) -> str:
    """Return numbers that grow as ranges: ``0-16, 18``."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def show_stack(rank: "RankStacks") -> None:
    """Print the stack of the main thread, which faulthandler writes last, down to the line of the program."""
    _, *frames = rank.stacks.strip().split("\n\n")[-1].splitlines() or [""]
    if not frames:
        return
    file, _, line = (rank.where or "").rpartition(":")
    is_own = [f'{file}", line {line} ' in frame for frame in frames]
    shown = frames[: is_own.index(True) + 1 if True in is_own else _FRAMES][-_FRAMES:]
    title = f"rank {rank.rank}, most recent call first:"
    print(red(title) if not rank.collective and is_coloured() else title)
    print("\n".join(map(clean_line, shown)))
    print(f"  … ddpjob stacks --rank {rank.rank} shows all threads")
