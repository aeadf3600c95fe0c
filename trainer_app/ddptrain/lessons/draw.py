"""Draw what an exchange did: a table with a row per rank, and the same as an SVG file if LESSON_SVG_DIR is set."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_ROW, _CHARACTER, _PADDING = 26, 8.4, 12  # pixels
_COLORS = ("#1b7f79", "#b4552d", "#5b4b9a", "#8a6d1d")


def draw(title: str, before: Any, after: Any) -> None:
    """Print on rank 0 what every rank had before and after ``title``; every rank calls this.

    Args:
        before, after: this rank's values: tensors, lists, or anything that can be pickled.
    """
    rows: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(rows, (text_of(before), text_of(after)))
    if dist.get_rank() != 0:
        return
    print(f"\n{title}\n{table(rows)}", flush=True)
    if folder := os.environ.get("LESSON_SVG_DIR"):
        name = "".join(c if c.isalnum() else "-" for c in title.lower()).strip("-")
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.svg").write_text(svg(title, rows), encoding="utf-8")


def text_of(value: Any) -> str:
    """Return a short text; 2.0 is printed as 2."""
    if isinstance(value, torch.Tensor):
        return text_of(value.tolist())
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def table(rows: list[tuple[str, str]]) -> str:
    """Return the rows, which are of rank 0, 1, 2, ..., as text with aligned columns."""
    cells = [("rank", "before", "after"), *((str(rank), *row) for rank, row in enumerate(rows))]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = ["  " + " │ ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    lines.insert(1, "  " + "─┼─".join("─" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def svg(title: str, rows: list[tuple[str, str]]) -> str:
    """Return a picture: one line per rank, its values before on the left and after on the right."""
    left = 70 + _PADDING
    before = max(len(row[0]) for row in rows) * _CHARACTER + 2 * _PADDING
    after = max(len(row[1]) for row in rows) * _CHARACTER + 2 * _PADDING
    width, height = left + before + 60 + after + _PADDING, (len(rows) + 1) * (_ROW + 8) + 2 * _PADDING
    parts = [f'<text x="{_PADDING}" y="{_PADDING + 14}" font-weight="bold">{html.escape(title)}</text>']
    for rank, row in enumerate(rows):
        top, color = _PADDING + (rank + 1) * (_ROW + 8), _COLORS[rank % len(_COLORS)]
        parts.append(f'<text x="{_PADDING}" y="{top + 18}" fill="{color}">rank {rank}</text>')
        for x, size, text in ((left, before, row[0]), (left + before + 60, after, row[1])):
            parts.append(
                f'<rect x="{x:.0f}" y="{top}" width="{size:.0f}" height="{_ROW}" rx="4" fill="none" stroke="{color}"/>'
                f'<text x="{x + _PADDING:.0f}" y="{top + 18}" fill="currentColor">{html.escape(text)}</text>'
            )
        middle = left + before
        parts.append(f'<path d="M{middle + 12:.0f} {top + 13}h34m-6 -4l6 4l-6 4" fill="none" stroke="{color}"/>')
    style = "font-family:ui-monospace,monospace;font-size:14px"
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" style="{style}" fill="currentColor">\n{inner}\n</svg>\n'
    )
