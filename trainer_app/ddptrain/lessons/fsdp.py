"""FSDP: data parallelism in which every rank holds only a part of the weights, gradients and optimizer state.

    torchrun --nproc-per-node 4 fsdp.py

Before a layer computes, its weights are gathered from all ranks, and dropped again after it, so that a rank holds at
most one whole layer. In backward, gradients are averaged and divided in one exchange (reduce_scatter), so that every
rank updates its part of the weights. The result is that of one process. torch.distributed.checkpoint writes the parts,
one file per rank, and loads them into any number of ranks. It needs NumPy, which PyTorch does not install.

ZeRO stage 1 divides only the optimizer's state: every rank has all weights, updates some of them and sends these to the
others.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

SIZE, WIDTH, STEPS = 6, 10, 5
BATCH_OF_RANK = 4  # equal for all ranks, so that the mean of their gradients is that of all samples


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = sharded()
    dropped: list[bool] = []  # when the second layer begins, are the weights of the first divided again?
    model[1].register_forward_hook(lambda *_: dropped.append(isinstance(model[0].weight, DTensor)))
    control = network()
    of_control = torch.optim.AdamW(control.parameters(), lr=0.01)
    for step in range(STEPS):
        train(control, of_control, *batch(step))  # the control: one process with the whole batch
        train(model, optimizer, *(tensor.chunk(world)[rank] for tensor in batch(step)))
    compare(model, control)
    assert all(dropped), "the weights of the first layer were kept while the others computed"
    numbers = of_all_ranks(sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)))
    total = sum(p.numel() for p in control.parameters())
    if rank == 0:
        print(f"{STEPS} steps with {world} ranks equal those of one process; weights per rank {numbers} of {total}")
    divide_the_state(control)
    with shared_folder(rank) as folder:
        resume(model, optimizer, control, of_control, folder)
    dist.destroy_process_group()


def network() -> nn.Sequential:
    """Return the same network on every rank."""
    torch.manual_seed(1234)
    return nn.Sequential(nn.Linear(SIZE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, SIZE)).double()


def sharded() -> tuple[nn.Sequential, Optimizer]:
    """Return the network, divided among the ranks, and an optimizer of this rank's part."""
    model, mesh = network(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)  # gathered and dropped layer by layer
    fully_shard(model, mesh=mesh)  # what no layer has taken
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)  # after: it must see the parts


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a step, for all ranks together."""
    samples, generator = BATCH_OF_RANK * dist.get_world_size(), torch.Generator().manual_seed(step)
    x, y = torch.randn(2, samples, SIZE, dtype=torch.float64, generator=generator)
    return x, y


def train(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def compare(model: nn.Module, control: nn.Module) -> None:
    """Check that the divided weights are those of one process."""
    for divided, whole in zip(model.parameters(), control.parameters(), strict=True):
        assert isinstance(divided, DTensor)
        torch.testing.assert_close(divided.full_tensor(), whole.detach(), rtol=1e-12, atol=1e-12)


def divide_the_state(control: nn.Module) -> None:
    """Train with ZeRO stage 1: the weights are those of the control, and no two ranks hold the same state."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    for step in range(STEPS):
        train(model, optimizer, *(tensor.chunk(world)[rank] for tensor in batch(step)))
    for whole, of_control in zip(model.parameters(), control.parameters(), strict=True):
        torch.testing.assert_close(whole, of_control, rtol=1e-12, atol=1e-12)
    numbers = of_all_ranks(sum(state["exp_avg"].numel() for state in optimizer.optim.state.values()))
    total = sum(p.numel() for p in control.parameters())
    assert sum(numbers) == total, f"a part of the optimizer's state is held twice or nowhere: {numbers}"
    if rank == 0:
        print(f"ZeRO stage 1 as well; weights whose state each rank holds {numbers} of {total}")


def of_all_ranks(number: int) -> list[int]:
    """Return the number that each rank gives."""
    numbers = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor([number]))
    return [int(each) for each in numbers]


def resume(
    model: nn.Module,
    optimizer: Optimizer,
    control: nn.Module,
    of_control: Optimizer,
    folder: Path,
) -> None:
    """Save the parts, load them into a new model, and train one more step: still the same as one process."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    again, of_again = sharded()
    weights, state = get_state_dict(again, of_again)
    loaded: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)  # into the tensors that are there
    set_state_dict(again, of_again, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    rank, world = dist.get_rank(), dist.get_world_size()
    train(control, of_control, *batch(STEPS))
    train(again, of_again, *(tensor.chunk(world)[rank] for tensor in batch(STEPS)))
    compare(again, control)
    time.sleep(0.2 if rank else 0)  # ranks that are late: until they have read the files, rank 0 must not delete them
    files = len(list(folder.glob("*.distcp")))
    assert files == world, "the folder was deleted while a rank still needed it"
    if rank == 0:
        print(f"saved in {files} files, loaded, and one more step: still equal")


@contextlib.contextmanager
def shared_folder(rank: int) -> Iterator[Path]:
    """Provide an empty folder that all ranks see: on the job's volume, or on this machine."""
    moment = torch.tensor(time.time_ns())
    dist.broadcast(moment, src=0)
    folder = Path(os.environ.get("DDPJOB_CHECKPOINT_DIR") or tempfile.gettempdir()) / f"lesson-{moment.item()}"
    yield folder
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
