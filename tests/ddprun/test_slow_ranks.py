"""Which rank is slow, decided from sums of steps."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from ddprun.launcher.slow_ranks import PARTS, SlowRank, SlowRanks, Window, suspect, window
from ddprun.step_parts import StepSums

STEP = 0.1
WINDOW = 32
OWN = {"data": 0.01, "forward": 0.02, "backward": 0.03, "optimizer": 0.005}


class Group:
    """Ranks whose steps are sampled; each call of ``train`` ends with a record of every rank."""

    def __init__(self, ranks: int, seed: int = 1, nproc: int = 1) -> None:
        self.sums = {rank: StepSums() for rank in range(ranks)}
        self.slow = SlowRanks(nproc)
        self._random = random.Random(seed)

    def train_node(self, ranks: Collection[int], more: float) -> None:
        """Make the iterations of a window in which these ranks are late; the caller adds to their sums."""
        self._train(dict.fromkeys(ranks, more), {}, 0.002)

    def train(
        self, rank: int = -1, more: float = 0.0, noise: float = 0.002, script_alone: float = 0.0, **late: float
    ) -> None:
        """Make the iterations of a window; ``late``: seconds by part that ``rank`` takes longer in each.

        more: seconds of the rank in a part that no sum shows. script_alone: the same, for which the others wait in the
            broadcast of buffers, so that the waits for gradients are equal.
        """
        total = more + sum(seconds for part, seconds in late.items() if part != "collection")
        self._train({rank: total} if rank >= 0 and not script_alone else {}, {rank: late}, noise)

    def _train(self, longer: dict[int, float], parts: dict[int, dict[str, float]], noise: float) -> None:
        end = next(iter(self.sums.values())).iteration + WINDOW
        waits = dict.fromkeys(self.sums, 0.0)
        squares = dict.fromkeys(self.sums, 0.0)
        for _ in range(WINDOW):
            own = {each: abs(self._random.gauss(0.065, noise)) for each in self.sums}
            for each, seconds in longer.items():
                own[each] += seconds
            for each in self.sums:
                wait = max(own.values()) - own[each] + 0.001
                waits[each] += wait
                squares[each] += wait * wait
        for each, before in self.sums.items():
            extra = parts.get(each, {})
            grown = {part: WINDOW * (OWN.get(part, 0.0) + extra.get(part, 0.0)) for part in (*OWN, *extra)}
            grown["backward"] += WINDOW * extra.get("hook", 0.0)
            self.sums[each] = replace(
                before, iteration=end, time=before.time + WINDOW * STEP, samples=before.samples + WINDOW,
                wait=before.wait + waits[each], wait_squares=before.wait_squares + squares[each],
                **{name: getattr(before, name) + value for name, value in grown.items()},
            )  # fmt: skip
            self.slow.take(each, [self.sums[each]])
        self.slow.turn(self.sums[0].time)

    @property
    def verdict(self) -> tuple[int, str] | None:
        found = self.slow.verdict
        return (found.rank, found.part) if found else None


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("late", "part"),
    [
        ({"data": 0.02}, "data"),
        ({"forward": 0.02}, "forward"),
        ({"backward": 0.02}, "backward"),
        ({"hook": 0.02}, "communication"),
        ({"optimizer": 0.02}, "optimizer"),
        ({"forward": 0.02, "collection": 0.019}, "collection"),
        ({"more": 0.02}, "script"),
        ({"more": 0.02, "queued": 0.02, "throttled": 0.018}, "throttled"),
    ],
)
def test_the_rank_and_the_part_are_named(ranks: int, late: dict[str, float], part: str) -> None:
    group = Group(ranks)
    for _ in range(4):
        group.train()
    for number in range(9):
        assert group.verdict is None or number >= 4, "a window or two prove nothing"
        more = late.get("more", 0.0)
        hidden = {name: value for name, value in late.items() if name != "more"}
        not_run = {name: hidden.pop(name) for name in ("queued", "throttled") if name in hidden}
        _train_not_run(group, 1, more, hidden, not_run)
    assert group.verdict == (1, part)
    found = group.slow.verdict
    assert found is not None
    assert found.seconds == pytest.approx(0.02, rel=0.2)
    assert PARTS[part] in found.message(0)
    share = found.throttled_share
    assert (share is not None) == (part == "throttled")
    assert share is None or (
        share == pytest.approx(0.018 / found.step, rel=0.01) and f"{share:.2f} s of" in found.message(0)
    )


def _train_not_run(group: Group, rank: int, more: float, hidden: dict[str, float], not_run: dict[str, float]) -> None:
    """Train, with sums that are within other parts of the rank."""
    before = group.sums[rank]
    group.sums[rank] = replace(
        before, **{name: getattr(before, name) + WINDOW * value for name, value in not_run.items()}
    )
    group.train(rank, more, **hidden)


@pytest.mark.parametrize(
    ("throttled", "queued", "wait", "is_named"),
    [
        (0.0012, 0.0012, 0.005, True),
        (0.0012, 0.0012, 0.002, True),  # within chance
        (0.0012, 0.0005, 0.004, True),  # most of the stops are of the thread that exchanges gradients
        (0.0012, 0.0012, 0.001, False),  # it waits for the other
        (0.0012, 0.0, 0.005, False),  # other threads were stopped
        (0.0, 0.0012, 0.005, False),
    ],
)
def test_stops_by_a_cpu_limit_are_counted_where_the_waits_prove_little(
    throttled: float, queued: float, wait: float, is_named: bool
) -> None:
    parts = dict.fromkeys(PARTS, 0.0)
    other, stopped = Window(0.0042, wait, 0.001, parts), parts | {"throttled": throttled, "queue": queued}
    found = suspect({0: other, 1: Window(0.0042, 0.004, 0.001, stopped)})
    assert found == (SlowRank(1, "throttled", throttled, 0.0042, throttled) if is_named else None)


def test_a_rank_whose_lateness_is_proven_is_named_before_one_that_was_stopped() -> None:
    parts = dict.fromkeys(PARTS, 0.0)
    late = Window(0.02, 0.001, 0.0001, parts | {"backward": 0.008})
    stopped = Window(0.02, 0.008, 0.01, parts | {"throttled": 0.009, "queue": 0.009})
    found = suspect({0: late, 1: Window(0.02, 0.009, 0.0001, parts), 2: stopped})
    assert found is not None and (found.rank, found.part) == (0, "backward")


def test_chance_accuses_nobody() -> None:
    for seed in range(20):
        group = Group(2 + seed % 7, seed)
        for _ in range(50):
            group.train(noise=0.03)
            assert group.verdict is None, f"seed {seed}"


def test_a_rank_that_waits_for_a_core_now_and_then_is_not_slow() -> None:
    group = Group(4)
    for number in range(60):
        group.sums[number // 3 % 4] = replace(
            group.sums[number // 3 % 4], queued=group.sums[number // 3 % 4].queued + WINDOW * 0.03
        )
        group.train(number // 3 % 4, 0.03)
        assert group.verdict is None
    for _ in range(20):
        group.sums[1] = replace(group.sums[1], queued=group.sums[1].queued + WINDOW * 0.03)
        group.train(1, 0.03)
    assert group.verdict == (1, "queue")


def test_a_verdict_ends_when_the_rank_is_fast_again() -> None:
    group = Group(3)
    for _ in range(10):
        group.train(2, forward=0.03)
    began = group.slow.verdict
    assert began is not None
    group.train()
    assert group.verdict == (2, "forward"), "one window proves nothing"
    group.train(2, forward=0.03)
    assert group.slow.verdict is began, "nothing is written for small changes"
    for _ in range(9):
        group.train()
    assert group.verdict is None


def test_ranks_with_records_at_different_iterations_are_compared_where_both_have_one() -> None:
    group = Group(2)
    kept = SlowRanks()
    for number in range(20):
        group.train(0, backward=0.05)
        kept.take(0, [group.sums[0]])
        if number % 2:
            kept.take(1, [group.sums[1]])
        kept.turn(0.0)
    assert kept.verdict is not None
    assert (kept.verdict.rank, kept.verdict.part) == (0, "backward")


def test_a_rank_that_records_nothing_more_ends_the_comparison_and_few_records_are_kept() -> None:
    group = Group(3)
    for _ in range(10):
        group.train(1, data=0.05)
    known = SlowRanks()
    for _ in range(100):
        group.train(1, data=0.05)
        known.take(1, [group.sums[1]])
        known.turn(0.0)
    assert known.verdict is None
    known.take(0, [group.sums[0]])
    known.turn(0.0)
    assert known.verdict is None
    assert all(len(records) <= 12 for records in (*known._records.values(), *group.slow._records.values()))


def test_another_training_begins_anew() -> None:
    group = Group(2)
    for _ in range(10):
        group.train(1, data=0.05)
    assert group.verdict == (1, "data")
    group.sums = {rank: replace(sums, iteration=0, samples=0, wait=0) for rank, sums in group.sums.items()}
    for _ in range(12):
        group.train(0, data=0.05)
    assert group.verdict == (0, "data")


def test_a_slow_node_is_named_by_its_first_rank_and_does_not_change() -> None:
    group, named = Group(8, nproc=4), set[tuple[int, str] | None]()
    for number in range(30):
        for rank in range(4, 8):  # all ranks of node 1 compute longer
            group.sums[rank] = replace(group.sums[rank], backward=group.sums[rank].backward + WINDOW * 0.02)
        group.train_node(range(4, 8), 0.02)
        named |= {group.verdict} if number > 12 else set()
    assert named == {(4, "backward")}


def test_the_broadcast_of_buffers_from_a_late_rank_is_a_wait_and_no_forward_pass() -> None:
    group = Group(2)
    for _ in range(12):
        group.sums[1] = replace(
            group.sums[1],
            buffers=group.sums[1].buffers + WINDOW * 0.02, forward=group.sums[1].forward + WINDOW * 0.02,
        )  # fmt: skip
        group.train(0, script_alone=0.02)
    assert group.verdict == (0, "script")


def test_a_verdict_ends_when_the_ranks_record_nothing_more() -> None:
    group = Group(2)
    for _ in range(10):
        group.train(1, data=0.05)
    assert group.verdict == (1, "data")
    group.slow.turn(group.sums[0].time + 59)
    assert group.verdict == (1, "data")
    group.slow.turn(group.sums[0].time + 61)
    assert group.verdict is None
    group.slow.leave([1])
    assert group.slow._records.keys() == {0}


def test_thousands_of_ranks_are_judged_in_time() -> None:
    random_ = random.Random(1)
    parts = dict.fromkeys(PARTS, 0.01)
    windows = {rank: Window(0.1, abs(random_.gauss(0.02, 0.001)), 0.001, parts) for rank in range(8192)}
    windows[77] = Window(0.1, 0.0, 0.001, parts | {"data": 0.03})
    began = time.process_time()
    found = suspect(windows, 8)
    assert time.process_time() - began < 2, "it was the square of the number of ranks"
    assert found is not None
    assert (found.rank, found.part) == (77, "data")


@pytest.mark.parametrize(
    "record",
    [[1], ["x", *[0.0] * 13], [10**400, *[0.0] * 13], [8, *[0] * 13], [8, *[float("nan")] * 13], [8, *[0.0] * 14], 7],
)
def test_a_record_of_another_launcher_that_is_none_is_refused(record: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        StepSums.checked(record)
    assert StepSums.checked([8, *[0.5] * 13]).iteration == 8


def test_too_little_is_no_window() -> None:
    sums = StepSums(iteration=64, time=10.0, samples=1.0)
    assert window(sums, sums) is None
    assert window(sums, replace(sums, iteration=128, samples=2.0)) is None
    assert suspect({}) is None
