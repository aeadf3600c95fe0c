"""A rank that hangs: all ranks end soon after the timeout, and the report names that rank, not those that wait."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.flight_recorder.components.loader import read_dir

from ddprun.diagnostics import DUMP_SIGNAL, Diagnostics, dump_flight_recorder
from ddprun.heartbeat import HeartbeatRecord
from ddprun.launcher import hang_detector
from ddprun.launcher.hang_detector import HangDetector, find_hung_rank, hang_report
from ddprun.launcher.processes import WorkerProcess
from ddptrain.config import resolve
from tests.ddptrain.builders import SMALL as SHORT
from tests.ddptrain.builders import node, rank_state
from tests.ddptrain.runs import ForkServer, Run, wait_until
from tests.processes import free_port

pytestmark = pytest.mark.together

SMALL = (*SHORT, "--epochs", 3)
GRADIENTS = "all_reduce of gradients"
# Seconds. The documented figures are 60 and 75; DDPTRAIN_TEST_HANG_TIMEOUT=60 tests these.
TIMEOUT = float(os.environ.get("DDPTRAIN_TEST_HANG_TIMEOUT", "5"))
ALLOWED = 75


def last_heartbeat(pid: int, rank: int) -> HeartbeatRecord | None:
    """Return the newest heartbeat of a launched rank."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if f"ddprun-heartbeat-{rank} " in os.readlink(descriptor):  # noqa: PTH115 - a memory file has no path
                return HeartbeatRecord.unpack(descriptor.read_bytes())
        except FileNotFoundError:
            continue
    return None


def freeze(run: Run, rank: int, where: str) -> int:
    """Stop a rank of ``run`` while it is in the phase or collective ``where``, and return its step."""
    pid = run.ranks()[rank]

    def stopped_there() -> int | None:
        assert not run.ended, run.output()
        os.kill(pid, signal.SIGSTOP)
        now = last_heartbeat(pid, rank)
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


@pytest.mark.parametrize(("victim", "where"), [(1, GRADIENTS), (0, "batch")])
def test_a_stopped_rank_is_named_with_what_it_was_doing(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, victim: int, where: str
) -> None:
    # One rank is slow in ``batch``: the victim waits for it in the collective most of the time, or is that rank itself.
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
    assert pickle.loads((folder / "trace-2").read_bytes())["entries"], "as torchfrtrace reads it"  # noqa: S301
    recorded = json.loads((folder / "rank-2.flight.json").read_text())
    assert any("all_reduce" in entry["profiling_name"] for entry in recorded["entries"])


