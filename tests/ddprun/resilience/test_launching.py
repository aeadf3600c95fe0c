"""Launching: two nodes, ranks that are missing, ranks that fail, and a launcher that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddprun import proc
from ddprun.checkpoint_files import newest_valid
from ddprun.reporting.metrics import read_rows
from tests.ddptrain.builders import PROGRESS, SMALL, node, place
from tests.ddptrain.runs import ForkServer, losses, wait_until
from tests.processes import free_port

pytestmark = pytest.mark.together


def test_two_nodes_train_together_and_rank_zero_serves_the_progress(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    port = free_port()
    command = ("train", *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path / "checkpoints", "--step-delay", 0.2)
    # Node 1 starts first and must wait for the master's port to open.
    one = ddptrain.start(*command, env=node(1, port))
    zero = ddptrain.start(*command, env=node(0, port))
    seen = [zero.at_step(step) for step in (2, 5, 9)]
    assert set(seen[0]) == PROGRESS | {"stall", "pause", "slow", "diverged", "agreedStep", "agreedCheckpoint"}
    numbers = [(report["seq"], report["step"]) for report in seen]  # a step may pass while nobody looks
    assert numbers == sorted(numbers)
    assert len({seq for seq, _ in numbers}) >= len({step for _, step in numbers})
    assert {report["worldSize"] for report in seen} == {4}
    assert (seen[0]["phase"], seen[0]["totalEpochs"], seen[0]["totalSteps"], seen[0]["data"]) == ("train", 2, 18, "idx")
    assert seen[0]["resumedFrom"] is None
    assert zero.wait() == 0, zero.output()
    assert one.wait() == 0, one.output()
    assert one.progress() is None
    messages = [zero.message(), one.message()]
    assert [message["rank"] for message in messages] == [0, 2]
    for message in messages:
        assert (message["outcome"], message["code"], message["resumedFrom"]) == ("succeeded", 0, None)
        assert message["checkpoint"] == place(1, 18)
        assert (message["progress"]["phase"], message["progress"]["step"]) == ("done", 18)
    assert messages[0]["accuracy"] == messages[1]["accuracy"] == messages[0]["progress"]["accuracy"]
    assert len(losses(tmp_path / "checkpoints")) == 18


@pytest.mark.soak
def test_a_node_whose_launcher_was_killed_is_named(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    port = free_port()
    command = ("train", *SMALL, "--data-dir", idx, "--step-delay", 0.3, "--checkpoint-dir", tmp_path)
    nodes = [ddptrain.start(*command, env=node(rank, port, nnodes=3, nproc=1)) for rank in (0, 1, 2)]
    nodes[0].at_step(2)
    os.killpg(nodes[1].pid, signal.SIGKILL)
    for run in (nodes[0], nodes[2]):
        assert run.wait() == 77, run.output()
        assert "no report of node 1: its launcher was killed" in run.message()["message"]
        assert "root cause: " not in run.output(), "a node that lost a peer is not the cause"
    why = ddptrain.run("--why", tmp_path, module="ddprun").output()
    assert why.count("no report of node 1") == 1


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_named_by_both_nodes(ddptrain: ForkServer, idx: Path, tmp_path: Path, victim: int) -> None:
    port = free_port()
    command = ("train", *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path, "--chaos", f"kill:{victim}:5")
    nodes = [ddptrain.start(*command, env=node(rank, port)) for rank in (0, 1)]
    codes = [run.wait() for run in nodes]
    guilty, innocent = (nodes[at].message() for at in (victim // 2, 1 - victim // 2))
    assert sorted(codes) == [77, 137], [run.output() for run in nodes]
    assert (guilty["code"], guilty["signal"], guilty["rank"], guilty["cause"]) == (137, 9, victim, "own")
    assert (guilty["step"], guilty["phase"]) == (5, "batch")
    assert (innocent["code"], innocent["cause"]) == (77, "peer")
    assert guilty["fenced"] is innocent["fenced"] is True, "no restart waits for the other node"
    assert f"the cause: rank {victim} failed with code 137" in innocent["message"]
    root = {"node": victim // 2, "code": 137, "kind": "Killed", "rank": victim, "step": 5, "signal": 9}
    assert root.items() <= innocent["root"].items()
    [last] = [line for line in nodes[1 - victim // 2].output().splitlines() if line.startswith("root cause: ")]
    assert last.startswith(f"root cause: rank {victim}, exit code 137: rank {victim} was killed by SIGKILL (on node ")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_that_exits_with_0_before_the_end_is_the_cause(ddptrain: ForkServer, idx: Path, world_size: int) -> None:
    command = ("launch", "--nproc-per-node", world_size, *SMALL, "--data-dir", idx)
    run = ddptrain.run(*command, "--chaos", f"exit:{world_size - 1}:5", code=1)
    message = run.message()
    assert (message["kind"], message["code"], message["cause"]) == ("ExitedEarly", 1, "own")
    assert (message["outcome"], message["rank"], message["step"]) == ("failed", world_size - 1, 5)


def test_a_killed_rank_is_named_although_a_stopped_one_delays_its_node(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    port = free_port()
    command = ("train", *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path, "--chaos", "stop:2:5")
    zero, one = (ddptrain.start(*command, env=node(rank, port)) for rank in (0, 1))
    wait_until(lambda: "chaos: stop" in one.output(), "rank 2 to be stopped, which delays the end of its node")
    os.kill(one.ranks()[1], signal.SIGKILL)
    assert zero.wait() == 77, zero.output()
    assert "the cause: rank 3 failed with code 137" in zero.message()["message"]
    assert one.wait() == 137, one.output()


def test_a_missing_rank_is_named_after_the_rendezvous_timeout(ddptrain: ForkServer, idx: Path) -> None:
    port = free_port()
    env = node(0, port, nnodes=3, nproc=1, PET_RDZV_CONF="timeout=8")
    patient = node(1, port, nnodes=3, nproc=1, PET_RDZV_CONF="timeout=60")
    one = ddptrain.start("train", *SMALL, "--data-dir", idx, env=patient)
    wait_until(one.ranks, "rank 1 to be started, so that only rank 2 is missing in time")
    zero = ddptrain.start("train", *SMALL, "--data-dir", idx, env=env)
    assert zero.wait() == 69, zero.output()
    assert one.wait() == 69, one.output()
    for run in (zero, one):
        message = run.message()
        assert "missing rank 2 (node 2) of 3 ranks" in message["message"]
        assert (message["code"], message["phase"]) == (69, "rendezvous")


def test_a_node_that_cannot_resolve_the_master_is_the_cause_and_both_nodes_say_what_they_wait_for(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    port = free_port()
    command = ("train", *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path)
    one, zero = (
        ddptrain.start(*command, env=node(rank, port, nproc=1, PET_RDZV_CONF="timeout=13", MASTER_ADDR=host))
        for rank, host in ((1, "rank-0.invalid"), (0, "localhost"))
    )
    assert [run.wait() for run in (zero, one)] == [69, 69]
    assert "waiting for rank 1 (node 1) of 2 ranks (1" in zero.output()
    assert "waiting for rank 0 (node 0) at rank-0.invalid" in one.output()
    assert (zero.message()["cause"], one.message()["cause"]) == ("peer", "own")
    assert "rank-0.invalid" in one.message()["message"]
    assert zero.message()["root"]["node"] == 1


def test_two_nodes_that_claim_one_rank_are_refused(ddptrain: ForkServer, idx: Path) -> None:
    port = free_port()
    zero, one = (node(rank, port, nnodes=3, nproc=1, PET_RDZV_CONF="timeout=20") for rank in (0, 1))
    ddptrain.start("train", *SMALL, "--data-dir", idx, env=zero)
    claimants = [ddptrain.start("train", *SMALL, "--data-dir", idx, env=one) for _ in range(2)]
    first = wait_until(
        lambda: next((claimant for claimant in claimants if claimant.ended), None), "one of the two to be refused"
    )
    assert first.wait() == 71, first.output()
    assert "two processes claim rank 1" in first.message()["message"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_during_the_rendezvous_ends_the_run_at_once(ddptrain: ForkServer, idx: Path, world_size: int) -> None:
    run = ddptrain.start("train", *SMALL, "--data-dir", idx, env=node(0, free_port(), nproc=world_size))
    wait_until(lambda: (run.progress() or {}).get("phase") == "rendezvous", "the rendezvous")
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75, run.output()
    assert run.message()["saved"] is False


def test_ranks_do_not_outlive_their_launcher(ddptrain: ForkServer, idx: Path) -> None:
    run = ddptrain.start("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, "--step-delay", 600)
    # During the delay they print nothing, which would end them, because nobody reads the pipe.
    run.at_step(1)
    ranks = run.ranks()
    os.kill(run.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    wait_until(lambda: not any(_runs(pid) for pid in ranks.values()), "the ranks to end")


IMPORTING = """
import os
from ddptrain.program import TrainerProgram
TrainerProgram.preload = lambda _: os.kill(os.getpid(), 15)
"""
FORKING = """
import os
fork = os.fork
def fork_and_signal():
    pid = fork()
    if pid:
        os.kill(pid, 15)
    return pid
