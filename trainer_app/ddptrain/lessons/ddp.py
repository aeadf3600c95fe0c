"""The same training with DistributedDataParallel in place of average_gradients.

    torchrun --nproc-per-node 2 -m ddptrain.lessons.ddp

    diff trainer_app/ddptrain/lessons/sampler.py trainer_app/ddptrain/lessons/ddp.py

DDP averages gradients while backward still runs, some at a time. It copies the weights of rank 0 to all ranks at the
beginning, so a model that only rank 0 has loaded is enough. It does not divide the data: the sampler does.
"""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddptrain.lessons.sampler import equal_weights, loader_of
from ddptrain.lessons.tutorial import EPOCHS, SEED, Net, accuracy, average_gradients, datasets


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = datasets()
    sampler, loader = loader_of(train, world, rank)
    torch.manual_seed(SEED + rank)  # other initial weights on every rank: DDP replaces them by those of rank 0
    plain = Net().double()
    model = DistributedDataParallel(plain)  # on GPUs: device_ids=[local_rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.nll_loss(model(images), labels)
            loss.backward()  # every rank gets the same gradients; dividing them by world_size again would be wrong
            optimizer.step()  # after every batch
            total += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(total)  # the loss of all samples, not only of this rank's
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.4f}, accuracy {accuracy(model, test):.2%}")
    assert model.module is plain, "the wrapper trains the model that it was given"
    equal_weights(model)
    as_by_hand(model, train.tensors[0][rank::world][:16], train.tensors[1][rank::world][:16])
    save_and_load(model, optimizer, rank)
    dist.destroy_process_group()


def as_by_hand(model: DistributedDataParallel, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Check DDP's gradients, accumulated from two parts of a batch, against average_gradients of the whole batch."""
    (first, second), (of_first, of_second) = images.chunk(2), labels.chunk(2)
    model.zero_grad()
    with model.no_sync():  # this backward only adds to the rank's own gradients
        (functional.nll_loss(model(first), of_first) / 2).backward()
    (functional.nll_loss(model(second), of_second) / 2).backward()  # exchanges the sum
    by_ddp = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    functional.nll_loss(model.module(images), labels).backward()
    average_gradients(model.module)
    by_hand = [p.grad for p in model.parameters() if p.grad is not None]
    largest = max((a - b).abs().max().item() for a, b in zip(by_ddp, by_hand, strict=True))
    if dist.get_rank() == 0:
        print(f"largest difference between DDP's gradients and those averaged by hand: {largest:.1e}")
    assert largest < 1e-12, largest


def save_and_load(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Save and load on one rank of the group, and let DDP give the model, and only the model, to the others."""
    loaded = Net().double()
    of_loaded = torch.optim.SGD(loaded.parameters(), lr=0.01, momentum=0.5)
    if rank == 0:  # not local_rank 0, of which there is one on every node
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "model.pt.part"
            torch.save(model.module.state_dict(), part)  # without the wrapper: names without "module."
            file = part.rename(part.with_suffix(""))  # a reader sees the whole file or none
            loaded.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        of_loaded.load_state_dict(optimizer.state_dict())
    again = DistributedDataParallel(loaded)
    for name, value in again.module.state_dict().items():
        assert torch.equal(value, model.module.state_dict()[name]), name
    assert bool(of_loaded.state) == (rank == 0), "DDP does not know the optimizer: load its state on every rank"
    if rank == 0:
        print("loaded on rank 0 only: DDP gave the weights to all ranks, and the optimizer's state to none")


if __name__ == "__main__":
    main()
