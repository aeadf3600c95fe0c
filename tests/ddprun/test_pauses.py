"""Which pauses of a rank are shown at once, and which are reported with stacks before a deadline of the operator."""

from __future__ import annotations

import math
import os

import pytest

from ddprun.diagnostics import Diagnostics
from ddprun.errors import UsageError
from ddprun.heartbeat import Heartbeat
from ddprun.launcher.hang_detector import Deadlines, HangDetector
from ddprun.launcher.processes import WorkerProcess


class Rank:
    """Rank 0 of a node, and the launcher that looks at it once a second; time passes as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, deadlines: Deadlines | None = None) -> None:
        self.now = 1000.0
        monkeypatch.setattr("ddprun.launcher.hang_detector.time.monotonic", lambda: self.now)
        diagnostics = Diagnostics.create(0)
        self.worker = WorkerProcess(0, os.getpid(), -1, -1, diagnostics)
        self.heartbeat = Heartbeat(diagnostics.memory())
        self.heartbeat.mark("start", limit=math.inf)
        self.detector = HangDetector(0, 0, 300, deadlines)
        self.step = 0
        self.passes(30)

    def passes(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1, end)
            self.detector.stalled([self.worker])

    def trains(self, steps: int, seconds: float) -> None:
        """Make steps that take so long each; the launcher looks between them as often as it would."""
        looked = self.now
        for _ in range(steps):
            self.now, self.step = self.now + seconds, self.step + 1
            self.heartbeat.mark("train", self.step)
            if self.now - looked >= 1:
                self.detector.stalled([self.worker])
                looked = self.now

    @property
    def shown(self) -> float | None:
        return self.detector.pauses.get(0)

    @property
    def is_stalled(self) -> bool:
        return self.detector.stalled_ranks == {0}


@pytest.mark.parametrize(
    ("steps", "seconds", "least"), [(20, 0.05, 10), (20, 0.002, 10), (400, 0.05, 10), (20, 3.0, 30), (12, 20.0, 200)]
)
def test_pause_is_shown_after_ten_seconds_and_ten_median_steps(
    monkeypatch: pytest.MonkeyPatch, steps: int, seconds: float, least: float
) -> None:
    rank = Rank(monkeypatch)
    rank.trains(steps, seconds)
    rank.passes(least - 1)
    assert rank.shown is None
    rank.passes(3)
    assert rank.shown == pytest.approx(seconds, rel=0.2) or (steps * seconds < 1 and rank.shown)
    assert not rank.is_stalled, "nothing follows from it"
    rank.trains(1, 0.1)
    rank.passes(1)
    assert rank.shown is None


def test_pause_no_longer_than_twice_an_earlier_one_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    for evaluation in (40, 45, 70):
        rank.trains(50, 0.1)
        rank.passes(evaluation - 1)
        assert (rank.shown is None) == (evaluation > 40), "the first may be a hang"
    rank.trains(50, 0.1)
    rank.passes(145)
    assert rank.shown == pytest.approx(0.1, rel=0.1), "the median is not that of the pauses"


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_program_with_few_steps_has_no_median_and_shows_no_pause(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    rank = Rank(monkeypatch)
    rank.trains(steps, 0.1)
    rank.passes(200)
    assert rank.shown is None


def test_step_number_that_goes_on_from_a_checkpoint_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    rank.step = 1000
    rank.trains(1, 8.0)
    rank.passes(30)
    assert rank.shown is None, "the first steps may compile"
    rank.trains(10, 8.0)
    rank.passes(79)
    assert rank.shown is None
    rank.passes(3)
    assert rank.shown == pytest.approx(8.0)


@pytest.mark.parametrize(("phase", "limit"), [("save", 290.0), ("close", math.inf)])
def test_save_within_its_limit_and_the_end_of_a_script_are_no_pause(
    monkeypatch: pytest.MonkeyPatch, phase: str, limit: float
) -> None:
    rank = Rank(monkeypatch)
    rank.trains(50, 0.1)
    rank.heartbeat.mark(phase, limit=limit)
    rank.passes(280)
    assert rank.shown is None


def test_half_of_the_progress_deadline_is_a_stall_whatever_pauses_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Deadlines(progress=60))
    rank.trains(50, 0.1)
    rank.passes(55)
    assert rank.is_stalled
    rank.trains(50, 0.1)
    rank.passes(25)
    assert not rank.is_stalled
    for _ in range(7):  # signs of life are no steps
        rank.heartbeat.touch()
        rank.passes(1)
    assert rank.is_stalled and rank.detector.nears_deadline
    assert rank.detector.longest_pause == pytest.approx(32, abs=1.5)


def test_deadlines_of_the_start_and_of_the_end_count_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, Deadlines(startup=100, completion=80))
    assert not rank.is_stalled
    rank.passes(25)
    assert rank.is_stalled
    rank.trains(50, 0.1)
    rank.heartbeat.mark("close", limit=math.inf)
    rank.passes(60)
    assert not rank.is_stalled, "no other node has ended"
    rank.detector.is_last = True
    rank.passes(1)
    assert rank.is_stalled


def test_rank_is_idle_after_its_script_while_no_process_of_it_uses_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    used, runs = 5.0, False
    monkeypatch.setattr("ddprun.proc.is_running", lambda pid: runs)
    monkeypatch.setattr("ddprun.proc.cpu_seconds", lambda pid: used)
    rank = Rank(monkeypatch)
    rank.trains(5, 0.1)
    rank.worker.sends_an_ending = False
    rank.heartbeat.mark("close", limit=math.inf)
    rank.passes(50)
    assert rank.detector.idle_after_return([rank.worker]) == pytest.approx(50, abs=2)
    for _ in range(10):  # an upload in a thread
        used += 0.3
        rank.passes(10)
    assert rank.detector.idle_after_return([rank.worker]) < 11
    rank.passes(50)
    runs = True  # or waits for a volume
    rank.passes(2)
    assert rank.detector.idle_after_return([rank.worker]) < 3
    runs = False
    rank.passes(100)
    assert not rank.is_stalled, "other nodes may still train"
    rank.detector.is_last = True
    rank.passes(1)
    assert rank.is_stalled


def test_processes_of_a_rank_that_has_returned_are_looked_at_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher calls ``stalled`` after each output of the other ranks, and a rank may have many processes."""
    looks: list[int] = []
    monkeypatch.setattr("ddprun.proc.tree", lambda pid: looks.append(pid) or [])
    rank = Rank(monkeypatch)
    rank.worker.sends_an_ending = False
    rank.heartbeat.mark("close", limit=math.inf)
    for _ in range(500):
        rank.passes(0.01)
    assert 4 <= len(looks) <= 6


def test_deadlines_are_read_from_the_environment_of_the_pod() -> None:
    given = {"DDPJOB_STARTUP_DEADLINE": "600", "DDPJOB_PROGRESS_DEADLINE": "60", "DDPJOB_COMPLETION_GRACE": "300"}
    assert Deadlines.of(given, 1, 2) == Deadlines(600, 60, 300)
    assert Deadlines.of(given, 2, 2).startup == 60, "the attempt has made its first step"
    assert Deadlines.of({}, 1, 2) == Deadlines()
    with pytest.raises(UsageError, match="DDPJOB_PROGRESS_DEADLINE"):
        Deadlines.of({"DDPJOB_PROGRESS_DEADLINE": "soon"}, 1, 2)
