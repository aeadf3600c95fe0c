"""Use of a trained model: the same predictions from any number of ranks and from an exported program."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from ddprun.checkpoint_files import Checkpoints
from ddprun.files import write_result
from ddptrain.data import mnist
from tests.ddptrain.runs import ForkServer, Run
from tests.ddptrain.synthetic import write_idx
from tests.processes import free_port


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set with 2,100 test samples: nine chunks, the last one shorter."""
    return write_idx(tmp_path_factory.mktemp("using"), train=200, test=2100)


@pytest.fixture(scope="module")
def checkpoints(_server: ForkServer, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    command = ("train", "--data", "idx", "--data-dir", data, "--batch-size", 32, "--epochs", 8)
    _server.run(*command, "--checkpoint-dir", folder)
    return folder


def infer(ddptrain: ForkServer, world_size: int, data: Path, checkpoints: Path, out: Path, *, code: int = 0) -> Run:
    """Run each rank as a process with torchrun's variables; only rank 0 sees the checkpoints."""
    port = free_port()
    runs = []
    for rank in range(world_size):
        env: dict[str, object] = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
        source = checkpoints if rank == 0 else checkpoints / "not-mounted-here"
        argv = ("infer", "--data-dir", data, "--checkpoint-dir", source, "--out", out)
        runs.append(ddptrain.start(*argv, env=env))
    assert [run.wait() for run in runs] == [code] + [77 if code else 0] * (world_size - 1), runs[0].output()
    return runs[0]


def test_infer_writes_the_same_file_in_index_order_with_1_2_and_5_ranks(
    ddptrain: ForkServer, data: Path, checkpoints: Path, tmp_path: Path
) -> None:
    files = {}
    for world_size in (1, 2, 5):  # of nine chunks
        out = tmp_path / f"{world_size}.csv"
        infer(ddptrain, world_size, data, checkpoints, out)
        files[world_size] = out.read_bytes()
    assert len(set(files.values())) == 1
    rows = list(csv.DictReader(files[1].decode().splitlines()))
    assert [int(row["index"]) for row in rows] == list(range(2100))
    labels = mnist.load("idx", str(data)).test_labels
    assert [int(row["label"]) for row in rows] == labels.tolist()
    evaluated = json.loads(
        ddptrain.run("eval", "--checkpoint-dir", checkpoints, "--data-dir", data).output().splitlines()[-1]
    )
    assert sum(row["label"] == row["predicted"] for row in rows) == evaluated["correct"] > 1500


@pytest.mark.parametrize(("action", "code"), [("kill", -9), ("crash", 1)])
def test_infer_reports_a_rank_lost_during_inference(
    ddptrain: ForkServer, data: Path, checkpoints: Path, tmp_path: Path, *, action: str, code: int
) -> None:
    port, runs = free_port(), []
    out = tmp_path / "predictions.csv"
    for rank in (0, 1):
        env: dict[str, object] = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_PORT": port}
        argv = ("infer", "--data-dir", data, "--checkpoint-dir", checkpoints, "--out", out)
        runs.append(ddptrain.start(*argv, env={**env, "DDPTRAIN_CHAOS": f"{action}:1:0:infer"}))
    assert [run.wait() for run in runs] == [77, code], runs[0].output() + runs[1].output()
    message = runs[0].message()
    assert (message["code"], message["cause"], message["exception"]) == (77, "peer", "PeerLost")
    assert "Traceback" not in runs[0].output()
    assert not out.exists()


def test_every_rank_exits_if_infer_cannot_write_its_output(ddptrain: ForkServer, data: Path, checkpoints: Path) -> None:
    run = infer(ddptrain, 2, data, checkpoints, Path("/dev/null/predictions.csv"), code=73)
    assert "cannot write /dev/null/predictions.csv" in run.output()


def test_infer_in_several_pods_without_torchrun_is_refused(ddptrain: ForkServer, tmp_path: Path) -> None:
    env: dict[str, object] = {"NNODES": 2, "NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    run = ddptrain.run("infer", "--out", tmp_path / "x.csv", env=env, code=2)
    assert "torchrun" in run.output()


def test_result_written_to_a_pipe_or_link_does_not_replace_it(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_result(pipe, b"result")
    assert os.read(reader, 99) == b"result"
    os.close(reader)
    assert pipe.is_fifo()
    link.symlink_to(target)
    write_result(link, b"result")
    assert (link.is_symlink(), target.read_bytes()) == (True, b"result")


def test_a_checkpoint_of_another_program_is_refused(ddptrain: ForkServer, tmp_path: Path) -> None:
    writer = Checkpoints(tmp_path, keep=1)
    writer.claim({})
    writer.save(1, b"of a script", {"worldSize": 1})
    run = ddptrain.run("eval", "--checkpoint-dir", tmp_path, code=78)
    assert "is not a checkpoint of ddptrain: its manifest has no valid config, dataDigest" in run.output()
