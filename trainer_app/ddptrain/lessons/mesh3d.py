"""Three ways of parallelism at once: data, pipeline and tensor parallelism on one three-dimensional mesh of ranks.

    torchrun --nproc-per-node 4 mesh3d.py

With the shape (dp, pp, tp), rank = (d * pp + p) * tp + t. Ranks that differ only in t share the layers of a stage, so
they exchange most and belong on one node. Ranks that differ only in p pass activations on. Ranks that differ only in
d have the same weights and average their gradients.
"""

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SIZE, WIDTH, BLOCKS = 4, 8, 2
MICROBATCHES, BATCH = 4, 8  # samples of one batch among those that data parallelism divides


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for shape in shapes(dist.get_world_size()):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp"))
        check_places(mesh, shape)
        share = train_step(mesh)
        if dist.get_rank() == 0:
            print(
                f"dp {shape[0]} x pp {shape[1]} x tp {shape[2]}: all gradients equal those of one process; "
                f"rank 0 holds {share:.0%} of the matrices"
            )
    dist.destroy_process_group()


def shapes(world: int) -> Iterator[tuple[int, int, int]]:
    """Yield the shapes of this many ranks with 1 or 2 stages and 1 or 2 parts of each layer."""
    sides = (1, 2)
    yield from ((world // (p * t), p, t) for p in sides for t in sides if world % (p * t) == 0)


def check_places(mesh: DeviceMesh, shape: tuple[int, int, int]) -> None:
    """Check that each dimension has its size, and that rank = (d * pp + p) * tp + t."""
    dp, pp, tp = mesh["dp"], mesh["pp"], mesh["tp"]
    assert (dp.size(), pp.size(), tp.size()) == shape
    place = (dp.get_local_rank() * pp.size() + pp.get_local_rank()) * tp.size() + tp.get_local_rank()
    assert place == dist.get_rank()


def train_step(mesh: DeviceMesh) -> float:
    """Compute the gradients of one batch on the mesh, and check them against those of one process.

    Return the share of all matrices that this rank holds.
    """
    dp, pp, tp = mesh["dp"], mesh["pp"], mesh["tp"]
    torch.manual_seed(1234)  # the same on every rank
    whole, mine = blocks(), blocks()
    mine.load_state_dict(whole.state_dict())
    x, target = torch.randn(2, BATCH * dp.size(), SIZE, dtype=torch.float64)
    mean_loss(whole(x), target).backward()  # the control: the whole model and batch in one process

    number, stages = pp.get_local_rank(), pp.size()
    first, end = BLOCKS * number // stages, BLOCKS * (number + 1) // stages
    part = mine[first:end]
    for block in part:
        parallelize_module(block, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x, target = (tensor.chunk(dp.size())[dp.get_local_rank()] for tensor in (x, target))
    micro = x[: BATCH // MICROBATCHES].clone().requires_grad_()  # what stages exchange
    stage = PipelineStage(part, number, stages, torch.device("cpu"), micro, micro, group=pp.get_group())
    pipeline = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=mean_loss)
    pipeline.step(*([x] if number == 0 else []), target=target if number == stages - 1 else None)

    for parameter, control in zip(part.parameters(), whole[first:end].parameters(), strict=True):
        gradient, expected = parameter.grad, control.grad
        assert gradient is not None and expected is not None
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(gradient, group=dp.get_group())
        torch.testing.assert_close(gradient / dp.size(), expected, rtol=1e-12, atol=1e-12)
    matrices = [layer.weight for layer in part.modules() if isinstance(layer, nn.Linear)]
    held = sum(w.to_local().numel() if isinstance(w, DTensor) else w.numel() for w in matrices)
    share = held / (2 * SIZE * WIDTH * BLOCKS)
    assert share == 1 / (pp.size() * tp.size()), "stages divide the layers, and tensor parallelism each layer"
    return share


def blocks() -> nn.Sequential:
    """Return a model of blocks with two linear layers, of which tensor parallelism divides columns and rows."""
    layers = (nn.Sequential(nn.Linear(SIZE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, SIZE)) for _ in range(BLOCKS))
    return nn.Sequential(*layers).double()


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


if __name__ == "__main__":
    main()
