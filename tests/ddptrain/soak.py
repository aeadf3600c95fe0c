"""Tests that take too long for every run; `make soak` runs them.

Each repeats, with more ranks, steps or samples, what a test in this folder checks in seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ddptrain.runs import ForkServer
from tests.ddptrain.test_compare import check_losses, compare
from tests.ddptrain.test_exactness import check_evaluations


@pytest.mark.parametrize(("worlds", "ways"), [((2,), ("ddp", "manual", "bucketed", "accum", "zero")), ((3,), ("ddp",))])
def test_losses_of_108_steps_equal_one_process(
    ddptrain: ForkServer, idx: Path, worlds: tuple[int, ...], ways: tuple[str, ...]
) -> None:
    check_losses(ddptrain, idx, 108, worlds, ways)


def test_bitwise_gives_one_digest_after_108_steps(ddptrain: ForkServer, idx: Path) -> None:
    found = compare(ddptrain, idx, "--worlds", "1,2,3,4", "--checks", "bits")
    assert len({proof["measured"] for proof in found["weights' SHA-256, bitwise"]}) == 1


def test_ten_thousand_test_samples_are_evaluated_once_at_7_ranks(ddptrain: ForkServer, tmp_path: Path) -> None:
    check_evaluations(ddptrain, tmp_path, 10_000, (1, 2, 3, 7))


def test_torchrun_starts_a_training(ddptrain: ForkServer, idx: Path) -> None:
    train = ("-m", "ddptrain", "train", "--data", "idx", "--data-dir", idx, "--batch-size", 37)
    run = ddptrain.run("--standalone", "--nproc-per-node", 2, *train, module="torch.distributed.run")
    assert "2 rank(s)" in run.output()
    assert run.message()["outcome"] == "succeeded"
