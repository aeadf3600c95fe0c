"""A rank that stands still: every rank is out soon after the timeout, and the report names it, not those who wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddptrain.distributed.process_group import Group
from ddptrain.distributed.topology import Ranks
from ddptrain.heartbeat import SIZE, Diagnostics, Heartbeat, HeartbeatRecord
from ddptrain.launcher.hang_detector import HangDetector, find_hung_rank, hang_report
from ddptrain.launcher.processes import WorkerProcess
from ddptrain.signals import StopFlag
from tests.trainer.builders import SMALL as SHORT
from tests.trainer.builders import node, rank_state
from tests.trainer.runs import ForkServer, Run, free_port, wait_until

pytestmark = pytest.mark.alone  # time limits that other work on the CPU would exceed

SMALL = (*SHORT, "--epochs", 3)
GRADIENTS = "all_reduce of gradients"
# Seconds. The promised figures are 60 and 75; DDPTRAIN_TEST_HANG_TIMEOUT=60 runs them.
TIMEOUT = float(os.environ.get("DDPTRAIN_TEST_HANG_TIMEOUT", "3"))
ALLOWED = TIMEOUT + 15


def crumb(pid: int, rank: int) -> HeartbeatRecord | None:
    """What a launched rank says of itself at this moment."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if f"ddptrain-heartbeat-{rank} " in os.readlink(descriptor):  # noqa: PTH115 - a memory file has no path
                return HeartbeatRecord.unpack(descriptor.read_bytes())
        except FileNotFoundError:
            continue
    return None


def freeze(run: Run, rank: int, where: str, *, first: int = 0) -> int:
    """Stop a rank of ``run`` at the moment it is in the phase or collective ``where``; returns its step.

    Args:
        first: rank of the node's first.
    """
    pid = run.ranks()[rank - first]

    def stopped_there() -> int | None:
        assert not run.ended, run.output()
        os.kill(pid, signal.SIGSTOP)
        now = crumb(pid, rank)
        if now and now.step >= 2 and where in (now.collective or now.phase,):
            return now.step
        os.kill(pid, signal.SIGCONT)
        return None

    return int(wait_until(stopped_there, f"rank {rank} to be in {where}"))


def assert_out_in_time(run: Run, since: float) -> dict[str, Any]:
    code = run.wait()
    assert time.monotonic() - since < ALLOWED, run.output()
    message = run.message()
    assert message["code"] == code
    return message


@pytest.mark.parametrize(("victim", "where"), [(1, GRADIENTS), (0, GRADIENTS), (1, "batch"), (0, "batch")])
def test_a_stopped_rank_is_named_with_what_it_was_doing(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, victim: int, where: str
) -> None:
    # The other rank is slow to load, so that the victim is inside the collective for most of the time; or it is itself.
    slow = victim if where == "batch" else 1 - victim
    run = ddptrain.start(
        "launch", "--nproc-per-node", 3, "--hang-timeout", TIMEOUT, *SMALL, "--data-dir", idx, "--checkpoint-dir",
        tmp_path, "--chaos", f"slow:{slow}:1",
    )  # fmt: skip
    run.at_step(2)
    step = freeze(run, victim, where)
    message = assert_out_in_time(run, time.monotonic())
    assert (message["code"], message["cause"], message["exception"]) == (76, "own", "Hang"), run.output()
    assert (message["rank"], message["step"], message["phase"]) == (victim, step, where)
    assert f"rank {victim} (node 0) is stopped in" in message["message"]
    assert f"rank {2 if victim == 1 else 1} waits in {GRADIENTS}" in message["message"]
    folder = tmp_path / "reports" / "local-0"
    assert json.loads((folder / "node-0.json").read_text())["report"]["rank"] == victim
    assert "trainer.py" in (folder / "rank-2.stacks.txt").read_text()
    recorded = json.loads((folder / "rank-2.flight.json").read_text())
    assert any("all_reduce" in entry["profiling_name"] for entry in recorded["entries"])


def test_a_rank_blocked_in_c_is_named_with_the_line_it_is_blocked_at(ddptrain: ForkServer, idx: Path) -> None:
    run = ddptrain.start(
        "launch", "--nproc-per-node", 2, "--hang-timeout", 2, *SMALL, "--data-dir", idx, "--chaos", "hang:1:4"
    )
    assert run.wait() == 76, run.output()
    message = run.message()
    assert (message["rank"], message["step"], message["phase"]) == (1, 4, "batch")
    assert message["where"].startswith("trainer.py:")