os.fork = fork_and_signal
"""


@pytest.mark.parametrize("first", [IMPORTING, FORKING], ids=["launcher-imports-torch", "rank-just-forked"])
def test_sigterm_before_the_ranks_have_begun_is_not_lost(ddptrain: ForkServer, first: str) -> None:
    run = ddptrain.run("launch", "--nproc-per-node", 2, "--data", "digits", first=first, code=75)
    assert (run.message()["outcome"], run.message()["phase"]) == ("stopped", "start")
    assert "grace" not in run.message()["message"]
    assert first is FORKING or "[n0r" not in run.output(), "no rank is forked"


def test_the_launcher_starts_no_thread_because_it_forks(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    port = free_port()
    flags = ("train", *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path, "--chaos", "kill:2:0:data")
    zero = ddptrain.start(*flags, env=node(0, port))
    first = """
import os, threading
launcher, start = os.getpid(), threading.Thread.start
def checked(thread):
    if os.getpid() == launcher:
        print("a thread:", thread.name, flush=True)
    start(thread)
threading.Thread.start = checked
"""
    one = ddptrain.start(*flags, env=node(1, port), first=first)
    assert (zero.wait(), one.wait()) == (77, 137), zero.output() + one.output()
    assert "a thread:" not in one.output()


def test_sigterm_while_a_single_rank_imports_torch_stops_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = subprocess.Popen(
        [sys.executable, "-m", "ddptrain", "train", "--data", "digits"],
        env={"DDPJOB_TERMINATION_LOG": str(log), "PATH": "/usr/bin", "TMPDIR": str(tmp_path)},
    )
    try:
        wait_until(lambda: "libtorch" in Path(f"/proc/{run.pid}/maps").read_text(), "torch to be mapped")
        run.send_signal(signal.SIGTERM)
        assert run.wait(120) == 75
    finally:
        run.kill()
        run.wait()
    message = json.loads(log.read_text())
    assert (message["outcome"], message["saved"], message["phase"]) == ("stopped", False, "start")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_that_ignore_sigterm_are_killed_when_the_grace_ends(ddptrain: ForkServer, idx: Path) -> None:
    run = ddptrain.start(
        "launch", "--nproc-per-node", 2, "--stop-grace", 1, *SMALL, "--data-dir", idx, "--step-delay", 0.1
    )
    run.at_step(1)
    for pid in run.ranks().values():
        os.kill(pid, signal.SIGSTOP)
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait() == 75
    assert "no rank ended within the grace" in run.message()["message"]
    assert run.message()["saved"] is False


def test_weights_whose_evaluation_is_not_finite_are_not_saved(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    # The third loss is large but finite; only the evaluation finds the weights that its gradient produced.
    command = ("train", "--data", "idx", "--data-dir", idx, "--batch-size", 100, "--epochs", 2, "--checkpoint-dir")
    run = ddptrain.run(*command, tmp_path, "--optimizer", "sgd", "--lr", 1000, code=79)
    assert "test loss is" in run.message()["message"]
    assert not list(tmp_path.rglob("step-*"))


def test_a_checkpoint_whose_loss_is_not_finite_is_set_aside(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    command = ("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, "--optimizer", "sgd", "--lr", 900)
    run = ddptrain.run(*command, "--checkpoint-dir", tmp_path, "--checkpoint-every", 1, "--keep", 2, code=79)
    message = run.message()
    step = message["step"]  # completed steps; the next loss was not finite
    assert (message["code"], message["kind"], message["cause"]) == (79, "NotFinite", "own")
    assert message["next"].startswith("lower --lr") and "new --checkpoint-dir" in message["next"]
    assert [row["step"] for row in read_rows(tmp_path) if row["event"] == "not finite"] == [step + 1]
    folder = tmp_path / "run-000001"
    assert (folder / f"step-{step:09d}.json.not-finite").exists()
    assert not (folder / f"step-{step:09d}.pt").exists()
    assert message["checkpoint"] == place(1, step - 1)
    assert f"the checkpoint of these weights, step {step}, was renamed to *.not-finite" in message["message"]
    newest = newest_valid(tmp_path, lambda path, reason: None)
    assert newest is not None
    assert newest[0].step == step - 1


def test_missing_data_exits_with_66_and_the_other_ranks_name_that_rank(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    port = free_port()
    zero = ddptrain.start("train", *SMALL, "--data-dir", tmp_path, env=node(0, port, nproc=1))
    one = ddptrain.start("train", *SMALL, "--data-dir", idx, env=node(1, port, nproc=1))
    assert zero.wait() == 66, zero.output()
    assert zero.message()["phase"] == "data"
    assert one.wait() == 77, one.output()
    assert (one.message()["cause"], one.message()["phase"]) == ("peer", "data")
    assert "train-images-idx3-ubyte" in one.message()["message"]


def test_a_launcher_without_descriptors_reports_the_limit(ddptrain: ForkServer, idx: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))"
    run = ddptrain.run("launch", "--nproc-per-node", 8, *SMALL, "--data-dir", idx, first=limit, code=71)
    message = run.message()
    assert (message["kind"], message["cause"]) == ("RanksImpossible", "own")
    assert "cannot be started: Too many open files" in message["message"]
    assert "ulimit -n" in message["hint"]


NO_PROCESS = """
import errno, os, sys
fork, launcher, started = os.fork, os.getpid(), []
def limited():
    if os.getpid() == launcher and sys._getframe(1).f_code.co_name == "start":
        started.append(1)
        if len(started) > 1:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()
