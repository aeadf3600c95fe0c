"""Draw what an exchange did: a table with a row per rank, and the same as an SVG file if LESSON_SVG_DIR is set."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Row = tuple[Any, Any]  # what a rank had before and after: numbers, texts, None, and lists of these

_CELL, _ROW, _GAP = (30, 26), 36, 8  # pixels: width and height of a cell, distance of rows, distance of two lists
_TOP, _LEFT, _ARROW, _MARGIN, _COLUMN = 62, 78, 64, 16, 52
_LONGEST = 8  # characters; a longer text does not fit in a cell
_STYLE = """
text { font: 14px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #1f2933; }
.title { font-weight: bold; } .column { fill: #52606d; } .value { text-anchor: middle; }
.page { fill: #ffffff; stroke: #cbd5e1; } .none, .arrow { fill: none; stroke: #7b8794; }
.none { stroke-dasharray: 3 3; }
.sum { fill: #e4e7eb; stroke: #7b8794; } .r0 { fill: #c6f0ec; stroke: #1b7f79; } .r1 { fill: #fbdcc8; stroke: #b4552d; }
.r2 { fill: #e0daf7; stroke: #5b4b9a; } .r3 { fill: #f7eab6; stroke: #8a6d1d; }
@media (prefers-color-scheme: dark) {
text { fill: #e4e7eb; } .column { fill: #9aa5b1; }
.page { fill: #161b22; stroke: #3e4c59; } .sum { fill: #3e4c59; } .r0 { fill: #12504c; } .r1 { fill: #6b3219; }
.r2 { fill: #3d3270; } .r3 { fill: #57450f; } }
""".strip()


def draw(title: str, before: Any, after: Any) -> None:
    """Print on rank 0 what every rank had before and after ``title``; every rank calls this.

    Args:
        before, after: this rank's values: tensors, lists, or anything that can be pickled.
    """
    rows: list[Row] = [(None, None)] * dist.get_world_size()
    dist.all_gather_object(rows, (plain(before), plain(after)))
    if dist.get_rank() != 0:
        return
    print(f"\n{title}\n{table(rows)}", flush=True)
    folder = os.environ.get("LESSON_SVG_DIR")
    if folder and all(len(text) <= _LONGEST for row in rows for side in row for part in cells(side) for text in part):
        name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.svg").write_text(svg(title, rows), encoding="utf-8")


def plain(value: Any) -> Any:
    """Return the value with lists in place of tensors and tuples."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def text_of(value: Any) -> str:
    """Return a short text; 2.0 is printed as 2."""
    value = plain(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def cells(value: Any) -> list[list[str]]:
    """Return the texts of a list's values; those of a list of lists are apart. None has no value."""
    if not isinstance(value, list):
        return [[text_of(value)]] if value not in (None, "") else []
    if any(isinstance(part, list) for part in value):
        return [list(map(text_of, part)) if isinstance(part, list) else [text_of(part)] for part in value]
    return [list(map(text_of, value))] if value else []


def table(rows: list[Row]) -> str:
    """Return the rows, which are of rank 0, 1, 2, ..., as text with aligned columns."""
    texts = [(str(rank), text_of(before), text_of(after)) for rank, (before, after) in enumerate(rows)]
    texts = [("rank", "before", "after"), *texts]
    widths = [max(len(row[column]) for row in texts) for column in range(3)]
    lines = ["  " + " │ ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in texts]
    lines.insert(1, "  " + "─┼─".join("─" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def svg(title: str, rows: list[Row]) -> str:
    """Return a picture with a line per rank: its values before on the left, after on the right.

    If the exchange only moved values, each has the color of the rank that had it before. Computed values are grey.
    """
    sides = [[cells(row[side]) for row in rows] for side in (0, 1)]
    owner = {text: rank for rank, parts in reversed([*enumerate(sides[0])]) for part in parts for text in part}
    moved = all(text in owner for parts in sides[1] for part in parts for text in part)
    before, after = (max(_width(parts) for parts in side) for side in sides)
    right = _LEFT + before + _ARROW
    width = max(right + after + _MARGIN, len(title) * 9 + 2 * _MARGIN)
    height = _TOP + len(rows) * _ROW + 6
    drawn = [
        f'<rect class="page" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="6"/>',
        f'<text class="title" x="{_MARGIN}" y="26">{html.escape(title)}</text>',
        f'<text class="column" x="{_LEFT}" y="50">before</text><text class="column" x="{right}" y="50">after</text>',
    ]
    for rank in range(len(rows)):
        top = _TOP + rank * _ROW
        drawn.append(f'<text x="{_MARGIN}" y="{top + 18}">rank {rank}</text>')
        drawn += _boxes(_LEFT, top, sides[0][rank], dict.fromkeys(owner, rank))
        drawn += _boxes(right, top, sides[1][rank], owner if moved else {})
    middle = _TOP + (len(rows) * _ROW - (_ROW - _CELL[1])) // 2
    drawn.append(f'<path class="arrow" d="M{right - _ARROW + 16} {middle}h32m-7 -5l7 5l-7 5"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<style>\n{_STYLE}\n</style>\n" + "\n".join(drawn) + "\n</svg>\n"
    )


def _width(parts: list[list[str]]) -> int:
    return max(_COLUMN, sum(_cell_width(text) for part in parts for text in part) + _GAP * (len(parts) - 1))


def _cell_width(text: str) -> int:
    return max(_CELL[0], len(text) * 9 + 12)


def _boxes(x: int, top: int, parts: list[list[str]], owner: dict[str, int]) -> list[str]:
    """Return the cells of one rank, in the color of each value's owner."""
    drawn = []
    if not parts:
        drawn.append(f'<rect class="none" x="{x}" y="{top}" width="{_CELL[0]}" height="{_CELL[1]}" rx="3"/>')
    for part in parts:
        for text in part:
            size, color = _cell_width(text), f"r{owner[text] % 4}" if text in owner else "sum"
            drawn.append(
                f'<rect class="{color}" x="{x}" y="{top}" width="{size}" height="{_CELL[1]}" rx="3"/>'
                f'<text class="value" x="{x + size / 2:g}" y="{top + 18}">{html.escape(text)}</text>'
            )
            x += size
        x += _GAP
    return drawn
