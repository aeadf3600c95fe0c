"""Every way to start the ranks trains the same model; a start that cannot work fails within seconds."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ddptrain.builders import SAVING, SMALL, command, node, place
from tests.ddptrain.runs import ForkServer, Whole, assert_same_end, wait_until
from tests.ddptrain.synthetic import write_idx
from tests.processes import free_port

pytestmark = pytest.mark.together


def by_hand(idx: Path, checkpoints: Path, init: str, rank: int, world_size: int) -> list[object]:
    place = ("--init", init, "--rank", rank, "--world-size", world_size)
    return ["train", *SMALL, "--data-dir", idx, "--checkpoint-dir", checkpoints, *place]


@pytest.mark.parametrize("scheme", ["tcp", *(pytest.param(s, marks=pytest.mark.soak) for s in ("file", "env"))])
def test_ranks_started_by_hand_train_like_launched_ones(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole, scheme: str
) -> None:
    port = free_port()
    init = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path / 'meet'}", "env": "env"}[scheme]
    env: dict[str, object] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if scheme == "env" else {}
    ranks = [ddptrain.start(*by_hand(idx, tmp_path / "hand", init, rank, 3), env=env) for rank in (2, 1, 0)]
    for run in ranks:
        assert run.wait() == 0, run.output()
    assert_same_end(whole(3).folder, tmp_path / "hand")


@pytest.mark.soak
def test_ranks_with_the_argument_of_torch_distributed_launch_train_the_same(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole
) -> None:
    env = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    argv = ["train", *command(2, idx, tmp_path / "launch")[3:]]
    given = (["--local-rank=0", *argv], [*argv, "--local_rank=1"])  # before the verb, as that launcher puts it
    runs = [ddptrain.start(*words, env=env | {"RANK": rank, "LOCAL_RANK": rank}) for rank, words in enumerate(given)]
    assert [run.wait() for run in runs] == [0, 0], runs[0].output() + runs[1].output()
    assert_same_end(whole(2, *SAVING).folder, tmp_path / "launch")


def test_two_jobs_on_one_machine_take_ports_of_their_own(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole
) -> None:
    runs = [ddptrain.start(*command(2, idx, tmp_path / name)) for name in ("one", "other")]
    assert [run.wait() for run in runs] == [0, 0], runs[0].output() + runs[1].output()
    for name in ("one", "other"):
        assert_same_end(whole(2, *SAVING).folder, tmp_path / name)


def test_a_rank_of_another_job_with_the_same_port_does_not_join(ddptrain: ForkServer, idx: Path) -> None:
    port, short = free_port(), {"PET_RDZV_CONF": "timeout=2"}
    envs = [node(rank, port, nproc=1) | short | {"DDPJOB_UID": uid} for rank, uid in enumerate(("job-a", "job-b"))]
    zero, one = (ddptrain.start("train", *SMALL, "--data-dir", idx, env=env) for env in envs)
    assert (zero.wait(), one.wait() in (69, 77)) == (69, True), zero.output() + one.output()
    assert "missing rank 1 (node 1) of 2 ranks" in zero.message()["message"]


def test_a_rendezvous_file_of_an_earlier_run_is_refused(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    file = tmp_path / "meet"
    first = ddptrain.start(*by_hand(idx, tmp_path, f"file://{file}", 0, 2))
    wait_until(lambda: file.exists() and b"present/0" in file.read_bytes(), "rank 0 to register")
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = ddptrain.run(*by_hand(idx, tmp_path, f"file://{file}", 0, 2), code=71)
    assert f"{file} is left from an earlier run" in second.output()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--init", "tcp://127.0.0.1:29500"), "without --rank"),
        (("--init", "http://x:1", "--rank", 0, "--world-size", 2), "is none of env, tcp://HOST:PORT"),
        (("--init", "file://relative", "--rank", 0, "--world-size", 2), "a file's path is absolute"),
    ],
)
def test_an_impossible_rank_or_rendezvous_is_refused(ddptrain: ForkServer, argv: tuple[object, ...], said: str) -> None:
    assert said in ddptrain.run("train", *argv, code=2).output()


def test_a_rendezvous_file_in_a_missing_directory_is_refused(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    run = ddptrain.run(*by_hand(idx, tmp_path, f"file://{tmp_path}/absent/meet", 0, 2), code=69)
    assert "No such file or directory" in run.message()["message"]


def test_a_port_in_use_is_named(ddptrain: ForkServer, idx: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        env = node(0, port, nproc=1)
        run = ddptrain.run("train", *SMALL, "--data-dir", idx, env=env, code=69)
    assert f"rank 0 cannot listen on port {port}" in run.message()["message"]


@pytest.mark.soak
def test_spawned_ranks_train_like_forked_ones_and_write_their_logs(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole
) -> None:
    more = ("--start", "spawn", "--log-dir", tmp_path / "logs")
    run = ddptrain.run(*command(2, idx, tmp_path / "spawned", *more))
    assert_same_end(whole(2, *SAVING).folder, tmp_path / "spawned")
    assert "[n0r0] finished: test accuracy" in run.output()
    logged = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
    assert [f"[n0r0] {line}" for line in logged] == run.output().splitlines()


@pytest.mark.soak
def test_torchrun_trains_the_same_model(idx: Path, tmp_path: Path, whole: Whole) -> None:
    argv = map(str, command(1, idx, tmp_path / "torchrun"))
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, "-m", "ddptrain", *argv],
        capture_output=True, text=True, timeout=300, check=False,
        env={"PATH": "/usr/bin", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_end(whole(2, *SAVING).folder, tmp_path / "torchrun")


def test_max_restarts_starts_the_ranks_again_and_they_resume(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole
) -> None:
    env = {"DDPJOB_INPLACE_RESTARTS": 5}  # of the operator: the user's number is used in place of it
    run = ddptrain.run(*command(2, idx, tmp_path / "cut", "--max-restarts", 1, "--chaos", "kill:1:11"), env=env)
    lines = run.output().splitlines()
    assert any(line.startswith("restart in place 1 of 1: node 0: rank 1 was killed by SIGKILL") for line in lines)
    assert run.message()["resumedFrom"] == place(1, 9)
    assert_same_end(whole(2, *SAVING).folder, tmp_path / "cut")


def test_a_node_that_received_sigterm_is_not_restarted(ddptrain: ForkServer, idx: Path) -> None:
    argv = ("--max-restarts", 1, "--stop-grace", 60, "--chaos", "hang:1:3")
    run = ddptrain.start("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, *argv)
    wait_until(lambda: "chaos: hang" in run.output(), "rank 1 to block")
    run.stop()
    os.kill(run.ranks()[1], signal.SIGKILL)
    assert run.wait() == 137, run.output()
    assert "restart in place 1 of 1" not in run.output()


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (([], ["--lr", 0.5]), "lr 0.006 → 0.5"),
        (([], ["--data-dir", "OTHER"]), "data "),
        (([], ["--checkpoint-every", 3]), "checkpoint_every 50 → 3"),
    ],
)
def test_a_rank_with_settings_other_than_rank_0_is_refused(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, flags: tuple[list[object], list[object]], difference: str
) -> None:
    init = f"tcp://127.0.0.1:{free_port()}"
    (common, own), other = flags, write_idx(tmp_path / "other", seed=1)
    zero = ddptrain.start(*by_hand(idx, tmp_path, init, 0, 2), *common)
    own = [other if flag == "OTHER" else flag for flag in own]
    one = ddptrain.start(*by_hand(idx, tmp_path, init, 1, 2), *common, *own)
    assert (one.wait(), zero.wait()) == (78, 77), one.output() + zero.output()
    assert f"rank 1 has different settings from rank 0: {difference}" in one.message()["message"]


def test_an_unwritable_log_file_is_refused_before_that_rank_starts(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    (tmp_path / "rank-1.log").mkdir()
    argv = ("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, "--log-dir", tmp_path)
    run = ddptrain.run(*argv, code=2)
    assert "rank-1.log cannot be written: Is a directory" in run.message()["message"]


def test_max_restarts_on_one_of_several_nodes_is_refused(ddptrain: ForkServer, idx: Path) -> None:
    run = ddptrain.run("launch", "--max-restarts", 1, *SMALL, "--data-dir", idx, env=node(0, free_port()), code=2)
    assert "--max-restarts 1 on one of 2 nodes" in run.output()
