"""Common errors of data-parallel programs, injected into the trainer to check that the tests detect them.

The fork server applies one by name before the command starts; processes forked by the command inherit it.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ddptrain import device
from ddptrain.config import Config
from ddptrain.data import batches
from ddptrain.data import sampling as order
from ddptrain.lessons import run
from ddptrain.training import evaluate, models
from ddptrain.training import gradient_sync as sync
from tests.mutants.mutant import Mutant, areas


def weighting_dropped() -> None:
    """Average the mean losses of the ranks' shares, without weighting them."""
    counted: dict[int, int] = {}
    original = sync.GradientSync._loss_sum

    def loss_sum(self: sync.GradientSync, piece: batches.Piece) -> torch.Tensor:
        counted[id(self)] = len(piece.labels)
        return original(self, piece)

    def backward(self: sync.GradientSync, loss: torch.Tensor, global_count: int) -> None:
        own_count = max(1, counted[id(self)])
        share = own_count if self._group.world_size > 1 else global_count
        (loss / share * self.averaged_over / max(1, self._group.world_size)).backward()  # type: ignore[no-untyped-call]

    sync.GradientSync._loss_sum = loss_sum  # type: ignore[method-assign]
    sync.GradientSync._backward = backward  # type: ignore[method-assign]


def divided_twice() -> None:
    """Divide the averaged gradients by the number of ranks again."""

    def backward(self: sync.GradientSync, loss: torch.Tensor, global_count: int) -> None:
        (loss / global_count).backward()  # type: ignore[no-untyped-call]

    sync.GradientSync._backward = backward  # type: ignore[method-assign]


def same_order_every_epoch() -> None:
    """Use the order of epoch 0 in every epoch, as a DistributedSampler without set_epoch."""
    original = order.epoch_order
    batches.epoch_order = lambda samples, seed, _epoch: original(samples, seed, 0)


def padding_counted_in_training() -> None:
    """Repeat samples until the batch is divisible by the ranks, as a DistributedSampler does."""
    original = order.micro_shards

    def padded(count: int, rank: int, world_size: int, accum: int) -> list[slice]:
        each = -(-count // world_size)
        first = min(rank * each, count - each)
        return original(each, 0, 1, accum) if world_size == 1 else [slice(first, first + each)]

    sync.micro_shards = padded


def padding_counted_in_evaluation() -> None:
    """Evaluate the last chunk again, so that all ranks have the same number of chunks."""
    original = evaluate.chunks_of

    def padded(samples: int, rank: int, world_size: int) -> list[tuple[int, int]]:
        parts = [original(samples, r, world_size) for r in range(world_size)]
        longest = max(map(len, parts))
        last = parts[-1][-1]
        return parts[rank] + [last] * (longest - len(parts[rank]))

    evaluate.chunks_of = padded


def accuracy_counts_one_sample_too_many() -> None:
    """Report one more correct sample than there are, at any number of ranks."""
    original = evaluate.Evaluation

    def counted(correct: int, samples: int, loss_sum: float) -> evaluate.Evaluation:
        return original(correct + 1, samples, loss_sum)

    evaluate.Evaluation = counted  # type: ignore[assignment, misc]


def rank_1_draws_other_weights() -> None:
    """Draw other weights on rank 1, as a node with another image might."""
    original = models.build

    def build(config: Config, device: torch.device) -> torch.nn.Module:
        seed = config.seed + (os.environ.get("RANK") == "1")
        return original(dataclasses.replace(config, seed=seed), device)

    models.build = build


def bfloat16_on_rank_0_only() -> None:
    """Let only rank 0 have a processor with instructions for bfloat16."""
    device.has_bf16 = lambda: os.environ.get("RANK") == "0"


def broadcast_garbled_on_rank_1() -> None:
    """Change what rank 1 receives in a broadcast, as a defective network or driver would."""
    original = dist.broadcast

    def garbled(tensor: torch.Tensor, src: int) -> None:
        original(tensor, src=src)
        tensor += os.environ.get("RANK") == "1"

    dist.broadcast = garbled


def edited(lesson: str, mutant: Mutant) -> Callable[[], None]:
    """Return a function that lets ``ddptrain lesson`` run a copy of the script with a mutant applied."""

    def load() -> None:
        script, copies = run.SCRIPTS / f"{lesson}.py", Path(tempfile.mkdtemp())
        (copies / script.name).write_text(mutant.apply_to(script.read_text()))
        run.SCRIPTS = copies

    return load


def title(mutant: Mutant) -> str:
    """Return a lesson's mutant as ``lesson: error``."""
    lesson = Path(mutant.file).stem
    return f"{lesson}: {mutant.name.removeprefix(lesson).strip('-').replace('-', ' ')}"


LESSONS = {
    title(mutant): edited(Path(mutant.file).stem, mutant) for mutant in areas()["lessons"] if not mutant.survives
}


MUTANTS: dict[str, Callable[[], None]] = LESSONS | {
    mutant.__name__: mutant
    for mutant in (
        weighting_dropped,
        divided_twice,
        same_order_every_epoch,
        padding_counted_in_training,
        padding_counted_in_evaluation,
        accuracy_counts_one_sample_too_many,
        rank_1_draws_other_weights,
        bfloat16_on_rank_0_only,
        broadcast_garbled_on_rank_1,
    )
}
