"""A stall of a script is reported with the stacks of all ranks of all nodes, and the report is withdrawn at its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddprun.diagnostics import Diagnostics
from ddprun.distributed.topology import Ranks
from ddprun.launcher.hang_detector import HangDetector
from ddprun.launcher.look_inside import LookInside
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.peers import NodeFindings, Peers
from ddprun.launcher.processes import WorkerProcess
from ddprun.launcher.services import leader_port
from ddprun.launcher.stalls import StallWatch, _is_stall
from ddprun.reporting.http_port import ProgressPort
from tests.ddprun.launcher_messages import Speaker
from tests.ddprun.resilience import scripts
from tests.ddptrain.builders import rank_state
from tests.ddptrain.runs import ForkServer, Run, wait_until
from tests.processes import free_port

pytestmark = pytest.mark.together

TRAINING = """
import ctypes, datetime, os, signal, sys, time
import torch
import torch.distributed as dist

def hang(how, go):
    if how == "gil":
        while True:  # a signal ends a sleep
            ctypes.PyDLL(None).sleep(1000)
    while not os.path.exists(go):
        time.sleep(0.02)

signal.signal(signal.SIGUSR1, lambda *_: os._exit(9))  # of the script, such as for a save
how, victim, go = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=int(os.environ.get("LIMIT", "600"))))
if how == "absent" and rank == victim:
    hang(how, go)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 9):
    model(torch.ones(8, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if step == 5 and rank == victim and how != "absent":
        hang(how, go)
    if step == 7 and rank == victim and how == "poll":
        hang(how, go + "-on")
dist.destroy_process_group()
"""


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(TRAINING.splitlines(), start=1) if text in line)


def of_training(folder: Path, *argv: object) -> list[object]:
    """Return the arguments of ``ddprun`` for TRAINING; the last of these are those of the script."""
    script = folder / "train.py"
    script.write_text(TRAINING)
    at = next(index for index, argument in enumerate(argv) if argument in ("gil", "poll", "absent"))
    return [*argv[:at], script, *argv[at:], folder / "go"]


def started(server: ForkServer, folder: Path, *argv: object, env: dict[str, object] | None = None) -> Run:
    return server.start(*of_training(folder, *argv), env=env, module="ddprun")


def stall_of(run: Run, rank: int) -> dict[str, Any]:
    """Wait until the progress report has a stall of ``rank``, and return it."""

    def reported() -> dict[str, Any] | None:
        assert not run.ended, run.output()
        stall: dict[str, Any] | None = (run.progress() or {}).get("stall")
        return stall if stall and stall["rank"] == rank else None

    return dict(wait_until(reported, f"a stall of rank {rank}"))


def two_nodes(server: ForkServer, folder: Path, *argv: object, logs: bool = False, connected: bool = True) -> list[Run]:
    """Start two nodes of two ranks without a common directory."""
    flags = tuple(("--log-dir", folder / f"logs-{node}") if logs else () for node in (0, 1))
    own = ({}, {} if connected else {"DDPJOB_LEADER_PORT": free_port()})
    return scripts.two_nodes(server, *of_training(folder, *argv), ranks=2, flags=flags, own=own)


def test_stall_is_reported_without_a_flag_of_the_user_and_withdrawn_when_the_rank_goes_on(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    run = started(ddptrain, tmp_path, "--nproc-per-node", 3, "--stall-report", 3, "--log-dir", logs, "poll", 2)
    stall = stall_of(run, 2)
    polling = [f"train.py:{line_of(text)}" for text in ("os.path.exists(go)", "time.sleep(0.02)")]
    assert stall["step"] == 5 and stall["where"] in polling
    folder = logs / "reports" / "local-0"
    wait_until(lambda: f"the stacks are in {folder}" in run.output(), "the report in the log")
    assert all("train.py" in (folder / f"rank-{rank}.stacks.txt").read_text() for rank in range(3))
    recorded = json.loads((folder / "rank-0.flight.json").read_text())
    assert any("all_reduce" in entry["profiling_name"] for entry in recorded["entries"])
    (tmp_path / "go").touch()
    wait_until(lambda: (run.progress() or stall).get("stall", 0) is None or run.ended, "the report to be withdrawn")
    assert not run.ended, run.output()
    (tmp_path / "go-on").touch()
    assert run.wait() == 0, run.output()
    assert run.output().count("stalled: rank 2 (node 0) is in phase train of step 5 at") == 1
    assert "rank 0 waits in all_reduce of step 5" in run.output()
    assert run.output().count("the stall has ended") == run.output().count("warning: stalled")
    assert (run.message()["outcome"], "stall" in run.message()["progress"]) == ("succeeded", False)
    why = ddptrain.run("--why", logs, module="ddprun", code=66)
    assert "no report of a failure" in why.output()


def test_stacks_of_all_nodes_reach_node_zero_without_a_volume_also_of_a_rank_that_holds_the_gil(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    runs = two_nodes(ddptrain, tmp_path, "--stall-report", 3, "gil", 3)
    stall = stall_of(runs[0], 3)
    where = f"train.py:{line_of('PyDLL')}"
    assert (stall["step"], stall["where"]) == (5, where)
    wait_until(lambda: "stacks of rank 3:" in runs[0].output(), "the stacks")
    for rank in range(4):
        assert f"stacks of rank {rank}:" in runs[0].output()
    wait_until(
        lambda: f"rank 3 (node 1) is in phase train of step 5 at {where}" in runs[1].output(), "node 1 to say it"
    )


def test_all_stacks_are_taken_before_a_hang_is_ended(ddptrain: ForkServer, tmp_path: Path) -> None:
    runs = two_nodes(ddptrain, tmp_path, "--hang-timeout", 5, "gil", 3, logs=True)
    codes = [run.wait() for run in runs]
    assert codes[1] == 76, runs[1].output()
    assert (runs[1].message()["rank"], runs[1].message()["cause"]) == (3, "own")
    assert runs[0].message()["cause"] == "peer", runs[0].output()
    folder = tmp_path / "logs-0/reports/local-0"
    assert all("train.py" in (folder / f"rank-{rank}.stacks.txt").read_text() for rank in (0, 1))
    others = (folder / "stall-0.stacks.txt").read_text().split("rank 3:\n")
    assert others[0].startswith("rank 2:\n")
    assert all("train.py" in stacks for stacks in others)


def test_launcher_that_does_not_answer_is_named_and_delays_the_report_only(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    runs = two_nodes(ddptrain, tmp_path, "--stall-report", 3, "poll", 3)
    stall_of(runs[0], 3)  # so the launchers are connected
    (tmp_path / "go").touch()
    wait_until(lambda: "the stall has ended" in runs[0].output(), "the end of the first stall")
    os.kill(runs[1].pid, signal.SIGSTOP)  # the second stall takes twice as long as the first
    wait_until(lambda: "no answer of node 1" in runs[0].output(), "the report of the second stall")
    assert "rank 0 waits in all_reduce of step 7" in runs[0].output() or "no rank of this node is" in runs[0].output()
    os.kill(runs[1].pid, signal.SIGCONT)
    (tmp_path / "go-on").touch()
    assert [run.wait() for run in runs] == [0, 0]


def test_launcher_that_reaches_no_other_reports_its_own_ranks(ddptrain: ForkServer, tmp_path: Path) -> None:
    runs = two_nodes(ddptrain, tmp_path, "--stall-report", 3, "poll", 3, connected=False)
    wait_until(lambda: "stalled: rank 3 (node 1) is in phase train of step 5" in runs[1].output(), "node 1's report")
    wait_until(lambda: "no rank of this node is the cause" in runs[0].output(), "node 0's report")
    assert "no answer of node 1" in runs[0].output()
    for name in ("go", "go-on"):
        (tmp_path / name).touch()
    for run in runs:
        assert run.wait() == 0, run.output()
        assert run.output().count("the stall has ended") == run.output().count("warning: stalled")


def test_rank_that_hangs_is_the_cause_when_the_collectives_of_its_peers_time_out(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    argv = ("--nproc-per-node", 3, "--stall-report", 2, "--log-dir", logs, "poll", 2)
    run = started(ddptrain, tmp_path, *argv, env={"LIMIT": 20})
    assert run.wait() == 76, run.output()
    message = run.message()
    assert (message["rank"], message["cause"], message["step"]) == (2, "own", 5), run.output()
    assert message["where"] == f"train.py:{line_of('time.sleep(0.02)')}"
    assert "the stall has ended" not in run.output()
    assert "rank 2 (node 0) works in phase train" in ddptrain.run("--why", logs, module="ddprun").output()


def test_pause_is_shown_at_once_and_stacks_are_taken_before_the_operators_deadline(
    ddptrain: ForkServer, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, time, ddprun\n"
        "rank = int(os.environ['RANK'])\n"
        "for step in range(1, 21 - rank):\n"
        "    time.sleep(0.05)\n"
        "    ddprun.report(step=step)\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}):\n"
        "    time.sleep(0.02)\n"
        "ddprun.report(step=21)\n"
        f"while not os.path.exists({str(tmp_path / 'end')!r}):\n"
        "    time.sleep(0.02)\n"
    )
    flags = ("--nproc-per-node", 2, "--log-dir", tmp_path / "logs")
    run = ddptrain.start(*flags, script, module="ddprun", env={"DDPJOB_PROGRESS_DEADLINE": 30})
    shown = dict(wait_until(lambda: (run.progress() or {}).get("pause"), "the pause"))
    now = run.progress() or {}
    assert 9 < now["ageSeconds"] < 15 or now["stall"], now  # a machine under load looks later
    assert 0.04 < shown["stepSeconds"] < 0.5
    stall = stall_of(run, 1)
    assert (stall["step"], stall["where"][:9]) == (19, "train.py:")
    folder = tmp_path / "logs" / "reports" / "local-0"
    wait_until(lambda: "train.py" in (folder / "rank-1.stacks.txt").read_text(), "the stacks")
    (tmp_path / "go").touch()
    wait_until(lambda: (run.progress() or shown).get("pause", 0) is None or run.ended, "the end of the pause")
    assert not run.ended, run.output()
    (tmp_path / "end").touch()
    assert run.wait() == 0, run.output()


def test_executable_makes_no_steps_and_is_left_alone(ddptrain: ForkServer) -> None:
    flags = ("--hang-timeout", 0.5, "--stall-report", 0.2, "--no-python")
    done = ddptrain.run(*flags, "sleep", 3, module="ddprun")
    assert "stalled" not in done.output()


def test_program_without_steps_may_do_nothing_for_long_unless_a_rank_waits_for_its_peers() -> None:
    assert not _is_stall([rank_state(0, collective="", step=0), rank_state(1, collective="", phase="close")])
    assert _is_stall([rank_state(0, collective="", step=0), rank_state(1, step=0)])
    assert _is_stall([rank_state(0, collective="", step=7)])


def test_only_launchers_of_the_same_attempt_are_taken() -> None:
    ranks = Ranks(nnodes=3, nproc_per_node=2, world_size=6)
    leader = Peers(ranks, 29501)
    ours, theirs = socket.socketpair()
    node = Speaker(1)
    hello = json.loads(node.hello)
    refused: list[Any] = [
        {**hello, "ddprun-launcher": 3}, {**hello, "ddprun-launcher": 0}, {**hello, "ddprun-launcher": True},
        {"asks": "7"}, {**hello, "asks": 7}, [], "{",
    ]  # fmt: skip
    with ours, theirs:
        for line in refused:
            assert not leader.takes(ours, json.dumps(line).encode() + b"\n"), line
        assert leader.takes(ours, node.hello)
        assert leader.is_alone, "the node has proved nothing"
        theirs.sendall(node.proof(theirs.recv(4096)) + node.message({"stalled": True}))
        leader.handle()
        assert leader.stalled == {1}  # said at once, and nothing follows until that changes
        leader.ask()
        leader.give(NodeFindings(0))
        assert not leader.is_settled
        said: list[Any] = [{"findings": {"ranks": [], "stacks": {"2": "s"}}}, "no object", []]
        theirs.sendall(b"".join(map(node.message, said)))
        leader.handle()
        assert leader.is_settled
        assert leader.findings() == [NodeFindings(0), NodeFindings(1, [], {2: "s"})]


def test_idle_program_is_inspected_once_and_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    number = free_port()
    idle = subprocess.Popen(["sleep", "600"])
    nodes = []
    for node in (0, 1):
        ranks = Ranks(nnodes=2, node_rank=node, world_size=2)
        worker = WorkerProcess(node, idle.pid, -1, -1, Diagnostics.create(node))
        detector, peers, progress = HangDetector(0, node, 0.05), Peers(ranks, number), NodeProgress(2)
        watch = StallWatch(
            detector, peers, progress, None, LookInside(ranks, peers, float), nodes=2, is_told_to_stop=bool
        )
        nodes.append((detector, watch, worker, peers))
    port = ProgressPort(number, dict, nodes[0][3].takes)

    def turn(watched: int = 2) -> None:
        port.handle()
        for detector, watch, worker, peers in nodes:
            detector.stalled([worker])
            peers.handle()
            if peers.node < watched:
                watch.turn([worker], ending=False)

    def both_stalled() -> bool:
        turn(0)
        return not nodes[1][3].is_alone and all(detector.stalled_ranks for detector, *_ in nodes)

    def was_inspected() -> bool:
        turn()
        return bool(nodes[1][1].states) and not any(watch.is_busy for _, watch, *_ in nodes)

    try:
        wait_until(both_stalled, "both nodes to be connected and idle")
        wait_until(was_inspected, "the inspection")
        for _ in range(20):
            turn()
            assert not any(watch.is_busy for _, watch, *_ in nodes), "it is known"
        assert capsys.readouterr().out == ""
    finally:
        idle.kill()
        idle.wait()
        port.close()
        for _, _, worker, _ in nodes:
            worker.diagnostics.close()


def test_states_of_an_inspection_for_a_client_replace_none_of_a_stall() -> None:
    busy = subprocess.Popen(["sleep", "600"])
    worker, detector, peers = (
        WorkerProcess(0, busy.pid, -1, -1, Diagnostics.create(0)),
        HangDetector(0, 0),
        Peers(Ranks(), None),
    )
    look = LookInside(Ranks(), peers, float)
    watch = StallWatch(detector, peers, NodeProgress(1), None, look, nodes=1, is_told_to_stop=bool)

    def inspected(*, is_look: bool) -> list[int]:
        watch.ask(is_look=is_look)
        while watch.is_busy:
            detector.stalled([worker])
            watch.turn([worker], ending=False)
        return [state.rank for state in watch.states]

    try:
        assert inspected(is_look=True) == []
        assert inspected(is_look=False) == [0]
        of_stall = watch.states
        assert inspected(is_look=True) == [0] and watch.states is of_stall
    finally:
        busy.kill()
        busy.wait()
        worker.diagnostics.close()


def test_port_of_node_zero() -> None:
    two, alone = Ranks(nnodes=2, world_size=2, master_port=3000), Ranks()
    assert leader_port(two, {}) == 3001
    assert leader_port(two, {"DDPJOB_PROGRESS_PORT": "4000"}) == 4000
    assert leader_port(two, {"DDPJOB_PROGRESS_PORT": "4000", "DDPJOB_LEADER_PORT": "5000"}) == 5000
    assert leader_port(alone, {}) is None
    assert leader_port(alone, {"DDPJOB_PROGRESS_PORT": "4000"}) == 4000
