"""How the gradients of the ranks' shares become the gradient of the global batch, on every rank.

Four ways, one result: ``manual`` here, ``ddp``, ``bucketed`` and ``bitwise`` in modules of their own. ``train`` builds
one of them and calls ``step`` for each global batch.

A rank's loss is the sum over its samples times ``averaged over / global count``. Whatever the sizes of the shares, the
average (or, with ``averaged over`` 1, the sum) of these gradients is the gradient of the global batch's mean loss; a
mean per rank, averaged again, is not.

``--sync ddp``, the default: gradients meet in PyTorch's DistributedDataParallel.

What is ours: it sums in one order from the first step on, and it is gone before the process group is. ``sync`` builds
it where there are several ranks.

``--sync bucketed``: what DistributedDataParallel does, by hand: gradients lie in a few flat buffers, and each buffer
is summed over the ranks as soon as its last gradient is there, while the backward pass computes the next.

``--cuda-graph``: the forward and backward pass recorded once and replayed, for one rank or ``--sync manual``.

On a fast GPU these small networks wait for Python to launch their kernels; a replay launches all of them at once. Not
recorded, on purpose: the optimizer, because a loss that is not finite must be seen before it acts, and the exchange
between ranks. Written by the rules of PyTorch's notes on CUDA graphs; not yet run on a GPU.
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
            self._group.heartbeat.touch()  # a long step of many parts is no hang
            with self._unsynced():
                loss_sum = self._loss_sum(batch.piece(part))
                earlier.append(loss_sum.detach().double())
                self._backward(loss_sum, batch.count)
        self._before_last()
        loss_sum = self._loss_sum(batch.piece(parts[-1]))
        total = sum(earlier, start=loss_sum.detach().double())
        self._numbers.send(total, stop)  # first, to travel while the backward pass computes
        with self._group.heartbeat.waiting_in("all_reduce of gradients"):  # the backward pass overlaps it
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


class Ddp(GradientSync):
    """DistributedDataParallel, which averages while the backward pass still runs."""

    def __init__(self, model: nn.Module, group: Group, *, accum: int, bf16: bool) -> None:
        super().__init__(model, group, accum=accum, bf16=bf16)
        self.averaged_over = group.world_size
        device_ids = [group.device.index] if group.device.type == "cuda" else None
        with group.heartbeat.waiting_in("construction of DDP"):  # it compares shapes and broadcasts the weights
            self._wrapped = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
            self._settle_buckets()
        self._forward = self._wrapped

    def close(self) -> None:
        """As the base's: DDP must not be the last that holds the process group.

        Its destructor runs under the interpreter's lock and would join gloo's threads there, while one of them may
        wait for that lock to drop its last tensor: a rank then hung for ever after its last step, one run in thirty on
        a busy machine.
        """
        self._group.heartbeat.mark("close")
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


_WARM_UPS = 3  # eager passes on a side stream first: lazy initialisation must not be recorded


class Graphed(GradientSync):
    """Replays the step for global batches of the full size; the shorter last one of an epoch runs eagerly.

    Args:
        full: size of the global batch that is recorded.
        inner: does the eager steps, and the exchange of both kinds.
    """

    def __init__(self, inner: GradientSync, group: Group, *, full: int, bf16: bool) -> None:
        super().__init__(inner.model, group, bf16=bf16)
        self._inner, self._full = inner, full
        self.averaged_over = inner.averaged_over
        self._parameters = list(inner.model.parameters())
        self._graph: torch.cuda.CUDAGraph | None = None
        self._piece = Piece(torch.empty(0), torch.empty(0))
        self._recorded_loss = torch.empty(0)
        self._recorded_gradients: list[torch.Tensor | None] = []

    def step(self, batch: GlobalBatch, stop: bool) -> tuple[float, bool]:
        """As the base's."""
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
        # A replay writes into the memory of the recording, so the gradients must be these very tensors again.
        for parameter, gradient in zip(self._parameters, self._recorded_gradients, strict=True):
            parameter.grad = gradient
        self._numbers.send(self._recorded_loss, stop)
        with self._group.heartbeat.waiting_in("all_reduce of gradients"):
            self._inner._exchange()
            return self._numbers.receive()

    def clear(self) -> None:
        """Let go of the gradients, without touching the recording's memory."""
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        """As the base's."""
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
        self.clear()  # from none at all the recorded pass writes its gradients, instead of adding to old ones
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._recorded_loss = self._forward_and_backward()
        self._recorded_gradients = [parameter.grad for parameter in self._parameters]

    def _forward_and_backward(self) -> torch.Tensor:
        # Without the cache of casts: what it keeps would outlive the recording.
        with torch.autocast("cuda", torch.bfloat16, enabled=self._bf16, cache_enabled=False):
            logits = self.model(self._piece.images)
            loss_sum = nn.functional.cross_entropy(logits, self._piece.labels, reduction="sum")
        self._backward(loss_sum, self._full)
        return loss_sum.detach()


def check_cuda_graph(config: Config, group: Group) -> None:
    """Refuse ``--cuda-graph`` where it cannot be, before anything is claimed or loaded.

    Raises:
        RanksError: no GPU. UsageError: a way of synchronising whose exchange happens inside the backward pass.
    """
    if group.device.type != "cuda":
        raise RanksError("--cuda-graph needs CUDA", next_step="leave --cuda-graph out on a CPU")
    if config.accum > 1 or config.sync == "bitwise" or (group.world_size > 1 and config.sync != "manual"):
        raise UsageError(
            "--cuda-graph records one backward pass without an exchange in it",
            hint="that of one rank, or of --sync manual, without --accum",
            next_step="add --sync manual, or leave --cuda-graph out",
        )
