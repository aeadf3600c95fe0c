"""Tensor parallelism: every rank holds a part of each weight matrix and computes a part of the result.

    torchrun --nproc-per-node 4 tensor.py

A pair of linear layers, x -> relu(x A) -> (...) B, is divided with one exchange per direction: the columns of A among
the ranks, and the rows of B. Each rank then has what its rows of B need, and only the results are summed (Megatron-LM,
arXiv:1909.08053). First by hand, with a width that the ranks do not divide evenly, then with torch's DTensor.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SIZE, WIDTH, BATCH = 6, 10, 5  # 10 columns on 4 ranks: 3, 3, 2, 2


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


class SumBackward(torch.autograd.Function):
    """Pass the input on. Every rank used it for its part, so its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Parallel(nn.Module):
    """This rank's columns of A and rows of B."""

    def __init__(self, a: Tensor, b: Tensor, rank: int, world: int) -> None:
        super().__init__()
        # tensor_split gives the first ranks one more; with a narrow layer, some may get none.
        self.a = nn.Parameter(a.tensor_split(world, dim=1)[rank].clone())
        self.b = nn.Parameter(b.tensor_split(world, dim=0)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(SumBackward.apply(x) @ self.a)
        total: Tensor = SumForward.apply(hidden @ self.b)
        return total


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)  # the same on every rank
    a, b = torch.randn(SIZE, WIDTH, dtype=torch.float64), torch.randn(WIDTH, SIZE, dtype=torch.float64)
    x = torch.randn(BATCH, SIZE, dtype=torch.float64)
    by_hand(a, b, x, rank, world)
    by_dtensor(a, b, x, world)
    dist.destroy_process_group()


def dense(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output and gradients of A, B and x of the whole layers in one process."""
    a, b, x = (tensor.clone().requires_grad_() for tensor in (a, b, x))
    y = torch.relu(x @ a) @ b
    y.square().sum().backward()
    assert a.grad is not None and b.grad is not None and x.grad is not None
    return y.detach(), a.grad, b.grad, x.grad


def by_hand(a: Tensor, b: Tensor, x: Tensor, rank: int, world: int) -> None:
    y, of_a, of_b, of_x = dense(a, b, x)
    model, x = Parallel(a, b, rank, world), x.clone().requires_grad_()
    mine = model(x)
    mine.square().sum().backward()
    expected = (y, of_a.tensor_split(world, dim=1)[rank], of_b.tensor_split(world, dim=0)[rank], of_x)
    for got, wanted in zip((mine, model.a.grad, model.b.grad, x.grad), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    columns = [torch.empty(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(columns, torch.tensor([model.a.shape[1]]))
    if rank == 0:
        held = torch.cat(columns).tolist()
        print(f"by hand: columns of A per rank {held}; output and all gradients equal those of the whole layers")


def by_dtensor(a: Tensor, b: Tensor, x: Tensor, world: int) -> None:
    y, of_a, of_b, _ = dense(a, b, x)
    first, second = nn.Linear(SIZE, WIDTH, bias=False).double(), nn.Linear(WIDTH, SIZE, bias=False).double()
    with torch.no_grad():
        first.weight.copy_(a.T)  # nn.Linear holds the transpose
        second.weight.copy_(b.T)
    layers = nn.Sequential(first, nn.ReLU(), second)
    mesh = init_device_mesh("cpu", (world,))
    # The layers stay as they are written: the plan says how each one's weight is divided. The width is divided
    # unevenly, so what goes from one layer to the next stays a DTensor, which knows the width of the whole.
    parallelize_module(layers, mesh, {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
    mine = layers(x)
    mine.square().sum().backward()
    torch.testing.assert_close(mine, y, rtol=1e-12, atol=1e-12)
    for layer, whole in ((first, of_a), (second, of_b)):
        gradient = layer.weight.grad
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(gradient.full_tensor(), whole.T, rtol=1e-12, atol=1e-12)
    if dist.get_rank() == 0:
        print("DTensor: columns and rows divided by a plan; the same output and gradients")


if __name__ == "__main__":
    main()
