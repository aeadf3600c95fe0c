"""Gradient synchronization: from the gradients of the ranks' shares to the gradient of the global batch.

The trainer builds one implementation, here or in ``bitwise``, and calls its ``step`` for each global batch.

A rank's loss is the sum over its samples times ``averaged_over / global count``. For any sizes of the shares, the
average (or, with ``averaged_over`` 1, the sum) of these gradients is the gradient of the global batch's mean loss. An
average of the ranks' mean losses would weight the samples of a smaller share more.
"""

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddprun.distributed.process_group import Group
from ddptrain.data.batches import GlobalBatch, Piece
from ddptrain.data.sampling import micro_shards

LOSS, STOP, SECONDS = range(3)  # positions in the numbers of a step
NUMBERS = 3


class GradientSync:
    """Base class: accumulates the gradients of this rank's micro-batches; subclasses exchange them.

    Args:
        model: the bare model; its ``.grad`` are complete when ``step`` returns.
        accum: number of micro-batches into which this rank's share of a global batch is divided, to save memory.
    """

    averages = False  # whether the exchange averages over the ranks; otherwise it sums

    def __init__(
        self, model: nn.Module, group: Group, *, accum: int = 1, bf16: bool = False, label_smoothing: float = 0.0
    ) -> None:
        self.model, self._group, self._accum = model, group, accum
        self._bf16, self._label_smoothing = bf16, label_smoothing
        self.averaged_over = group.world_size if self.averages else 1
        self._forward: Callable[[torch.Tensor], torch.Tensor] = model
        self._numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=group.device)

    def step(self, batch: GlobalBatch, stop: bool = False, seconds: float = 0.0) -> torch.Tensor:
        """Compute the gradient of the global batch's mean loss into ``.grad``, without waiting for the device.

        Args:
            stop: whether this rank received a request to stop.
            seconds: how long this rank's last steps took, each.
        Returns:
            NUMBERS values on the device, the same on every rank until the next call: LOSS, the sum over the global
            batch; STOP, more than 0 if any rank is to stop; SECONDS, the sum over the ranks.
        """
        parts = micro_shards(batch.count, self._group.rank, self._group.world_size, self._accum)
        earlier: list[torch.Tensor] = []
        for part in parts[:-1]:
            self._group.heartbeat.touch()  # a long step of many micro-batches is not a hang
            with self._unsynced():
                loss_sum = self._loss_sum(batch.piece(part))
                earlier.append(loss_sum.detach().double())
                self._backward(loss_sum, batch.count)
        self._before_last()
        loss_sum = self._loss_sum(batch.piece(parts[-1]))
        total = sum(earlier, start=loss_sum.detach().double())
        for place, value in ((LOSS, total), (STOP, float(stop)), (SECONDS, seconds)):
            self._numbers[place] = value
        # The exchange of the numbers and, in some classes, of the gradients overlaps the backward pass.
        sent = dist.all_reduce(self._numbers, async_op=True) if self._group.world_size > 1 else None
        with self._group.heartbeat.waiting_in("all_reduce of gradients"):
            self._backward(loss_sum, batch.count)
            self._exchange()
            if sent is not None:
                sent.wait()  # on a GPU the stream waits, not the host
            return self._numbers

    def clear(self) -> None:
        """Discard the gradients."""
        self.model.zero_grad()

    def close(self) -> None:
        """Release the process group, before it is destroyed."""

    def _loss_sum(self, piece: Piece) -> torch.Tensor:
        images, labels = piece
        # No cache of casts, because every weight is used once.
        with torch.autocast(self._group.device.type, torch.bfloat16, enabled=self._bf16, cache_enabled=False):
            logits = self._forward(images)
        logits = logits.float() if self._bf16 else logits
        return functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=self._label_smoothing)

    def _backward(self, loss_sum: torch.Tensor, global_count: int) -> None:
        (loss_sum * (self.averaged_over / global_count)).backward()  # type: ignore[no-untyped-call]

    def _unsynced(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for all micro-batches but the last."""
        return contextlib.nullcontext()

    def _before_last(self) -> None:
        """Prepare for the backward pass of the last micro-batch."""

    def _exchange(self) -> None:
        """Finish the exchange after the last backward pass; nothing to do here."""


class Manual(GradientSync):
    """One all-reduce per parameter after the backward pass: the result of DDP without its overlap."""

    averages = True

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:  # unused parameters have no gradient on any rank
                dist.all_reduce(parameter.grad)
                parameter.grad /= self._group.world_size


def views_of(flat: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return consecutive views of ``flat`` with the parameters' shapes and strides, which fused optimizers need."""
    parts = torch.split(flat, [parameter.numel() for parameter in parameters])
    return [part.as_strided(p.shape, p.stride()) for part, p in zip(parts, parameters, strict=True)]


class Ddp(GradientSync):
    """PyTorch's DistributedDataParallel, which averages gradients while the backward pass runs."""

    averages = True

    def __init__(self, model: nn.Module, group: Group, **options: Any) -> None:
        super().__init__(model, group, **options)
        device_ids = [group.device.index] if group.device.type == "cuda" else None
        with group.heartbeat.waiting_in("construction of DDP"):  # compares shapes and broadcasts the weights
            self._wrapped = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
            # DDP rebuilds its buckets after the first backward pass, and a gradient's place in its bucket decides the
            # order in which a ring adds it up. Without this pass, whose gradients are discarded, the first step of a
            # resumed run would sum in another order than the same step of an uninterrupted run.
            dtype = next(model.parameters()).dtype
            blank = torch.zeros(1, 1, 28, 28, dtype=dtype, device=group.device)
            self._wrapped(blank).sum().mul(0.0).backward()
            self._wrapped.zero_grad()
        self._forward = self._wrapped

    def close(self) -> None:
        """Destroy DDP, so that it does not hold the last reference to the process group.

        The group's destructor, called from DDP's, joins gloo's threads while it holds the interpreter's lock, which
        one of them may need to free its last tensor. On a busy machine one run in thirty hung after its last step.
        """
        self._group.heartbeat.mark("close")
        self._forward = self.model
        del self._wrapped
        gc.collect()  # DDP is part of reference cycles

    def _unsynced(self) -> contextlib.AbstractContextManager[None]:
        return self._wrapped.no_sync()


BUCKET_BYTES = 2**18  # three or four buckets for these models, so that exchange and computation overlap


@dataclass
class Bucket:
    """One flat buffer, and the parameters that have views of it as ``.grad``."""

    parameters: list[nn.Parameter]
    flat: torch.Tensor
    missing: int = 0


class Bucketed(GradientSync):
    """Flat buffers, each summed over the ranks as soon as its last gradient is complete, during the backward pass.

    The layout of the buffers never changes, so neither does the order of a sum.
    """

    def __init__(self, model: nn.Module, group: Group, **options: Any) -> None:
        super().__init__(model, group, **options)
        self._buckets = _buckets_of(list(model.parameters()))
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
        # In list order, not completion order: all ranks must call the collectives in the same order.
        for waiting in self._buckets[len(self._work) :]:
            if waiting.missing:
                return
            self._work.append(dist.all_reduce(waiting.flat, async_op=True))

    def _exchange(self) -> None:
        for bucket in self._buckets[len(self._work) :]:  # those with an unused parameter, and all after them
            self._work.append(dist.all_reduce(bucket.flat, async_op=True))
        for work in self._work:
            work.wait()
        self._work.clear()
        self._armed = False


def _buckets_of(parameters: list[nn.Parameter]) -> list[Bucket]:
    """Return buckets of zeros in the order in which the backward pass completes gradients; these are views of them."""
    parts: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        if sum(p.numel() * p.element_size() for p in parts[-1]) >= BUCKET_BYTES:
            parts.append([])
        parts[-1].append(parameter)
    buckets = []
    for part in parts:
        flat = torch.zeros(sum(p.numel() for p in part), dtype=part[0].dtype, device=part[0].device)
        for parameter, view in zip(part, views_of(flat, part), strict=True):
            parameter.grad = view
        buckets.append(Bucket(part, flat))
    return buckets
