"""Vocabulary parallelism: every rank holds the embeddings of a part of the vocabulary.

    torchrun --nproc-per-node 4 vocab.py

A rank looks up the tokens that it holds, puts zeros in place of the others, and the sum over the ranks is the result:
exactly one summand of each row is not zero, so the sum is exact. By hand as in Megatron-LM, then with DTensor.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn import functional

SIZE = 4


class SumForward(torch.autograd.Function):
    """Sum over the ranks. Every rank gets the same sum, so the gradient of each summand is the gradient of the sum."""

    @staticmethod
    def forward(_: Any, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


class VocabParallelEmbedding(nn.Module):
    """The rows of an embedding matrix from ``first`` to ``end``."""

    def __init__(self, weight: Tensor, rank: int, world: int) -> None:
        super().__init__()
        ends = [len(part) for part in weight.tensor_split(world)]
        self.first = sum(ends[:rank])
        self.end = self.first + ends[rank]
        self.weight = nn.Parameter(weight[self.first : self.end].clone())

    def forward(self, tokens: Tensor) -> Tensor:
        elsewhere = (tokens < self.first) | (tokens >= self.end)
        local = tokens - self.first
        local[elsewhere] = 0  # any valid row; its values are dropped below
        rows = functional.embedding(local, self.weight)
        rows = rows.masked_fill(elsewhere[:, None], 0.0)  # not in place: backward needs the rows' gradients masked, too
        total: Tensor = SumForward.apply(rows)
        return total


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)  # the same on every rank
    vocabulary = 3 * world - 1  # not divisible by the ranks: 11 tokens on 4 ranks are 3, 3, 3, 2
    whole = nn.Embedding(vocabulary, SIZE)
    tokens = torch.cat([torch.randperm(vocabulary), torch.tensor([1, 1, 0])])
    scale = torch.randn(len(tokens), SIZE)
    expected = whole(tokens)
    (expected * scale).sum().backward()
    assert whole.weight.grad is not None

    mine = VocabParallelEmbedding(whole.weight.detach(), rank, world)
    output = mine(tokens)
    (output * scale).sum().backward()
    assert torch.equal(output, expected), "the sum has one summand that is not zero, so it is exact"
    assert mine.weight.grad is not None
    assert torch.equal(mine.weight.grad, whole.weight.grad[mine.first : mine.end])
    rows = [torch.empty(2, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(rows, torch.tensor([mine.first, mine.end]))
    if rank == 0:
        held = [tuple(of_rank.tolist()) for of_rank in rows]
        print(f"by hand: rows per rank {held}; output and gradients are exactly those of the whole embedding")
    by_dtensor(whole, tokens, scale)
    dist.destroy_process_group()


def by_dtensor(whole: nn.Embedding, tokens: Tensor, scale: Tensor) -> None:
    embedding = nn.Embedding(*whole.weight.shape)
    embedding.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    divided = parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    output = divided(tokens)
    (output * scale).sum().backward()
    gradient = embedding.weight.grad
    assert isinstance(gradient, DTensor) and whole.weight.grad is not None
    assert torch.equal(output, whole(tokens))
    assert torch.equal(gradient.full_tensor(), whole.weight.grad)
    if dist.get_rank() == 0:
        print("DTensor: rows divided by a plan; the same output and gradients")


if __name__ == "__main__":
    main()