def test_a_rank_blocked_in_c_is_named_with_its_line(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    run = ddptrain.start(
        "launch", "--nproc-per-node", 2, "--hang-timeout", TIMEOUT, *SMALL, "--data-dir", idx, "--chaos", "hang:1:4",
        "--checkpoint-dir", tmp_path,
    )  # fmt: skip
    assert run.wait() == 76, run.output()
    message = run.message()
    assert (message["rank"], message["step"], message["phase"]) == (1, 4, "batch")
    assert message["where"].startswith("trainer.py:")
    last = run.output().splitlines()[-4:]
    assert [line.partition(":")[0] for line in last] == ["root cause", "at", "hint", "next"]
    assert {1} in missing_ranks(tmp_path / "reports" / "local-0")
    why = ddptrain.run("--why", tmp_path, module="ddprun").output()
    assert "root cause: rank 1, exit code 76" in why
    assert "rank 1 (node 0) works in phase batch of step 4 at trainer.py:" in why
    assert "rank 0 (node 0) waits in all_reduce of gradients of step 4" in why


def missing_ranks(folder: Path) -> list[set[int] | None]:
    """Return the ranks that each collective lacks, as ``torchfrtrace --prefix trace- FOLDER`` finds them."""
    arguments = JobConfig().parse_args(["--prefix", "trace-", str(folder)])
    details, version = read_dir(arguments)
    return [collective.missing_ranks for collective in build_db(details, arguments, version).collectives]


def test_a_node_that_polls_the_store_learns_which_rank_stopped_in_data(ddptrain: ForkServer, idx: Path) -> None:
    port = free_port()
    # Without a common directory only the store can carry the name: no connection to the stopped rank breaks.
    command = ("train", *SMALL, "--data-dir", idx, "--chaos", "stop:3:0:data")
    patient = {"PET_RDZV_CONF": f"timeout={2 * ALLOWED}"}  # until then the ranks wait for each other's data
    # Node 0, which may be slow to load its data, learns of the hang and finds none by itself.
    nodes = [
        ddptrain.start(*command, "--hang-timeout", limit, env=node(rank, port) | patient)
        for rank, limit in enumerate((2 * ALLOWED, TIMEOUT))
    ]
    wait_until(lambda: "chaos: stop" in nodes[1].output(), "rank 3 to be stopped")
    since = time.monotonic()
    innocent, guilty = (assert_out_in_time(run, since) for run in nodes)
    assert (guilty["code"], guilty["cause"], guilty["rank"], guilty["phase"]) == (76, "own", 3, "data")
    assert (innocent["code"], innocent["cause"]) == (77, "peer"), innocent["message"]
    assert "rank 3 left: rank 3 (node 1) is stopped in phase data" in innocent["message"]


def test_dumps_of_an_earlier_false_alarm_are_not_counted_as_new() -> None:
    diagnostics = Diagnostics.create(0)
    for descriptor in (diagnostics.stacks, diagnostics.flight, diagnostics.trace):
        os.write(descriptor, b"of an earlier alarm")
    silent = subprocess.Popen(["sleep", "600"])
    try:
        seen = HangDetector(0, 0).snapshots([WorkerProcess(0, silent.pid, -1, -1, diagnostics)])
    finally:
        silent.kill()
        silent.wait()
        diagnostics.close()
    assert [(rank_state.answered, rank_state.where) for rank_state in seen] == [(False, None)]


def test_rank_that_was_killed_is_not_asked_for_its_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not answer, and the next life would wait for it."""
    asked: list[int] = []
    monkeypatch.setattr(hang_detector, "request_stacks", lambda worker: asked.append(worker.rank))
    workers = [WorkerProcess(rank, os.getpid(), -1, -1, Diagnostics.create(rank)) for rank in (0, 1)]
    workers[0].killed_by_us = True
    seen = HangDetector(0, 0).snapshots(workers)
    assert asked == [1] and [state.rank for state in seen] == [0, 1]
    for worker in workers:
        worker.diagnostics.close()


# Its main thread takes the request for stacks after a second. The other thread says whether it is asked before that.
RANK = """
import faulthandler, os, signal, sys, threading, time
stacks, flight, requests, number = map(int, sys.argv[1:])
faulthandler.register(number, file=stacks, all_threads=True)
signal.pthread_sigmask(signal.SIG_BLOCK, {number})

def serve():
    os.read(requests, 8)
    os.write(flight, b"after the stacks" if os.fstat(stacks).st_size else b"too early")

threading.Thread(target=serve, daemon=True).start()
print("ready", flush=True)
time.sleep(1)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
time.sleep(600)
"""


def test_flight_recorder_is_not_asked_for_while_the_stacks_are_written() -> None:
    """A thread that begins or ends while faulthandler follows the list of threads ended ranks by SIGSEGV."""
    diagnostics = Diagnostics.create(0)
    descriptors = (diagnostics.stacks, diagnostics.flight, diagnostics.requests)
    command = [sys.executable, "-c", RANK, *map(str, descriptors), str(int(DUMP_SIGNAL))]
    rank = subprocess.Popen(command, pass_fds=descriptors, stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None and rank.stdout.readline() == b"ready\n"
        HangDetector(0, 0).snapshots([WorkerProcess(0, rank.pid, -1, -1, diagnostics, sends_an_ending=False)])
        assert diagnostics.dumps()[1] == "after the stacks"
    finally:
        rank.kill()
        rank.communicate()
        diagnostics.close()


def test_a_flight_recorder_that_blocks_does_not_block_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    released, entered = threading.Event(), threading.Event()

    def block() -> bytes:
        entered.set()
        released.wait(60)
        return pickle.dumps({"entries": [1]})

    monkeypatch.setattr("torch._C._distributed_c10d._dump_nccl_trace", block, raising=False)
    diagnostics = Diagnostics.create(0)
    dump_flight_recorder(diagnostics)  # returns
    assert entered.wait(60)
    assert diagnostics.raw_trace() == b""
    released.set()
    wait_until(lambda: diagnostics.dumps()[1], "the dump")
    assert json.loads(diagnostics.dumps()[1]) == {"entries": [1]}
    diagnostics.close()


def test_a_dump_imports_no_compiler_which_takes_longer_than_the_launcher_waits(tmp_path: Path) -> None:
    program = (
        "import sys, torch, torch.distributed as dist\n"
        "from ddprun.diagnostics import newest_trace\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "_, recorded = newest_trace()\n"
        "print(recorded['entries'][0]['frames'][-1]['name'], '_inductor' in vars(torch))\n"
        "print('torch._inductor' in sys.modules)\n"
        "dist.destroy_process_group()\n"
    )
    # A new interpreter, as of a user: the fork server has imported more of torch than a training does.
    done = subprocess.run(
        [sys.executable, "-c", program],
        timeout=120,
        check=False,
        env={"PATH": "/usr/bin"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["<module>", "False", "False"], done.stderr


def test_a_save_has_a_limit_of_its_own_also_for_the_ranks_that_wait_for_it(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    run = ddptrain.start(
        "launch", "--nproc-per-node", 2, "--hang-timeout", 5, *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path,
        "--checkpoint-every", 5, "--chaos", "stop:0:5:save",
    )  # fmt: skip
    wait_until(lambda: "chaos: stop" in run.output(), "rank 0 to be stopped, as a volume that does not answer would")

    def both_waited() -> bool:
        assert not run.ended, run.output()
        seen = [last_heartbeat(run.pid, rank) for rank in (0, 1)]
        return all(record is not None and time.monotonic() - record.time > 11 for record in seen)

    wait_until(both_waited, "both ranks to be without a heartbeat for twice the timeout")
    os.kill(run.ranks()[0], signal.SIGCONT)
    assert run.wait() == 0, run.output()


def test_debug_is_the_switch_that_leaves_ranks_at_a_breakpoint_alone() -> None:
    debugging = resolve({"DDPTRAIN_DEBUG": "1"}, {})
    assert (debugging.hang_timeout, debugging.collective_timeout, debugging.rendezvous_timeout) == (0, 86_400, 86_400)
    assert resolve({"DDPTRAIN_DEBUG": "1", "DDPTRAIN_HANG_TIMEOUT": "60"}, {}).hang_timeout == 60
    assert resolve({"DDPTRAIN_DEBUG": "0"}, {}) == resolve({}, {})


def test_without_hang_detection_the_collective_timeout_finds_a_stopped_rank(ddptrain: ForkServer, idx: Path) -> None:
    run = ddptrain.start(
        "launch", "--nproc-per-node", 2, "--hang-timeout", 0, "--collective-timeout", 5, *SMALL, "--data-dir", idx,
        "--chaos", "stop:1:4",
    )  # fmt: skip
    assert run.wait() == 76, run.output()
    message = run.message()
    assert (message["rank"], message["cause"], message["exception"]) == (0, "own", "Hang")
    assert (message["code"], message["phase"]) == (76, "train")
    assert "a collective did not complete in time" in message["message"]
    assert "rank 1 (node 0)" not in run.output(), "no hang detector has looked"


def test_time_during_which_the_launcher_was_stopped_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("ddprun.launcher.hang_detector.time.monotonic", lambda: now)
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
    ("difference", "all_ranks"),
    [
        ({"stopped": True}, False),
        ({"collective": "", "phase": "batch", "collectives": 8}, False),
        ({"answered": False}, False),
        ({"collectives": 8}, True),
    ],
)
def test_the_rank_that_differs_from_its_peers_is_the_cause(difference: dict[str, Any], all_ranks: bool) -> None:
    ranks = [rank_state(0), rank_state(1), rank_state(2, **difference), rank_state(3)]
    found = find_hung_rank(ranks, all_ranks=all_ranks)
    assert found is not None
    assert found.rank == 2


@pytest.mark.parametrize("change", [{}, {"stopped": True}, {"phase": "close"}])
def test_place_with_a_percent_sign_is_shown_as_it_is(change: dict[str, Any]) -> None:
    state = rank_state(0, collective="", where="lora-50%.py:7", **change)
    assert "lora-50%.py:7" in hang_report([state], timeout=60, all_ranks=True)["message"]


@pytest.mark.parametrize(
    ("change", "all_ranks", "cause", "hint"),
    [
        ({"collectives": 8}, False, "peer", "the launcher of another node reports the rank that hangs"),
        ({}, True, "own", "all ranks wait in the same collective: the network between them"),
        ({"collective": "broadcast"}, True, "own", "the ranks wait in different collectives"),
    ],
)
def test_if_all_ranks_wait_the_cause_is_elsewhere(
    change: dict[str, Any], *, all_ranks: bool, cause: str, hint: str
) -> None:
    ranks = [rank_state(0), rank_state(1, **change)]
    assert find_hung_rank(ranks, all_ranks=all_ranks) is None
    report = hang_report(ranks, timeout=60, all_ranks=all_ranks)
    assert (report["code"], report["cause"]) == (76, cause)
    assert report["hint"].startswith(hint)


def test_a_rank_that_alone_waits_in_another_collective_is_named_first() -> None:
    ranks = [rank_state(rank, collective="barrier" if rank == 6 else "backward") for rank in range(8)]
    report = hang_report(ranks, timeout=60, all_ranks=True)
    assert report["message"].startswith("60 s without progress, and the ranks wait in different collectives; rank 6 ")
    assert "rank 6 waits in barrier" in report["message"] and report["rank"] == 6


def test_a_rank_outside_collectives_waits_in_none() -> None:
    ranks = [rank_state(0, collective="", phase="save", quiet=0.2), *(rank_state(r, collective="all") for r in (1, 2))]
    assert "different collectives" not in hang_report(ranks, timeout=60, all_ranks=True)["message"]


def test_a_rank_whose_heartbeat_changes_is_not_the_cause() -> None:
    busy = rank_state(0, collective="", phase="save", quiet=0.2)
    found = find_hung_rank([busy, rank_state(1, stopped=False, answered=False)], all_ranks=True)
    assert found is not None
    assert found.rank == 1


def test_a_process_that_trains_alone_watches_itself(ddptrain: ForkServer, idx: Path) -> None:
    run = ddptrain.start("train", *SMALL, "--data-dir", idx, "--hang-timeout", TIMEOUT, "--chaos", "hang:0:4")
    assert run.wait() == 76, run.output()
    message = run.message()
    assert (message["rank"], message["cause"], message["exception"]) == (0, "own", "Hang")
    assert "in phase batch of step 4" in message["message"]
    assert "trainer.py" in run.output(), "its log must hold the stacks"
