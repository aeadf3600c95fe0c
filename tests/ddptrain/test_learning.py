"""Accuracy after an epoch on the real MNIST, if present; test_examples.py checks that on the bundled digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ddptrain.builders import REAL, needs_mnist
from tests.ddptrain.runs import ForkServer
from tests.metrics import effective_rows


@pytest.mark.soak
@needs_mnist
def test_an_epoch_of_mnist_reaches_98_5_percent_and_eval_agrees(ddptrain: ForkServer, tmp_path: Path) -> None:
    command = ("launch", "--nproc-per-node", 2, "--data-dir", REAL, "--epochs", 1, "--checkpoint-dir", tmp_path)
    message = ddptrain.run(*command).message()
    assert message["accuracy"] >= 0.985
    [evaluation] = effective_rows(tmp_path, "eval")
    assert evaluation["accuracy"] == message["accuracy"]
    evaluated = ddptrain.run("eval", "--checkpoint-dir", tmp_path, "--data-dir", REAL)
    assert json.loads(evaluated.output().splitlines()[-1])["accuracy"] == message["accuracy"]
