"""Of several processes of a rank one writes: the first that takes its turn, while it and the rank's process live."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from ddprun import script_interface, shared_text
from ddprun.heartbeat import SIZE, Heartbeat
from ddprun.reporting.progress import ProgressRecord, shared_snapshot
from ddprun.settings import Settings
from ddprun.shared_text import SharedText
from ddprun.turns import BEATS, REPORTS, Turn


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("turns")
    os.ftruncate(descriptor, SIZE)
    yield descriptor
    os.close(descriptor)


class Forked:
    """A fork that does what it is told to, and says what came of it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.write(write, repr(work()).encode())
                signal.pause()
            finally:
                os._exit(0)
        os.close(write)
        self.said = os.read(self._read, 100).decode()

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._read)


def test_first_process_of_a_rank_has_the_turn_until_it_ends(file: int) -> None:
    turn = Turn(file, BEATS, is_rank=True)
    assert (turn.may_write(), turn.is_taken) == (True, False)
    first = Forked(lambda: (turn.may_write(), turn.take(), turn.may_write()))
    assert first.said == "(False, True, True)"
    second = Forked(lambda: (turn.take(), turn.is_elsewhere(), Turn(file, BEATS, is_rank=False).take()))
    assert second.said == "(False, True, False)"
    assert (turn.take(), turn.may_write(), turn.is_elsewhere()) == (False, False, True)
    other = Turn(file, REPORTS, is_rank=True)
    assert (other.is_elsewhere(), other.take()) == (False, True)
    first.end()
    second.end()
    assert turn.may_write()
    assert turn.take()
    third = Forked(turn.take)
    assert third.said == "False"
    third.end()


def test_process_that_outlives_the_rank_does_not_write(file: int) -> None:
    rank = Forked(lambda: Turn(file, BEATS, is_rank=True).may_write())
    started = Turn(file, BEATS, is_rank=False)
    assert (rank.said, started.take(), started.may_write()) == ("True", True, True)
    rank.end()
    assert (started.may_write(), started.take()) == (False, False)
    later = Forked(Turn(file, BEATS, is_rank=False).take)
    assert later.said == "False"
    later.end()


def test_script_that_closes_all_descriptors_goes_on_and_its_files_are_not_locked(file: int) -> None:
    copy = os.dup(file)
    turn = Turn(copy, BEATS, is_rank=True)
    os.close(copy)
    other = os.memfd_create("of the script")
    assert other == copy
    assert (turn.is_open, turn.take(), turn.may_write()) == (False, True, True)
    unlocked = Forked(Turn(other, BEATS, is_rank=False).take)
    assert unlocked.said == "False"  # no rank has locked this file
    unlocked.end()
    os.close(other)


def test_heartbeat_continues_the_numbers_of_another_process(file: int) -> None:
    memory = memoryview(bytearray(SIZE))
    told: list[tuple[str, int]] = []
    may_write = True
    rank = Heartbeat(memory, lambda *mark: told.append(mark), lambda: may_write)
    started = Heartbeat(memory)
    with started.waiting_in("all_reduce"):
        started.mark("train", 7)
    before = rank.last
    may_write = False
    rank.mark("save")
    assert (rank.last, told) == (before, [])
    may_write = True
    rank.mark("close")
    assert (rank.last.step, rank.last.collectives, rank.last.phase) == (7, 1, "close")
    assert rank.last.changes > before.changes
    assert told == [("close", 7)]


def test_each_step_is_a_heartbeat_and_quick_steps_are_reported_together(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_interface, "_state", script_interface._state)
    monkeypatch.setattr(script_interface, "_INTERVAL", 3600.0)
    memory = mmap.mmap(file, SIZE)
    text = memoryview(bytearray(shared_text.SIZE))
    beats, progress = Turn(file, BEATS, is_rank=True), ProgressRecord(1, SharedText(text))
    heartbeat = Heartbeat(memoryview(memory), None, beats.may_write)
    script_interface.begin(progress, heartbeat, Settings(), beats=beats, reports=Turn(file, REPORTS, is_rank=True))
    optimizer = object()
    for _ in range(100):
        script_interface.stepped(optimizer)
    assert (heartbeat.last.step, heartbeat.last.phase, progress.snapshot()["step"]) == (100, "train", 1)
    launchers = shared_snapshot(shared_text.read(text), heartbeat.last)
    assert launchers is not None
    assert launchers == progress.snapshot() | {"step": 100, "ageSeconds": launchers["ageSeconds"]}

    def step_of_a_fork() -> int:
        script_interface.stepped(optimizer)
        return heartbeat.last.step

    fork = Forked(step_of_a_fork)  # the turn is its parent's
    fork.end()
    assert (fork.said, heartbeat.last.step) == ("100", 100)
    heartbeat.mark("save")
    script_interface.stepped(optimizer)
    assert (heartbeat.last.step, heartbeat.last.phase, progress.snapshot()["step"]) == (101, "train", 101)
    script_interface.stepped(optimizer)
    script_interface.report_counted()
    assert progress.snapshot()["step"] == 102
