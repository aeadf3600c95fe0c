"""The result of a training does not depend on the number of ranks; test_gradient_sync.py has single steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ddprun.checkpoint_files import manifests
from ddprun.errors import RanksError
from ddptrain.config import Config
from ddptrain.device import has_bf16, uses_bf16
from tests.ddptrain.builders import SMALL, verb
from tests.ddptrain.runs import ForkServer, Whole, assert_same_end, losses
from tests.ddptrain.synthetic import write_idx

# 37 is not divisible by any number of ranks; the last batch of an epoch has four samples, so some ranks have none.
UNEVEN = (*SMALL, "--keep", 99)


def train(ddptrain: ForkServer, world_size: int, idx: Path, out: Path, *more: object, code: int = 0) -> dict[str, Any]:
    argv = (*verb(world_size), *UNEVEN, "--data-dir", idx, "--checkpoint-dir", out, *more)
    return ddptrain.run(*argv, code=code).message()


RECIPES: dict[str, tuple[object, ...]] = {
    "muon": ("--optimizer", "muon", "--lr", 0.006),
    "adamw": ("--optimizer", "adamw", "--lr", 0.006),
    "sgd": ("--optimizer", "sgd", "--lr", 0.05),
}
WAYS: dict[str, tuple[object, ...]] = {
    "ddp": ("--sync", "ddp"),
    "manual": ("--sync", "manual"),
    "accum": ("--sync", "ddp", "--accum", 3),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("epochs", [3, pytest.param(12, marks=pytest.mark.soak)])
def test_losses_in_float64_equal_one_process(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, recipe: str, epochs: int
) -> None:
    ways = ("ddp",) if epochs == 3 else WAYS  # test_gradient_sync.py has the gradients of all ways
    flags = ("--epochs", epochs, "--dtype", "float64", *RECIPES[recipe])
    train(ddptrain, 1, idx, tmp_path / "alone", *flags)
    alone = dict(losses(tmp_path / "alone"))
    assert len(alone) == 9 * epochs and min(alone.values()) < 0.9 * alone[1], "without learning, equality says nothing"
    for way in ways:
        train(ddptrain, 2, idx, tmp_path / way, *flags, *WAYS[way])
        assert dict(losses(tmp_path / way)) == pytest.approx(alone, rel=0, abs=1e-12), way


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_eval_in_one_process_gives_the_accuracy_that_the_ranks_recorded(
    ddptrain: ForkServer, idx: Path, whole: Whole, world_size: int
) -> None:
    folder, message = whole(world_size)
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    evaluated = ddptrain.run("eval", "--checkpoint-dir", folder, "--data-dir", idx)
    verdict = json.loads(evaluated.output().splitlines()[-1])
    assert verdict["accuracy"] == round(message["accuracy"], 8)
    assert verdict["checkpoint"] == message["checkpoint"]
    assert before == sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")), "eval only reads"


def test_run_resumes_with_another_number_of_ranks(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("samples", "worlds"),
    [
        (1_900, (1, 2, 3)),  # the last chunk is not full
        pytest.param(10_000, (1, 2, 3, 7), marks=pytest.mark.soak),
    ],
)
def test_every_test_sample_is_evaluated_once_at_any_number_of_ranks(
    ddptrain: ForkServer, tmp_path: Path, samples: int, worlds: tuple[int, ...]
) -> None:
    data = write_idx(tmp_path / "idx", train=64, test=samples, zipped=False)
    results = set()
    for world_size in worlds:  # evaluate() asserts that the ranks see each sample once
        message = ddptrain.run(
            "launch", "--nproc-per-node", world_size, "--data", "idx", "--data-dir", data, "--model", "mlp",
            "--epochs", 1, "--sync", "bitwise",
        ).message()  # fmt: skip
        results.add((message["accuracy"], message["loss"]))
    assert len(results) == 1, "the same weights give the same sums to the last bit"


def test_test_sample_evaluated_twice_fails_the_run(ddptrain: ForkServer, idx: Path) -> None:
    argv = ("launch", "--nproc-per-node", 2, "--data", "idx", "--data-dir", idx)
    run = ddptrain.run(*argv, code=1, mutant="padding_counted_in_evaluation")
    assert "70 of 70 samples were not evaluated exactly once" in run.output()


def test_bitwise_gives_the_same_weights_with_1_rank_and_through_3_2_and_3_ranks(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    bitwise = ("--sync", "bitwise")
    train(ddptrain, 1, idx, tmp_path / "whole", *bitwise)
    for world_size, end in ((3, ("--stop-after", 4)), (2, ("--stop-after", 9)), (3, ())):
        train(ddptrain, world_size, idx, tmp_path / "resized", *bitwise, *end, code=75 if end else 0)
    assert_same_end(tmp_path / "whole", tmp_path / "resized")


def test_bitwise_refuses_to_resume_with_another_number_of_threads(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    train(ddptrain, 2, idx, tmp_path / "whole", "--sync", "bitwise")
    cut = ("train", *UNEVEN, "--data-dir", idx, "--checkpoint-dir", tmp_path / "cut", "--sync", "bitwise")
    ddptrain.run(*cut, "--stop-after", 5, code=75)
    refused = ddptrain.run(*cut, "--threads", 2, code=78)
    assert "threads was 1, is 2" in refused.message()["message"]
    ddptrain.run(*cut)
    assert_same_end(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("sync", ["ddp", "manual", "bucketed", "bitwise"])
def test_rank_with_different_initial_weights_is_named(ddptrain: ForkServer, idx: Path, sync: str) -> None:
    command = ("launch", "--nproc-per-node", 3, *UNEVEN, "--data-dir", idx, "--sync", sync)
    run = ddptrain.run(*command, code=78, mutant="rank_1_draws_other_weights")
    assert "rank(s) 1 have different initial weights from rank 0" in run.message()["message"]


def test_bfloat16_is_used_and_recorded_if_the_processor_has_it(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    for wanted, used in (("auto", has_bf16()), ("off", False)):
        out = tmp_path / wanted
        argv = ("train", *UNEVEN, "--data-dir", idx, "--checkpoint-dir", out, "--bf16", wanted, "--stop-after", 1)
        run = ddptrain.run(*argv, code=75)
        assert (", bfloat16;" in run.output()) is used
        assert {json.loads(path.read_text())["bf16"] for _, path in manifests(out, 1)} == {used}
    run = ddptrain.run("train", *UNEVEN, "--data-dir", idx, "--bf16", "on", "--dtype", "float64", code=71)
    assert "--bf16 on cannot be combined with --dtype float64" in run.output()


def test_no_rank_uses_bfloat16_if_one_cannot(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    command = (*UNEVEN, "--data-dir", idx, "--stop-after", 1, "--checkpoint-dir")
    for nproc, used in ((1, True), (2, False)):
        argv = ("launch", "--nproc-per-node", nproc, *command, tmp_path / str(nproc))
        run = ddptrain.run(*argv, code=75, mutant="bfloat16_on_rank_0_only")
        assert (", bfloat16;" in run.output()) is used


def test_bfloat16_is_refused_on_a_processor_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True})
    cpu = torch.device("cpu")
    assert not uses_bf16(Config(), cpu)
    with pytest.raises(RanksError, match="needs a CPU with AVX512_BF16 or AMX"):
        uses_bf16(Config(bf16="on"), cpu)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert uses_bf16(Config(), cpu)


@pytest.mark.parametrize("sync", ["ddp", "manual", "bucketed"])
def test_a_backend_by_name_forms_a_process_group_for_one_rank(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole, sync: str
) -> None:
    command = ("train", *UNEVEN, "--data-dir", idx, "--checkpoint-dir", tmp_path, "--sync", sync)
    run = ddptrain.run(*command, "--backend", "gloo", "--chaos", "slow:0:1:destroy_process_group")
    assert "chaos: slow in phase destroy_process_group" in run.output(), "there was a group to destroy"
    assert_same_end(whole(1).folder, tmp_path)  # whatever --sync is: a single rank has nothing to exchange


def test_one_rank_with_deterministic_algorithms_trains(
    ddptrain: ForkServer, idx: Path, tmp_path: Path, whole: Whole
) -> None:
    train(ddptrain, 1, idx, tmp_path, "--deterministic")
    assert_same_end(whole(1).folder, tmp_path)
