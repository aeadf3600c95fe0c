"""Draw what an exchange did: a table with a row per rank, and the same as an SVG file if LESSON_SVG_DIR is set."""

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jinja2 import Template

Row = tuple[Any, Any]  # what a rank had before and after: numbers, texts, None, and lists of these

_CELL, _ROW, _GAP = (30, 26), 36, 8  # pixels: width and height of a cell, distance of rows, distance of two lists
_TOP, _LEFT, _ARROW, _MARGIN, _COLUMN = 62, 78, 64, 16, 52
_LONGEST = 8  # characters; a longer text does not fit in a cell


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
    tops = [_TOP + rank * _ROW for rank in range(len(rows))]
    own = [_boxes(_LEFT, parts, dict.fromkeys(owner, rank)) for rank, parts in enumerate(sides[0])]
    others = [_boxes(right, parts, owner if moved else {}) for parts in sides[1]]
    source = (Path(__file__).parent / "templates" / "exchange.svg.j2").read_text()
    template = Template(source, autoescape=True, keep_trailing_newline=True)
    picture: str = template.render(
        title=title, ranks=list(zip(tops, own, others, strict=True)), left=_LEFT, right=right, margin=_MARGIN,
        cell=_CELL, width=max(right + after + _MARGIN, len(title) * 9 + 2 * _MARGIN),
        height=_TOP + len(rows) * _ROW + 6, arrow=right - _ARROW + 16,
        middle=_TOP + (len(rows) * _ROW - (_ROW - _CELL[1])) // 2,
    )  # fmt: skip
    return picture


def _width(parts: list[list[str]]) -> int:
    return max(_COLUMN, sum(_cell_width(text) for part in parts for text in part) + _GAP * (len(parts) - 1))


def _cell_width(text: str) -> int:
    return max(_CELL[0], len(text) * 9 + 12)


def _boxes(x: int, parts: list[list[str]], owner: dict[str, int]) -> list[tuple[int, int, str, str]]:
    """Return (left edge, width, color, text) of the cells of one rank, in the color of each value's owner."""
    boxes = []
    for part in parts:
        for text in part:
            boxes.append((x, _cell_width(text), f"r{owner[text] % 4}" if text in owner else "sum", text))
            x += _cell_width(text)
        x += _GAP
    return boxes or [(x, _CELL[0], "none", "")]