os.fork = limited
"""


def test_a_launcher_without_processes_fails_in_a_way_that_may_pass(ddptrain: ForkServer, idx: Path) -> None:
    run = ddptrain.run("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, first=NO_PROCESS, code=1)
    message = run.message()
    assert (message["cause"], message["rank"]) == ("own", None)
    assert "rank 1 cannot be started: Resource temporarily unavailable" in message["message"]


WITH_CHILD = """
import subprocess, ddptrain.worker as worker
load = worker.download.load
def loading(*args, **more):
    print("child", subprocess.Popen(["sleep", "600"]).pid, "of its rank", flush=True)
    return load(*args, **more)
worker.download.load = loading
"""


def test_programs_that_a_rank_has_started_end_with_it(ddptrain: ForkServer, idx: Path) -> None:
    argv = ("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, "--chaos", "kill:0:3")
    output = ddptrain.run(*argv, first=WITH_CHILD, code=137).output()
    children = [int(pid) for pid in re.findall(r"child (\d+) of its rank", output)]
    assert len(children) == 2
    wait_until(lambda: all(proc.state(pid) in ("", "Z") for pid in children), "the children to end")


def test_the_last_lines_of_a_launch_are_the_root_cause(ddptrain: ForkServer, idx: Path) -> None:
    command = ("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx)
    killed = ddptrain.run(*command, "--chaos", "kill:1:7", code=137).output().splitlines()
    assert killed[-4] == "root cause: rank 1, exit code 137: rank 1 was killed by SIGKILL"
    assert killed[-3] == "at:    step 7, phase batch, signal 9"
    assert [line[:7] for line in killed[-2:]] == ["hint:  ", "next:  "]
    crashed = ddptrain.run(*command, "--chaos", "crash:1:7", code=1).output().splitlines()
    assert crashed[-3] == "root cause: rank 1, exit code 1, RuntimeError: crash injected by --chaos"
    assert crashed[-2].startswith("at:    step 6, phase train, where trainer.py:")
    assert crashed[-1] == "next:  the traceback of rank 1 is in the output above"


@pytest.mark.parametrize("how", ["spawn", "auto"])
def test_a_torch_that_cannot_be_imported_is_reported(tmp_path: Path, how: str) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    log = tmp_path / "termination"
    done = subprocess.run(
        [sys.executable, "-m", "ddptrain", "launch", "--start", how, "--nproc-per-node", "2", "--data", "digits",
         "--log-dir", str(tmp_path / "logs")],
        timeout=120, check=False, capture_output=True, text=True,
        env={"DDPJOB_TERMINATION_LOG": str(log), "PATH": "/usr/bin", "TMPDIR": str(tmp_path),
             "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    message = json.loads(log.read_text())
    assert (message["code"], message["exception"], message["phase"]) == (1, "ImportError", "start")
    assert "libcudart.so.12" in message["message"]
    output = done.stdout + done.stderr
    assert "libcudart.so.12: cannot open shared object file" in output
    if how == "spawn":
        # The launcher may have killed the other one before its import.
        [rank] = re.findall(r"root cause: rank (\d)", output.splitlines()[-3])
        assert "libcudart.so.12" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()
