"""Gradient synchronization: from the gradients of the ranks' shares to the gradient of the global batch.

The trainer builds one implementation, here or in ``bitwise``, and calls its ``step`` for each global batch.

A rank's loss is the sum over its samples times ``averaged_over / global count``. For any sizes of the shares, the
average (or, with ``averaged_over`` 1, the sum) of these gradients is the gradient of the global batch's mean loss. An
average of the ranks' mean losses would weight the samples of a smaller share more.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddptrain.data.batches import GlobalBatch, Piece
from ddptrain.data.sampling import micro_shards, shard
from ddptrain.errors import RanksError, UsageError

if TYPE_CHECKING:
    from ddptrain.config import Config
    from ddptrain.distributed.process_group import Group


class StepNumbers:
    """Sums the loss and the stop flags over the ranks, in one small all-reduce that overlaps the backward pass."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._values = torch.zeros(2, dtype=torch.float64, device=group.device)
        self._work: dist.Work | None = None

    def send(self, loss_sum: torch.Tensor, stop: bool) -> None:
        """Start the all-reduce of this rank's loss sum and stop flag; all ranks must call it at the same place."""
        self._values[0] = loss_sum.detach()
        self._values[1] = float(stop)
        if self._group.world_size > 1:
            self._work = dist.all_reduce(self._values, async_op=True)

    def receive(self) -> tuple[float, bool]:
        """Return (sum of the losses, whether any rank is to stop), the same on every rank."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        loss, stop = self._values.tolist()
        return loss, stop > 0


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
        self._numbers = StepNumbers(group)

    def step(self, batch: GlobalBatch, stop: bool) -> tuple[float, bool]:
        """Compute the gradient of the global batch's mean loss into ``.grad``.

        Args:
            stop: whether this rank received a request to stop.
        Returns:
            (sum of the losses over the global batch, whether any rank is to stop), the same on every rank.
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
        self._numbers.send(total, stop)  # before the backward pass, which it overlaps
        with self._group.heartbeat.waiting_in("all_reduce of gradients"):  # overlaps the backward pass
            self._backward(loss_sum, batch.count)
            self._exchange()
            return self._numbers.receive()

    def clear(self) -> None:
        """Discard the gradients."""
        self.model.zero_grad()

    def close(self) -> None:
        """Release the process group, before it is destroyed."""

    def _loss_sum(self, piece: Piece) -> torch.Tensor:
        with torch.autocast(self._group.device.type, torch.bfloat16, enabled=self._bf16):
            logits = self._forward(piece.images)
        return self._loss_of(logits, piece.labels)

    def _loss_of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
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

    def __init__(self, model: nn.Module, group: Group, *, accum: int, bf16: bool, label_smoothing: float = 0.0) -> None:
        super().__init__(model, group, accum=accum, bf16=bf16, label_smoothing=label_smoothing)
        device_ids = [group.device.index] if group.device.type == "cuda" else None
        with group.heartbeat.waiting_in("construction of DDP"):  # compares shapes and broadcasts the weights
            self._wrapped = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
            self._settle_buckets()
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

    def _settle_buckets(self) -> None:
        """Run a backward pass and discard its gradients, so that every real step sums in the same order.

        DDP rebuilds its buckets after the first backward pass, and a gradient's place in its bucket decides the order
        in which a ring adds it up. Otherwise the first step of a resumed run would sum in a different order from the
        same step of an uninterrupted run. DDP rebuilds at the next forward pass, before a real gradient exists.
        """
        dtype = next(self.model.parameters()).dtype
        blank = torch.zeros(1, 1, 28, 28, dtype=dtype, device=self._group.device)
        self._wrapped(blank).sum().mul(0.0).backward()
        self._wrapped.zero_grad()


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

    def __init__(self, model: nn.Module, group: Group, *, accum: int, bf16: bool, label_smoothing: float = 0.0) -> None:
        super().__init__(model, group, accum=accum, bf16=bf16, label_smoothing=label_smoothing)
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
        # In list order, not completion order: all ranks must call the collectives in the same order.
        while len(self._work) < len(self._buckets) and self._buckets[len(self._work)].missing == 0:
            self._send_next()

    def _send_next(self) -> None:
        work = dist.all_reduce(self._buckets[len(self._work)].flat, async_op=True)
        assert work is not None
        self._work.append(work)

    def _exchange(self) -> None:
        while len(self._work) < len(self._buckets):  # buckets with an unused parameter
            self._send_next()
        for work in self._work:
            work.wait()
        self._work.clear()
        self._armed = False


