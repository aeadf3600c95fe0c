"""Tables of jobs, ranks and pods, drawn by Rich. Imports it late: most commands print no table."""

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from ddpjob.cli.text import is_coloured, one_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

_UNLIMITED = 10_000  # columns of a pipe or a file: nothing is cut there
_LEAST = 20  # columns of texts that are folded
_GAP = 2  # between columns
_SHORTEST = (9, 3)
"""To which columns are cut: first only long ones, then, where this is not enough, all."""


class Cell(NamedTuple):
    """Text in a table; only what is abnormal is in colour."""

    text: object
    is_abnormal: bool = False


Row = Sequence[object]
"""Texts or ``Cell``."""


def table(
    header: Sequence[str],
    rows: Sequence[Row],
    *,
    whole: Sequence[str] = ("NAME", "NAMESPACE"),
    folded: str | None = None,
) -> "Table":
    """Return a table without lines, as kubectl prints them.

    Args:
        whole: columns that a narrow terminal does not cut, because users copy them.
        folded: the column whose texts take several lines on a narrow terminal.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="")
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    texts = [[one_line("" if cell.text is None else cell.text) for cell in row] for row in cells]
    widths = [max(map(cell_len, (name, *(row[number] for row in texts)))) for number, name in enumerate(header)]
    kept = {number for number, name in enumerate(header) if name in whole}
    if folded is not None:
        wide = header.index(folded)
        others = sum(widths) - widths[wide] + _GAP * (len(widths) - 1)
        widths[wide] = min(widths[wide], max(_LEAST, console().width - others))
        kept.add(wide)
    widths = _fitting(widths, kept)
    for name, width in zip(header, widths, strict=True):
        # Rich would leave out columns at the right, and cut others without a mark.
        overflow: Literal["fold", "ellipsis"] = "fold" if name == folded else "ellipsis"
        made.add_column(name, no_wrap=name != folded, overflow=overflow, min_width=width, max_width=max(width, 1))
    for row, shown in zip(cells, texts, strict=True):
        made.add_row(*(Text(text, "red" if cell.is_abnormal else "") for cell, text in zip(row, shown, strict=True)))
    return made


def _fitting(widths: Sequence[int], whole: Collection[int]) -> list[int]:
    """Return the widths of columns on this terminal: the longest are cut first, and some remain whole."""
    found = list(widths)
    excess = sum(found) + _GAP * (len(found) - 1) - console().width
    for least in _SHORTEST:
        for number in sorted(range(len(found)), key=lambda number: -widths[number]):
            if number not in whole:
                cut = max(0, min(excess, found[number] - least))
                found[number] -= cut
                excess -= cut
    return found


def show(drawn: "RenderableType") -> None:
    """Print a table: on a terminal as wide as that, elsewhere whole and without blanks at the ends of lines."""
    stdout = console()
    if stdout.is_terminal:
        stdout.print(drawn)
        return
    with stdout.capture() as captured:
        stdout.print(drawn)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def console() -> "Console":
    """Return standard output for Rich: a terminal with its width and colours, else without limits."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    return Console(
        highlight=False, emoji=False, markup=False, no_color=not is_coloured(), force_terminal=is_terminal,
        width=None if is_terminal else _UNLIMITED,
    )  # fmt: skip
