"""How the gradients of the ranks' shares become the gradient of the global batch, on every rank.

Four ways, one result: ``manual`` here, ``ddp``, ``bucketed`` and ``bitwise`` in modules of their own. ``train`` builds
one of them and calls ``step`` for each global batch.

A rank's loss is the sum over its samples times ``averaged over / global count``. Whatever the sizes of the shares, the
average (or, with ``averaged over`` 1, the sum) of these gradients is the gradient of the global batch's mean loss; a
mean per rank, averaged again, is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ddptrain.batches import GlobalBatch, Piece
from ddptrain.order import micro_shards

if TYPE_CHECKING:
    from ddptrain.config import Config
    from ddptrain.group import Group


class StepNumbers:
    """The global batch's loss, and whether any rank wants to stop: one small all-reduce beside the backward pass."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._values = torch.zeros(2, dtype=torch.float64, device=group.device)
        self._work: dist.Work | None = None

    def send(self, loss_sum: torch.Tensor, stop: bool) -> None:
        """Start summing this rank's loss sum and stop flag; all ranks must call it at the same place."""
        self._values[0] = loss_sum.detach()
        self._values[1] = float(stop)
        if self._group.world_size > 1:
            self._work = dist.all_reduce(self._values, async_op=True)

    def receive(self) -> tuple[float, bool]:
        """(sum of the losses, does anyone want to stop), the same on every rank."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        loss, stop = self._values.tolist()
        return loss, stop > 0


class GradientSync:
    """Base of the four: accumulates the gradients of this rank's micro-batches, then has them exchanged.

    Args:
        model: the bare model, whose ``.grad`` are complete when ``step`` returns.
        accum: micro-batches that this rank's share of a global batch is cut into, to save memory.
    """

    averaged_over = 1  # the exchange sums

    def __init__(self, model: nn.Module, group: Group, *, accum: int = 1, bf16: bool = False) -> None:
        self.model, self._group, self._accum, self._bf16 = model, group, accum, bf16
        self._forward: Callable[[torch.Tensor], torch.Tensor] = model
        self._numbers = StepNumbers(group)

    def step(self, batch: GlobalBatch, stop: bool) -> tuple[float, bool]:
        """Leave the global batch's mean gradient in ``.grad``.

        Args:
            stop: whether this rank wants to stop.
        Returns:
            (sum of the losses over the global batch, does any rank want to stop), the same on every rank.
        """
        parts = micro_shards(batch.count, self._group.rank, self._group.world_size, self._accum)
        earlier: list[torch.Tensor] = []
        for part in parts[:-1]:
            self._group.crumbs.touch()  # a long step of many parts is no hang
            with self._unsynced():
                loss_sum = self._loss_sum(batch.piece(part))
                earlier.append(loss_sum.detach().double())
                self._backward(loss_sum, batch.count)
        self._before_last()
        loss_sum = self._loss_sum(batch.piece(parts[-1]))
        total = sum(earlier, start=loss_sum.detach().double())
        self._numbers.send(total, stop)  # first, to travel while the backward pass computes
        with self._group.crumbs.waiting_in("all_reduce of gradients"):  # the backward pass overlaps it
            self._backward(loss_sum, batch.count)
            self._exchange()
            return self._numbers.receive()

    def clear(self) -> None:
        """Forget the gradients."""
        self.model.zero_grad()

    def close(self) -> None:
        """Let go of the process group, before it is destroyed."""

    def _loss_sum(self, piece: Piece) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self._bf16):
            return functional.cross_entropy(self._forward(piece.images), piece.labels, reduction="sum")

    def _backward(self, loss_sum: torch.Tensor, global_count: int) -> None:
        (loss_sum * (self.averaged_over / global_count)).backward()  # type: ignore[no-untyped-call]

    def _unsynced(self) -> contextlib.AbstractContextManager[None]:
        """Around all micro-batches but the last."""
        return contextlib.nullcontext()

    def _before_last(self) -> None:
        """The gradients of the next backward pass are the last to be added."""

    def _exchange(self) -> None:
        """Nothing to exchange, or done by now."""


class Manual(GradientSync):
    """One all-reduce per parameter after the backward pass: DDP's result without its overlap, in ten lines."""

    def __init__(self, model: nn.Module, group: Group, *, accum: int, bf16: bool) -> None:
        super().__init__(model, group, accum=accum, bf16=bf16)
        self.averaged_over = group.world_size

    def _exchange(self) -> None:
        average_gradients(self.model, self._group.world_size)


@torch.no_grad()
def average_gradients(model: nn.Module, world_size: int) -> None:
    """Replace each gradient by its mean over the ranks; parameters that took no part have none, on any rank."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size


def views_of(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Consecutive views of ``flat``, each shaped as its parameter lies in memory: fused optimizers want both alike."""
    views, at = [], 0
    for parameter in parameters:
        views.append(flat[at : at + parameter.numel()].as_strided(parameter.shape, parameter.stride()))
        at += parameter.numel()
    return views


def build(config: Config, model: nn.Module, group: Group) -> GradientSync:
    """The configured way; ``graphs.check`` has said that a recording, if wanted, can be."""
    way = _way(config, model, group)
    if config.cuda_graph:
        from ddptrain.graphs import Graphed

        return Graphed(way, group, full=config.global_batch, bf16=config.bf16)
    return way


def _way(config: Config, model: nn.Module, group: Group) -> GradientSync:
    """Where there is one rank, all but ``bitwise`` are the plain backward pass."""
    if config.sync == "bitwise":
        from ddptrain.bitwise import Bitwise

        return Bitwise(model, group, bf16=config.bf16)
    if group.world_size == 1:
        return GradientSync(model, group, accum=config.accum, bf16=config.bf16)
    if config.sync == "bucketed":
        from ddptrain.bucketed import Bucketed

        return Bucketed(model, group, accum=config.accum, bf16=config.bf16)
    if config.sync == "manual":
        return Manual(model, group, accum=config.accum, bf16=config.bf16)
    from ddptrain.ddp import Ddp

    return Ddp(model, group, accum=config.accum, bf16=config.bf16)