@pytest.mark.parametrize("victim", [0, 3])
def test_across_two_nodes_both_name_the_stopped_rank(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, victim: int
) -> None:
    port = free_port()
    command = (
        "train", *SMALL, "--data-dir", idx, "--hang-timeout", TIMEOUT, "--checkpoint-dir", tmp_path, "--chaos",
        f"slow:{(victim + 2) % 4}:1",
    )  # fmt: skip
    nodes = [ddptrain.start(*command, env=node(rank, port)) for rank in (0, 1)]
    nodes[0].at_step(2)
    freeze(nodes[victim // 2], victim, GRADIENTS, first=victim // 2 * 2)
    since = time.monotonic()
    messages = [assert_out_in_time(run, since) for run in nodes]
    guilty, innocent = messages[victim // 2], messages[1 - victim // 2]
    assert (guilty["code"], guilty["cause"], guilty["rank"]) == (76, "own", victim)
    assert innocent["cause"] == "peer", json.dumps(innocent)
    assert innocent["code"] in (76, 77)
    assert f"rank {victim}" in innocent["message"]
    assert "is stopped in" in innocent["message"]


@pytest.mark.parametrize(
    ("victim", "heard"),
    [
        (3, "rank 3 left: rank 3 (node 1) is stopped in phase data"),
        (0, "a peer was lost"),  # rank 0 serves the store: with it, nothing is left that could carry a name
    ],
)
def test_a_rank_stopped_while_it_loads_the_data_is_told_to_the_node_that_polls_for_its_word(
    ddptrain: ForkServer, idx: Path, victim: int, heard: str
) -> None:
    port = free_port()
    # No directory in common: only the store can tell the other node, whose ranks wait for no connection that could
    # break.
    command = ("train", *SMALL, "--data-dir", idx, "--hang-timeout", TIMEOUT, "--chaos", f"stop:{victim}:0:data")
    patient = {"PET_RDZV_CONF": f"timeout={2 * ALLOWED}"}  # until then ranks that have met wait for each other's data
    nodes = [ddptrain.start(*command, env=node(rank, port) | patient) for rank in (0, 1)]
    wait_until(lambda: "chaos: stop" in nodes[victim // 2].output(), f"rank {victim} to be stopped")
    since = time.monotonic()
    messages = [assert_out_in_time(run, since) for run in nodes]
    guilty, innocent = messages[victim // 2], messages[1 - victim // 2]
    assert (guilty["code"], guilty["cause"], guilty["rank"], guilty["phase"]) == (76, "own", victim, "data")
    assert (innocent["code"], innocent["cause"]) == (77, "peer"), innocent["message"]
    assert heard in innocent["message"]


def test_dumps_of_a_false_alarm_are_not_taken_for_an_answer() -> None:
    diagnostics = Diagnostics.create(0)
    for descriptor in (diagnostics.stacks, diagnostics.flight):
        os.write(descriptor, b"of an earlier alarm")
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited: it answers nothing
    deaf = subprocess.Popen(["sleep", "600"])
    signal.signal(signal.SIGUSR1, before)
    try:
        seen = HangDetector(0, 0).inspect([WorkerProcess(0, deaf.pid, -1, -1, diagnostics)])
    finally:
        deaf.kill()
        deaf.wait()
        diagnostics.close()
    assert [(rank_state.answered, rank_state.where) for rank_state in seen] == [(False, None)]


def test_slow_work_with_heartbeats_is_no_hang(ddptrain: ForkServer, idx: Path) -> None:
    run = ddptrain.start(
        "launch", "--nproc-per-node", 2, "--hang-timeout", 3, "--data", "idx", "--data-dir", idx, "--batch-size", 300,
        "--epochs", 1, "--step-delay", 4,
    )  # fmt: skip
    assert run.wait() == 0, run.output()


def test_a_pause_ends_with_a_heartbeat() -> None:
    heartbeat = Heartbeat()
    group = Group(Ranks(), torch.device("cpu"), None, StopFlag(), heartbeat)
    begun = time.monotonic()
    group.pause(0.3)
    assert heartbeat.last.time >= begun + 0.3, "else the last piece of the pause would count for what follows"


@pytest.mark.parametrize("place", ["close", "destroy_process_group"])
def test_a_rank_that_hangs_while_it_closes_the_process_group_is_named(
    ddptrain: ForkServer, idx: Path, place: str
) -> None:
    run = ddptrain.start(
        "launch", "--nproc-per-node", 2, "--hang-timeout", TIMEOUT, "--data", "idx", "--data-dir", idx, "--batch-size",
        300, "--epochs", 1, "--chaos", f"hang:1:1:{place}",
    )  # fmt: skip
    assert run.wait() == 76, run.output()
    message = run.message()
    assert (message["rank"], message["phase"], message["cause"]) == (1, place, "own")


def test_without_a_hang_timeout_a_stopped_rank_is_noticed_by_the_collective_that_waits_for_it(
    ddptrain: ForkServer, idx: Path
) -> None:
    run = ddptrain.start(
        "launch", "--nproc-per-node", 2, "--hang-timeout", 0, "--collective-timeout", 5, *SMALL, "--data-dir", idx,
        "--chaos", "stop:1:4",
    )  # fmt: skip
    assert run.wait() == 76, run.output()
    message = run.message()
    assert (message["rank"], message["cause"], message["exception"]) == (0, "own", "Hang")
    assert "a collective did not complete in time" in message["message"]
    assert "rank 1 (node 0)" not in run.output(), "no watchdog has looked"


def test_time_that_the_launcher_itself_was_stopped_counts_against_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("ddptrain.launcher.hang_detector.time.monotonic", lambda: now)
    child = WorkerProcess(0, os.getpid(), -1, -1, Diagnostics.create(0))
    detector = HangDetector(60, 0)
    assert not detector.stalled([child])
    now = 1000.0  # the container was paused
    assert not detector.stalled([child])
    for _ in range(70):
        now += detector.interval
        stalled = detector.stalled([child])
    assert stalled


@pytest.mark.parametrize(
    ("odd_one", "all_ranks"),
    [
        ({"stopped": True}, False),
        ({"collective": "", "phase": "batch", "collectives": 8}, False),
        ({"answered": False}, False),
        ({"collectives": 8}, True),
    ],
)
def test_the_odd_one_out_is_to_blame(odd_one: dict[str, Any], all_ranks: bool) -> None:
    ranks = [rank_state(0), rank_state(1), rank_state(2, **odd_one), rank_state(3)]
    found = find_hung_rank(ranks, all_ranks=all_ranks)
    assert found is not None
    assert found.rank == 2


def test_where_all_of_a_node_wait_alike_the_cause_is_elsewhere() -> None:
    ranks = [rank_state(0), rank_state(1, collectives=8)]
    assert find_hung_rank(ranks, all_ranks=False) is None
    report = hang_report(ranks, timeout=60, all_ranks=False)
    assert (report["code"], report["cause"]) == (76, "peer")


def test_a_rank_that_still_moves_is_not_to_blame_though_it_waits_for_nobody() -> None:
    busy = rank_state(0, collective="", phase="save", quiet=0.2)
    found = find_hung_rank([busy, rank_state(1, stopped=False, answered=False)], all_ranks=True)
    assert found is not None
    assert found.rank == 1


def test_breadcrumbs_tell_phase_step_and_collective_and_count_every_change() -> None:
    memory = memoryview(bytearray(SIZE))
    heartbeat = Heartbeat(memory)
    heartbeat.mark("batch", 7)
    with heartbeat.waiting_in("all_reduce"):
        inside = HeartbeatRecord.unpack(memory)
    after = HeartbeatRecord.unpack(memory)
    assert (inside.step, inside.phase, inside.collective, inside.collectives) == (7, "batch", "all_reduce", 1)
    assert (after.collective, after.collectives) == ("", 1)
    assert after.changes > inside.changes


def test_without_a_launcher_every_rank_that_still_can_ends_itself_and_says_what_it_waited_in(
    ddptrain: ForkServer, idx: Path
) -> None:
    init = f"tcp://127.0.0.1:{free_port()}"
    argv = ("train", *SMALL, "--data-dir", idx, "--hang-timeout", 2, "--chaos", "hang:1:4", "--init", init)
    runs = [ddptrain.start(*argv, "--rank", rank, "--world-size", 2) for rank in (0, 1)]
    assert runs[1].wait() == 76, runs[1].output()
    blocked = runs[1].message()
    assert (blocked["cause"], blocked["exception"]) == ("own", "Hang")
    assert "in phase batch of step 4" in blocked["message"]
    assert "trainer.py" in runs[1].output(), "its stacks are in its log"
    waiting = runs[0].wait()
    message = runs[0].message()
    assert (waiting, message["cause"]) in ((76, "peer"), (77, "peer")), runs[0].output()


def test_a_process_that_trains_alone_watches_itself(ddptrain: ForkServer, idx: Path) -> None:
    run = ddptrain.start("train", *SMALL, "--data-dir", idx, "--hang-timeout", 2, "--chaos", "hang:0:4")
    assert run.wait() == 76, run.output()
    message = run.message()
    assert (message["rank"], message["cause"], message["exception"]) == (0, "own", "Hang")
    assert "in phase batch of step 4" in message["message"]
    assert "trainer.py" in run.output(), "its stacks are in its log"
