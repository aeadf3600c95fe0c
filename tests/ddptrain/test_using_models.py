"""Use of a trained model: the predictions that ``eval`` writes."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest

from ddprun.checkpoint_files import Checkpoints
from ddprun.files import write_result
from ddptrain.data import mnist
from tests.ddptrain.runs import ForkServer
from tests.ddptrain.synthetic import write_idx
from tests.metrics import effective_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data set with 2,100 test samples: nine chunks, the last one shorter."""
    return write_idx(tmp_path_factory.mktemp("using"), train=200, test=2100)


@pytest.fixture(scope="module")
def checkpoints(_server: ForkServer, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    command = ("--data", "idx", "--data-dir", data, "--batch-size", 32, "--epochs", 8)
    _server.run("launch", "--nproc-per-node", 2, *command, "--checkpoint-dir", folder)
    return folder


def test_eval_writes_the_predictions_that_it_counts_in_order_of_their_index(
    ddptrain: ForkServer, data: Path, checkpoints: Path, tmp_path: Path
) -> None:
    out = tmp_path / "predictions.csv"
    run = ddptrain.run("eval", "--data-dir", data, "--checkpoint-dir", checkpoints, "--out", out)
    evaluated = json.loads(run.output().splitlines()[-1])
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [int(row["index"]) for row in rows] == list(range(2100))
    labels = mnist.load("idx", str(data)).test_labels
    assert [int(row["label"]) for row in rows] == labels.tolist()
    assert sum(row["label"] == row["predicted"] for row in rows) == evaluated["correct"] > 1500
    [end] = effective_rows(checkpoints, "eval")[-1:]  # of the training, which two ranks have evaluated
    assert (end["accuracy"], end["samples"]) == (pytest.approx(evaluated["accuracy"]), 2100)


def test_eval_fails_if_it_cannot_write_the_predictions(ddptrain: ForkServer, data: Path, checkpoints: Path) -> None:
    run = ddptrain.run(
        "eval", "--data-dir", data, "--checkpoint-dir", checkpoints, "--out", "/dev/null/predictions.csv", code=73
    )
    assert "cannot write /dev/null/predictions.csv" in run.output()


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
