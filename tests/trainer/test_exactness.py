"""The number of ranks changes the speed, not the training."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ddptrain.checkpoint import newest_valid
from tests.trainer.runs import ForkServer, losses

# 37 divides nothing, and the last batch of each epoch has four samples: some ranks get none of it.
UNEVEN = ("--data", "idx", "--batch-size", 37, "--epochs", 2, "--keep", 99)


def train(ddptrain: ForkServer, world_size: int, idx: Path, out: Path, *more: object) -> dict[str, Any]:
    verb = ["train"] if world_size == 1 else ["launch", "--nproc-per-node", world_size]
    return ddptrain.run(*verb, *UNEVEN, "--data-dir", idx, "--checkpoint-dir", out, *more).message()


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", 0.1), ("adamw", 0.01)])
def test_in_double_precision_the_losses_equal_one_process_to_1e12(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, optimizer: str, rate: float
) -> None:
    accuracies = set()
    settings = ("--dtype", "float64", "--optimizer", optimizer, "--lr", rate, "--model", "cnn")
    for world_size in (1, 2, 3, 5):
        message = train(ddptrain, world_size, idx, tmp_path / str(world_size), *settings)
        accuracies.add((message["accuracy"], round(message["loss"], 10)))
    alone = dict(losses(tmp_path / "1"))
    assert len(alone) == 18
    assert min(alone.values()) < 0.9 * alone[1], "a training that learns nothing proves nothing"
    for world_size in (2, 3, 5):
        for step, loss in losses(tmp_path / str(world_size)):
            assert loss == pytest.approx(alone[step], rel=1e-12), f"world size {world_size}, step {step}"
    assert len(accuracies) == 1


def first_gradients(root: Path) -> torch.Tensor:
    """SGD's momentum after the first step is the first gradient."""
    found = newest_valid(root, lambda path, reason: None, step=1)
    assert found is not None
    state = torch.load(io.BytesIO(found[1]), weights_only=True)["optimizer"]["state"]
    return torch.cat([state[key]["momentum_buffer"].flatten() for key in sorted(state)])


def test_in_single_precision_the_first_gradients_equal_one_process_to_1e6(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    for world_size in (1, 4):
        out = tmp_path / str(world_size)
        settings = ("--optimizer", "sgd", "--weight-decay", 0, "--checkpoint-every", 1, "--epochs", 1)
        train(ddptrain, world_size, idx, out, *settings)
    alone, four = first_gradients(tmp_path / "1"), first_gradients(tmp_path / "4")
    assert alone.norm() > 0.01
    assert (alone - four).norm() / alone.norm() < 1e-6


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_checkpoint_evaluated_alone_has_the_accuracy_that_its_ranks_recorded(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, world_size: int
) -> None:
    message = train(ddptrain, world_size, idx, tmp_path)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    judged = ddptrain.run("eval", "--checkpoint-dir", tmp_path, "--data-dir", idx)
    verdict = json.loads(judged.output().splitlines()[-1])
    assert verdict["accuracy"] == round(message["accuracy"], 8)
    assert verdict["checkpoint"] == message["checkpoint"]
    assert before == sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")), "eval only reads"


def test_a_run_may_go_on_with_another_number_of_ranks(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    train(ddptrain, 1, idx, tmp_path / "alone", "--dtype", "float64")
    alone = dict(losses(tmp_path / "alone"))
    changing = tmp_path / "changing"
    run = ddptrain.start(
        "launch", "--nproc-per-node", 3, *UNEVEN, "--data-dir", idx, "--checkpoint-dir", changing,
        "--dtype", "float64", "--step-delay", 0.1, "--checkpoint-every", 2,
    )  # fmt: skip
    run.at_step(6)
    run.stop()
    assert run.wait() == 75
    message = train(ddptrain, 2, idx, changing, "--dtype", "float64")
    assert message["resumedFrom"]["step"] >= 6
    for step, loss in losses(changing):
        assert loss == pytest.approx(alone[step], rel=1e-10)
