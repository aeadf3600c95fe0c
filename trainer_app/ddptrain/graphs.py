"""``--cuda-graph``: the forward and backward pass recorded once and replayed, for one rank or ``--sync manual``.

On a fast GPU these small networks wait for Python to launch their kernels; a replay launches all of them at once. Not
recorded, on purpose: the optimizer, because a loss that is not finite must be seen before it acts, and the exchange
between ranks. Written by the rules of PyTorch's notes on CUDA graphs; not yet run on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ddptrain.batches import GlobalBatch, Piece
from ddptrain.errors import RanksError, UsageError
from ddptrain.order import shard
from ddptrain.sync import GradientSync

if TYPE_CHECKING:
    from ddptrain.config import Config
    from ddptrain.group import Group

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
        with self._group.crumbs.waiting_in("all_reduce of gradients"):
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


def check(config: Config, group: Group) -> None:
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
