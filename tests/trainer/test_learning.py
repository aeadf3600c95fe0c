"""Accuracy after a few epochs, on the bundled digits and, if present, on the real MNIST."""

from __future__ import annotations

import json
from pathlib import Path

from ddprun.reporting.metrics import effective_rows
from tests.trainer.builders import REAL, needs_mnist
from tests.trainer.runs import ForkServer


def test_two_epochs_of_the_digits_reach_85_percent(ddptrain: ForkServer, tmp_path: Path) -> None:
    command = ("launch", "--nproc-per-node", 2, "--data", "digits", "--epochs", 2)
    message = ddptrain.run(*command, "--checkpoint-dir", tmp_path).message()
    assert message["accuracy"] >= 0.85


@needs_mnist
def test_an_epoch_of_mnist_reaches_98_5_percent_and_eval_agrees(ddptrain: ForkServer, tmp_path: Path) -> None:
    command = ("launch", "--nproc-per-node", 2, "--data-dir", REAL, "--epochs", 1, "--checkpoint-dir", tmp_path)
    message = ddptrain.run(*command).message()
    assert message["accuracy"] >= 0.985
    [evaluation] = effective_rows(tmp_path, "eval")
    assert evaluation["accuracy"] == message["accuracy"]
    evaluated = ddptrain.run("eval", "--checkpoint-dir", tmp_path, "--data-dir", REAL)
    assert json.loads(evaluated.output().splitlines()[-1])["accuracy"] == message["accuracy"]
