"""``--sync bucketed``: what DistributedDataParallel does, by hand: gradients lie in a few flat buffers, and each buffer
is summed over the ranks as soon as its last gradient is there, while the backward pass computes the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ddptrain.sync import GradientSync, views_of

if TYPE_CHECKING:
    from ddptrain.group import Group

BUCKET_BYTES = 2**18  # 256 KiB: three or four buckets for these models, so that there is something to overlap


@dataclass
class Bucket:
    """One flat buffer and the parameters whose ``.grad`` are views of it."""

    parameters: list[nn.Parameter]
    flat: torch.Tensor
    missing: int = 0


class Bucketed(GradientSync):
    """Own flat buffers with overlapping all-reduces. The layout never changes, so neither does a sum's order."""

    def __init__(self, model: nn.Module, group: Group, *, accum: int, bf16: bool) -> None:
        super().__init__(model, group, accum=accum, bf16=bf16)
        self._buckets = [_bucket(parameters) for parameters in _grouped(list(model.parameters()))]
        self._work: list[dist.Work] = []
        self._armed = False
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, bucket=bucket: self._on_gradient(bucket)
                )

    def clear(self) -> None:
        """Zero the buffers; the gradients must stay views of them."""
        for bucket in self._buckets:
            bucket.flat.zero_()

    def _before_last(self) -> None:
        self._armed = True
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def _on_gradient(self, bucket: Bucket) -> None:
        if not self._armed:
            return
        bucket.missing -= 1
        # In the order of the list, never in the order of completion: all ranks must call the same collectives alike.
        while len(self._work) < len(self._buckets) and self._buckets[len(self._work)].missing == 0:
            self._send_next()

    def _send_next(self) -> None:
        work = dist.all_reduce(self._buckets[len(self._work)].flat, async_op=True)
        assert work is not None
        self._work.append(work)

    def _exchange(self) -> None:
        while len(self._work) < len(self._buckets):  # a parameter that took no part holds its bucket back until here
            self._send_next()
        for work in self._work:
            work.wait()
        self._work.clear()
        self._armed = False


def _grouped(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in the order in which the backward pass completes them, cut where a bucket is full."""
    groups: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in reversed(parameters):
        if size >= BUCKET_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return groups


def _bucket(parameters: list[nn.Parameter]) -> Bucket:
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    for parameter, view in zip(parameters, views_of(flat, parameters), strict=True):
        parameter.grad = view
    return Bucket(parameters, flat)
