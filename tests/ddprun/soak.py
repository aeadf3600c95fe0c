"""Tests that take too long for every run; `make soak` runs them.

Each repeats, with more ranks, steps or samples, what a test in this folder checks in seconds.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ddprun.resilience.test_in_place import TRAINING, TwoNodes, descriptors
from tests.ddptrain.runs import ForkServer, Run, wait_until
from tests.processes import end

LIVES = 250  # of four ranks: 1,000 forks
# Each rank has a file in /dev/shm with such a name as torch gives it, which nothing but its launcher deletes.
# The script reports its steps, which go on in the next life: otherwise each life needs more steps than any before it.
SHARING = TRAINING.replace(
    "    if rank == 0:",
    """
    if done == 1:
        import ddprun
        Path(f"/dev/shm/torch_{os.getpid()}_soak").write_bytes(bytes(1000))
    ddprun.report(step=step)
    if rank == 0:""",
)


def resident_bytes(run: Run) -> int:
    return int(Path(f"/proc/{run.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(1800)
def test_250_lives_leave_nothing_behind_and_none_hangs(ddptrain: ForkServer, tmp_path: Path) -> None:
    nodes = TwoNodes(ddptrain, tmp_path, ranks=2, grant=LIVES, script=SHARING)
    step, before, ranks = nodes.trains(1)["step"], list[tuple[int, int]](), set[int]()
    for life in range(2, LIVES + 1):
        ranks |= {pid for run in nodes.runs for pid in run.ranks().values()}
        nodes.kill(life % 2, life // 2 % 2)
        step = nodes.trains(life, step)["step"]
        if life == 10:
            before = [(descriptors(run), resident_bytes(run)) for run in nodes.runs]
    for run, (opened, resident) in zip(nodes.runs, before, strict=True):
        assert descriptors(run) <= opened + 1  # a request for progress may have one
        assert resident_bytes(run) - resident <= 2 * 2**20
        assert len(run.ranks()) == 2, "no other child, also no zombie"
    nodes.finish()
    assert nodes.runs[0].message()["life"] == LIVES
    left = [path.name for path in Path("/dev/shm").glob("torch_*")]
    assert not [name for name in left if int(name.split("_")[1]) in ranks]


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4])
def test_stop_signal_beside_a_failure_ends_all_nodes(ddptrain: ForkServer, tmp_path: Path, delay: float) -> None:
    """A drain during a restart in place, at any moment of it; the operator stops the other pods a moment later."""
    nodes = TwoNodes(ddptrain, tmp_path)
    nodes.trains(1)
    nodes.kill(0)
    time.sleep(delay)  # any moment is as good
    began = time.monotonic()
    nodes.runs[1].stop()
    time.sleep(delay)
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        nodes.runs[0].stop()
    codes = [run.wait() for run in nodes.runs]
    assert time.monotonic() - began < 90, nodes.output()
    assert codes[0] in (75, 77, 137) and codes[1] in (75, 77), (codes, nodes.output())


@pytest.mark.parametrize("paused", [0, 1])
def test_launcher_that_is_stopped_for_13_s_ends_the_attempt_on_all_nodes(
    ddptrain: ForkServer, tmp_path: Path, paused: int
) -> None:
    nodes = TwoNodes(ddptrain, tmp_path)
    nodes.trains(1)
    os.kill(nodes.runs[paused].pid, signal.SIGSTOP)
    time.sleep(13)  # longer than the silence after which a launcher is lost
    os.kill(nodes.runs[paused].pid, signal.SIGCONT)
    assert [run.wait() for run in nodes.runs] == [77, 77], nodes.output()
    assert f"node {paused} is lost: it has said nothing for 10 s" in nodes.runs[1 - paused].output()
    assert "restart in place 1" not in nodes.output()


def test_ten_thousand_strangers_beside_a_failure_do_not_delay_the_next_life(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    nodes = TwoNodes(ddptrain, tmp_path)
    nodes.trains(1)
    leader, strangers = nodes.runs[0], collections.deque[socket.socket]()
    before = most = descriptors(leader)
    step = 0
    hello = json.dumps({"ddprun-launcher": 1, "asks": "1", "version": 1}).encode() + b"\n"
    for number in range(10_000):
        with contextlib.suppress(OSError):  # the queue of the port is full
            strangers.append(socket.create_connection(("127.0.0.1", leader.progress_port), 1))
            strangers[-1].sendall((hello, b"GET /progress", b"{", b"\x00" * 100)[number % 4])
        if number == 5000:
            step = nodes.kill(1)
        if number % 100 == 0:
            most = max(most, descriptors(leader))
        while len(strangers) > 400:
            strangers.popleft().close()
    for stranger in strangers:
        stranger.close()
    assert most - before <= 256 + 16 + 8  # strangers who are to prove themselves, requests, and pipes of two lives
    nodes.trains(2, step)
    nodes.finish()


@pytest.fixture
def two_machines() -> Iterator[tuple[str, str]]:
    """Make two network namespaces with a cable between them: 10.77.0.1 and 10.77.0.2, interface ``cable``."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    tag = secrets.token_hex(3)
    names = (f"ddpjob-{tag}-0", f"ddpjob-{tag}-1")
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, start=1):
            _ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def test_both_sides_of_a_partition_end_before_the_next_attempt_begins(
    two_machines: tuple[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    common = {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "10.77.0.1", "PET_MASTER_PORT": "29500",
        "DDPJOB_PROGRESS_PORT": "29501", "DDPJOB_UID": "uid", "DDPJOB_ATTEMPT": "1", "DDPJOB_INPLACE_RESTARTS": "5",
        "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    logs = [tmp_path / f"{node}.log" for node in (0, 1)]
    launchers: list[subprocess.Popen[bytes]] = []
    try:
        for node, machine in enumerate(two_machines):
            own = {"PET_NODE_RANK": str(node), "DDPJOB_TERMINATION_LOG": str(tmp_path / f"{node}.end")}
            command = ["ip", "netns", "exec", machine, sys.executable, "-m", "ddprun", str(script), str(tmp_path)]
            with logs[node].open("wb") as log:
                launchers.append(subprocess.Popen(command, env={**os.environ, **common, **own}, stdout=log, stderr=log))
        saved = tmp_path / "step"
        wait_until(lambda: "all 2 launchers take part" in logs[0].read_text(), "the launchers to be connected")
        wait_until(lambda: saved.exists() and int(saved.read_text()) > 5, "steps")
        _ip("-n", two_machines[0], "link", "set", "cable", "down")
        began = time.monotonic()
        codes = [launcher.wait(120) for launcher in launchers]
        assert time.monotonic() - began < 90
        said = [log.read_text() for log in logs]
        assert codes == [77, 77], said
        assert "node 1 is lost: it has said nothing for 10 s" in said[0], said
        assert "node 0 is lost: it has said nothing for 10 s" in said[1], said
    finally:
        for launcher in launchers:
            end(launcher)
