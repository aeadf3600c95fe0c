"""``--sync ddp``, the default: gradients meet in PyTorch's DistributedDataParallel.

What is ours: it sums in one order from the first step on, and it is gone before the process group is. ``sync`` builds
it where there are several ranks.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddptrain.sync import GradientSync

if TYPE_CHECKING:
    from ddptrain.group import Group


class Ddp(GradientSync):
    """DistributedDataParallel, which averages while the backward pass still runs."""

    def __init__(self, model: nn.Module, group: Group, *, accum: int, bf16: bool) -> None:
        super().__init__(model, group, accum=accum, bf16=bf16)
        self.averaged_over = group.world_size
        device_ids = [group.device.index] if group.device.type == "cuda" else None
        with group.crumbs.waiting_in("construction of DDP"):  # it compares shapes and broadcasts the weights
            self._wrapped = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
            self._settle_buckets()
        self._forward = self._wrapped

    def close(self) -> None:
        """As the base's: DDP must not be the last that holds the process group.

        Its destructor runs under the interpreter's lock and would join gloo's threads there, while one of them may
        wait for that lock to drop its last tensor: a rank then hung for ever after its last step, one run in thirty on
        a busy machine.
        """
        self._forward = self.model
        del self._wrapped
        gc.collect()  # it is part of cycles

    def _unsynced(self) -> contextlib.AbstractContextManager[None]:
        return self._wrapped.no_sync()

    def _settle_buckets(self) -> None:
        """A throw-away backward pass, so that every real step sums in one and the same order.

        DDP lays its buckets out anew after the first backward pass, and the place of a gradient in a bucket decides
        the order in which a ring adds it up. A resumed run would otherwise take its first step in another layout than
        the undisturbed one. The layout is rebuilt at the next forward pass, before any real gradient exists.
        """
        dtype = next(self.model.parameters()).dtype
        blank = torch.zeros(1, 1, 28, 28, dtype=dtype, device=self._group.device)
        self._wrapped(blank).sum().mul(0.0).backward()
        self._wrapped.zero_grad()