def _grouped(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in the order in which the backward pass completes them, divided into buckets."""
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
    """Return a bucket of zeros, with its views as the parameters' gradients."""
    first = parameters[0]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
    for parameter, view in zip(parameters, views_of(flat, parameters), strict=True):
        parameter.grad = view
    return Bucket(parameters, flat)


_WARM_UPS = 3  # eager passes on a side stream first: lazy initialization must not be recorded


class Graphed(GradientSync):
    """``--cuda-graph``: records the forward and backward pass once and replays them for one rank or ``manual``.

    On a fast GPU these small networks wait for Python to launch kernels; a replay launches all of them at once. The
    optimizer is not recorded, because a loss that is not finite must be found before it runs, nor is the exchange. The
    shorter last batch of an epoch runs eagerly. Follows PyTorch's notes on CUDA graphs; not yet run on a GPU.

    Args:
        inner: runs the eager steps and every exchange.
        full: size of the global batch that is recorded.
    """

    def __init__(
        self, inner: GradientSync, group: Group, *, full: int, bf16: bool, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(inner.model, group, bf16=bf16, label_smoothing=label_smoothing)
        self._inner, self._full = inner, full
        self.averaged_over = inner.averaged_over
        self._parameters = list(inner.model.parameters())
        self._graph: torch.cuda.CUDAGraph | None = None
        self._piece = Piece(torch.empty(0), torch.empty(0))
        self._recorded_loss = torch.empty(0)
        self._recorded_gradients: list[torch.Tensor | None] = []

    def step(self, batch: GlobalBatch, stop: bool) -> tuple[float, bool]:
        self.clear()
        if batch.count != self._full:
            return self._inner.step(batch, stop)
        piece = batch.piece(shard(batch.count, self._group.rank, self._group.world_size))
        if self._graph is None:
            self._record(piece)
        assert self._graph is not None
        self._piece.images.copy_(piece.images)
        self._piece.labels.copy_(piece.labels)
        self._graph.replay()
        # A replay writes into the recorded tensors, so the gradients must be those again.
        for parameter, gradient in zip(self._parameters, self._recorded_gradients, strict=True):
            parameter.grad = gradient
        self._numbers.send(self._recorded_loss, stop)
        with self._group.heartbeat.waiting_in("all_reduce of gradients"):
            self._inner._exchange()
            return self._numbers.receive()

    def clear(self) -> None:
        """Drop the gradients without changing the recorded tensors."""
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        self._inner.close()

    def _record(self, piece: Piece) -> None:
        self._piece = Piece(piece.images.clone(), piece.labels.clone())
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self.clear()
                self._forward_and_backward()
        torch.cuda.current_stream().wait_stream(side)
        self.clear()  # so that the recorded pass writes gradients instead of adding to old ones
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._recorded_loss = self._forward_and_backward()
        self._recorded_gradients = [parameter.grad for parameter in self._parameters]

    def _forward_and_backward(self) -> torch.Tensor:
        # No cast cache: its entries would outlive the recording.
        with torch.autocast("cuda", torch.bfloat16, enabled=self._bf16, cache_enabled=False):
            logits = self.model(self._piece.images)
        loss_sum = self._loss_of(logits, self._piece.labels)
        self._backward(loss_sum, self._full)
        return loss_sum.detach()


def check_cuda_graph(config: Config, group: Group) -> None:
    """Check that ``--cuda-graph`` is possible, before anything is claimed or loaded.

    Raises:
        RanksError: no GPU.
        UsageError: gradients are exchanged or accumulated during the backward pass.
    """
    if group.device.type != "cuda":
        raise RanksError("--cuda-graph needs CUDA", next_step="remove --cuda-graph to train on a CPU")
    if config.accum > 1 or config.sync == "bitwise" or (group.has_process_group and config.sync != "manual"):
        raise UsageError(
            "--cuda-graph needs a backward pass without an exchange: one rank or --sync manual, and no --accum",
            next_step="use --sync manual without --accum, or remove --cuda-graph",
        )
