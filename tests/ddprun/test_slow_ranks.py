"""Which rank is slow, decided from sums of steps."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest

from ddprun.launcher.slow_ranks import PARTS, SlowRanks, suspect, window
from ddprun.step_parts import StepSums

STEP = 0.1
WINDOW = 32
OWN = {"data": 0.01, "forward": 0.02, "backward": 0.03, "optimizer": 0.005}


class Group:
    """Ranks whose steps are sampled; each call of ``train`` ends with a record of every rank."""

    def __init__(self, ranks: int, seed: int = 1) -> None:
        self.sums = {rank: StepSums() for rank in range(ranks)}
        self.slow = SlowRanks()
        self._random = random.Random(seed)

    def train(self, rank: int = -1, more: float = 0.0, noise: float = 0.002, **late: float) -> None:
        """Make the iterations of a window; ``late``: seconds by part that ``rank`` takes longer in each.

        more: seconds of the rank in a part that no sum shows.
        """
        end = next(iter(self.sums.values())).iteration + WINDOW
        waits = dict.fromkeys(self.sums, 0.0)
        squares = dict.fromkeys(self.sums, 0.0)
        for _ in range(WINDOW):
            own = {each: abs(self._random.gauss(0.065, noise)) for each in self.sums}
            if rank >= 0:
                own[rank] += more + sum(seconds for part, seconds in late.items() if part != "collection")
            for each in self.sums:
                wait = max(own.values()) - own[each] + 0.001
                waits[each] += wait
                squares[each] += wait * wait
        for each, before in self.sums.items():
            extra = late if each == rank else {}
            grown = {part: WINDOW * (OWN.get(part, 0.0) + extra.get(part, 0.0)) for part in (*OWN, *extra)}
            grown["backward"] += WINDOW * extra.get("hook", 0.0)
            self.sums[each] = replace(
                before, iteration=end, time=before.time + WINDOW * STEP, samples=before.samples + WINDOW,
                wait=before.wait + waits[each], wait_squares=before.wait_squares + squares[each],
                **{name: getattr(before, name) + value for name, value in grown.items()},
            )  # fmt: skip
            self.slow.take(each, [self.sums[each]])
        self.slow.turn()

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


def _train_not_run(group: Group, rank: int, more: float, hidden: dict[str, float], not_run: dict[str, float]) -> None:
    """Train, with sums that are within other parts of the rank."""
    before = group.sums[rank]
    group.sums[rank] = replace(
        before, **{name: getattr(before, name) + WINDOW * value for name, value in not_run.items()}
    )
    group.train(rank, more, **hidden)


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
    assert group.slow.verdict is not None
    assert group.slow.verdict.since == began.since
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
        kept.turn()
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
        known.turn()
    assert known.verdict is None
    known.take(0, [group.sums[0]])
    known.turn()
    assert known.verdict is None
    assert all(len(records) <= 32 for records in (*known._records.values(), *group.slow._records.values()))


def test_another_training_begins_anew() -> None:
    group = Group(2)
    for _ in range(10):
        group.train(1, data=0.05)
    assert group.verdict == (1, "data")
    group.sums = {rank: replace(sums, iteration=0, samples=0, wait=0) for rank, sums in group.sums.items()}
    for _ in range(12):
        group.train(0, data=0.05)
    assert group.verdict == (0, "data")


def test_too_little_is_no_window() -> None:
    sums = StepSums(iteration=64, time=10.0, samples=1.0)
    assert window(sums, sums) is None
    assert window(sums, replace(sums, iteration=128, samples=2.0)) is None
    assert suspect({}) is None
    assert len(fields(StepSums)) == 13
