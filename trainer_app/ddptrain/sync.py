"""How the ranks' gradients and the step's few numbers meet.

``--sync ddp``: DistributedDataParallel averages over ranks, so each rank's loss is ``local_sum × world /
global_count``: the average of these gradients is the gradient of the global batch's mean loss, whatever the sizes of
the shards.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddptrain.group import Group


def wrap(model: nn.Module, group: Group) -> nn.Module:
    """The model with gradient averaging; the model itself where there is one rank."""
    if group.world_size == 1:
        return model
    device_ids = [group.device.index] if group.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    _settle_buckets(wrapped, group.device)
    return wrapped


def _settle_buckets(wrapped: DistributedDataParallel, device: torch.device) -> None:
    """A throw-away backward pass, so that every real step sums in one and the same order.

    DDP lays its buckets out anew after the first backward pass, and the place of a gradient in a bucket decides the
    order in which a ring adds it up. A resumed run would otherwise take its first step in another layout than the
    undisturbed one. The layout is rebuilt at the next forward pass, before any real gradient exists.
    """
    dtype = next(wrapped.parameters()).dtype
    blank = torch.zeros(1, 1, 28, 28, dtype=dtype, device=device)
    wrapped(blank).sum().mul(0.0).backward()
    wrapped.zero_grad()


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
