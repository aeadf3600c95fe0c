"""``--sync bitwise``: the same weights, bit for bit, at any number of ranks, and if the number changes during a run.

Floating-point sums depend on their order, and the last bits of a convolution on the shape of its batch. Therefore the
unit of work is not a rank's share but a virtual shard: every global batch is divided into the same ``VIRTUAL_SHARDS``,
each is computed separately with a fixed number of threads, their gradients are gathered, and every rank adds them in
order of their number.

The price is smaller batches and the traffic of a gather. The result depends on the type of processor and the version of
PyTorch: manifests record both, and the checkpointer refuses to resume where they differ.
"""

from typing import Any

import torch
from torch import nn

from ddprun.distributed.process_group import Group, all_gather_flat
from ddptrain.data.batches import GlobalBatch
from ddptrain.data.sampling import shard
from ddptrain.training.gradient_sync import LOSS, NUMBERS, SECONDS, STOP, GradientSync, views_of

VIRTUAL_SHARDS = 12  # divisible by 1, 2, 3, 4, 6 and 12 ranks
THREADS = 1  # default of --threads: possible with any number of ranks on a node
_EXTRAS = NUMBERS  # values after the gradient in each row: the loss sum of the shard, its rank's stop flag and seconds


class Bitwise(GradientSync):
    """Gathers the gradients of the virtual shards as rows and adds the rows in a fixed order."""

    def __init__(self, model: nn.Module, group: Group, **options: Any) -> None:
        super().__init__(model, group, **options)
        self._parameters = list(model.parameters())
        first = self._parameters[0]
        width = sum(p.numel() for p in self._parameters)
        rows = max(len(self._mine(rank)) for rank in range(group.world_size))
        self._rows = torch.zeros(rows, width + _EXTRAS, dtype=first.dtype, device=first.device)
        self._gathered = torch.zeros(group.world_size, *self._rows.shape, dtype=first.dtype, device=first.device)
        self._total = torch.zeros(width, dtype=first.dtype, device=first.device)
        self._views = views_of(self._total, self._parameters)

    def step(self, batch: GlobalBatch, stop: bool = False, seconds: float = 0.0) -> torch.Tensor:
        self._rows.zero_()
        extras = self._rows[:, -_EXTRAS:]
        extras[:, STOP] = float(stop)
        extras[:, SECONDS] = seconds
        for row, number in zip(self._rows, self._mine(self._group.rank), strict=False):
            part = shard(batch.count, number, VIRTUAL_SHARDS)
            if part.stop == part.start:
                continue
            self.model.zero_grad()
            loss_sum = self._loss_sum(batch.piece(part))
            self._backward(loss_sum, batch.count)
            gradients = [p.grad for p in self._parameters]
            for view, gradient in zip(views_of(row[:-_EXTRAS], self._parameters), gradients, strict=True):
                if gradient is not None:
                    view.copy_(gradient)
            row[LOSS - _EXTRAS] = loss_sum.detach()
        if self._group.world_size > 1:
            with self._group.heartbeat.waiting_in("all_gather of gradients"):
                all_gather_flat(self._gathered.flatten(0, 1), self._rows)
        else:
            self._gathered[0] = self._rows
        return self._add_up()

    def _add_up(self) -> torch.Tensor:
        self._total.zero_()
        losses: list[torch.Tensor] = []
        for rank in range(self._group.world_size):
            for position in range(len(self._mine(rank))):
                row = self._gathered[rank, position]
                self._total.add_(row[:-_EXTRAS])
                losses.append(row[LOSS - _EXTRAS])
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        extras = self._gathered[:, 0, -_EXTRAS:].double().sum(0)  # a rank's rows have the same flag and seconds
        return torch.stack([torch.stack(losses).double().sum(), extras[STOP], extras[SECONDS]])

    def _mine(self, rank: int) -> range:
        """Return the numbers of the virtual shards that ``rank`` computes; none if there are more ranks than shards."""
        part = shard(VIRTUAL_SHARDS, rank, self._group.world_size)
        return range(part.start, part.stop)
