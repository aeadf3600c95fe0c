"""Which rank is late, and the picture of it."""

from __future__ import annotations

import base64
import io

from PIL import Image

from ddpjob.client.ranks import RankState, RankTable, StepParts
from ddpjob.ui.strip import COLUMNS, PALETTE, ROWS, Strip, lateness, ranks_now, sentence

PARTS = dict.fromkeys(StepParts.model_fields, 0.0)


def a_rank(rank: int, *, wait: float | None = None, step: int = 10, collective: str = "", **parts: float) -> RankState:
    given = None if wait is None else StepParts(**PARTS | {"wait": wait} | parts)
    return RankState(
        rank=rank, node=rank // 2, step=step, phase="train", collective=collective, age_seconds=0.1,
        step_seconds=0.1, parts=given,
    )  # fmt: skip


def a_table(*ranks: RankState, world_size: int | None = None) -> RankTable:
    size = world_size or len(ranks)
    return RankTable(job="a", namespace="b", place="c", attempt=1, world_size=size, ranks=list(ranks))


def test_the_rank_that_waits_least_is_late_with_the_part_in_which_it_takes_longer() -> None:
    usual = [a_rank(rank, wait=0.03, forward=0.05, data=0.001, collective="all_reduce") for rank in (0, 1, 3)]
    slow = a_rank(2, wait=0.001, forward=0.051, data=0.03)
    table = a_table(usual[0], usual[1], slow, usual[2])
    assert [round(late or 0, 2) for late in lateness(table.ranks)] == [0, 0, 0.29, 0]
    first, second, *_ = ranks_now(table)
    assert (first.rank, first.part, second.part) == (2, "data", "")
    assert sentence(table) == "3 ranks in all_reduce; 1 rank in phase train (2)"


def test_without_parts_a_rank_that_is_behind_is_late() -> None:
    assert lateness([a_rank(0, step=10), a_rank(1, step=9), a_rank(2, step=8)]) == [0.0, 0.0, 1.0]
    assert lateness([a_rank(0, wait=0.1), a_rank(1)]) == [0.0, 0.0], "of one rank alone the wait says nothing"


def test_the_picture_has_a_pixel_for_each_rank_and_look() -> None:
    strip = Strip()
    assert strip.image() == ""
    strip.take(a_table(a_rank(0, wait=0.06), a_rank(1, wait=0.06), a_rank(2, wait=0.0), world_size=4))
    found = pixels(strip)
    assert found.size == (COLUMNS, 4)
    shown = [found.getpixel((COLUMNS - 1, rank)) for rank in range(4)]
    assert shown == [1, 1, 8, 0], "on time, on time, late, not known"
    assert found.getpixel((COLUMNS - 2, 2)) == 0
    assert bytes(found.getpalette() or [])[: len(PALETTE)] == PALETTE


def test_of_many_ranks_a_row_shows_the_latest_of_several() -> None:
    strip, count = Strip(), 4 * ROWS
    ranks = [a_rank(rank, wait=0.06 if rank != 4 * 7 + 1 else 0.0) for rank in range(count)]
    for _ in range(COLUMNS + 5):
        strip.take(a_table(*ranks))
    found = pixels(strip)
    assert found.size == (COLUMNS, ROWS)
    assert [row for row in range(ROWS) if found.getpixel((0, row)) == 8] == [7]
    assert len(strip.image()) < 20_000


def pixels(strip: Strip) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(strip.image().partition(",")[2])))
