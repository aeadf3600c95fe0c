"""Draw what the exchanges of a lesson did, from what it printed, as SVG files."""

import re
from collections.abc import Iterator
from pathlib import Path

from jinja2 import Template

Cells = list[list[str]]  # the numbers that a rank had before or after: of one list, or of several
_TABLE = re.compile(r"^(\S.*)\n((?:  rank \d+: .*\n)+)", re.MULTILINE)
_ROW = re.compile(r"^  rank \d+: (.*?) ->(?: (.*))?$", re.MULTILINE)

_CELL, _DISTANCE, _GAP = (30, 26), 36, 8  # pixels: width and height of a cell, distance of rows, distance of two lists
_TOP, _LEFT, _ARROW, _MARGIN, _COLUMN = 62, 78, 64, 16, 52
_LONGEST = 8  # characters; a longer text does not fit in a cell


def pictures(printed: str) -> Iterator[tuple[str, str]]:
    """Yield the name of a file and its content for each exchange whose values are short."""
    for title, table in _TABLE.findall(printed):
        rows = [(cells(before), cells(after)) for before, after in _ROW.findall(table)]
        if all(len(text) <= _LONGEST for row in rows for side in row for part in side for text in part):
            yield re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".svg", svg(title, rows)


def cells(text: str) -> Cells:
    """Return the texts of a list's values; those of a list of lists are apart. None has no value."""
    if text.startswith("[["):
        return [part.split(", ") for part in re.findall(r"\[([^\[\]]*)\]", text[1:-1])]
    values = text.strip("[]")
    return [] if values in ("", "None") else [values.split(", ")]


def svg(title: str, rows: list[tuple[Cells, Cells]]) -> str:
    """Return a picture with a line per rank: its values before on the left, after on the right.

    If the exchange only moved values, each has the color of the rank that had it before. Computed values are grey.
    """
    sides = [[row[side] for row in rows] for side in (0, 1)]
    owner = {text: rank for rank, parts in reversed([*enumerate(sides[0])]) for part in parts for text in part}
    moved = all(text in owner for parts in sides[1] for part in parts for text in part)
    before, after = (max(_width(parts) for parts in side) for side in sides)
    right = _LEFT + before + _ARROW
    tops = [_TOP + rank * _DISTANCE for rank in range(len(rows))]
    own = [_boxes(_LEFT, parts, dict.fromkeys(owner, rank)) for rank, parts in enumerate(sides[0])]
    others = [_boxes(right, parts, owner if moved else {}) for parts in sides[1]]
    source = (Path(__file__).with_name("exchange.svg.j2")).read_text()
    template = Template(source, autoescape=True, keep_trailing_newline=True)
    picture: str = template.render(
        title=title, ranks=list(zip(tops, own, others, strict=True)), left=_LEFT, right=right, margin=_MARGIN,
        cell=_CELL, width=max(right + after + _MARGIN, len(title) * 9 + 2 * _MARGIN),
        height=_TOP + len(rows) * _DISTANCE + 6, arrow=right - _ARROW + 16,
        middle=_TOP + (len(rows) * _DISTANCE - (_DISTANCE - _CELL[1])) // 2,
    )  # fmt: skip
    return picture


def _width(parts: Cells) -> int:
    return max(_COLUMN, sum(_cell_width(text) for part in parts for text in part) + _GAP * (len(parts) - 1))


def _cell_width(text: str) -> int:
    return max(_CELL[0], len(text) * 9 + 12)


def _boxes(x: int, parts: Cells, owner: dict[str, int]) -> list[tuple[int, int, str, str]]:
    """Return (left edge, width, color, text) of the cells of one rank, in the color of each value's owner."""
    boxes = []
    for part in parts:
        for text in part:
            boxes.append((x, _cell_width(text), f"r{owner[text] % 4}" if text in owner else "sum", text))
            x += _cell_width(text)
        x += _GAP
    return boxes or [(x, _CELL[0], "none", "")]
