"""The same training with DistributedDataParallel in place of average_gradients.

    torchrun --nproc-per-node 2 ddp.py

    diff sampler.py ddp.py

DDP averages gradients while backward still runs, some at a time. It copies the weights of rank 0 to all ranks at the
beginning, so a model that only rank 0 has loaded is enough. It does not divide the data: the sampler does.
"""

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # before the group exists: otherwise the group's threads outlive it
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, GLOBAL_BATCH, SAMPLES, SEED = 3, 16, 161, 1234


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    train = dataset()
    sampler: DistributedSampler[int] = DistributedSampler(train, world, rank, seed=SEED)  # which shuffles
    # num_workers=N prepares batches in processes; on GPUs, pin_memory=True copies them to where a GPU can read them.
    loader = DataLoader(train, GLOBAL_BATCH // world, sampler=sampler)
    torch.manual_seed(SEED + rank)  # other initial weights on every rank: DDP replaces them by those of rank 0
    plain = network()
    model = DistributedDataParallel(plain)  # on GPUs: device_ids=[local_rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()  # every rank gets the same gradients; dividing them by world_size again would be wrong
            optimizer.step()  # after every batch
            total += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(total)  # the loss of all samples, not only of this rank's
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.4f}")
    assert model.module is plain, "the wrapper trains the model that it was given"
    compare_with_one_process(model, train, total[0] / total[1])
    as_by_hand(model, train.tensors[0][rank::world][:16], train.tensors[1][rank::world][:16])
    forward_decides(rank, world)
    save_and_load(model, optimizer, rank)
    dist.destroy_process_group()


def as_by_hand(model: DistributedDataParallel, images: Tensor, labels: Tensor) -> None:
    """Check DDP's gradients, accumulated from two parts of a batch, against the whole batch's, averaged by hand."""
    (first, second), (of_first, of_second) = images.chunk(2), labels.chunk(2)
    model.zero_grad()
    with model.no_sync():  # this forward and backward only add to the rank's own gradients
        (functional.cross_entropy(model(first), of_first) / 2).backward()
    own = gradients(model)
    (functional.cross_entropy(model(second), of_second) / 2).backward()  # exchanges the sum
    by_ddp = gradients(model)
    model.zero_grad()
    (functional.cross_entropy(model.module(first), of_first) / 2).backward()
    assert torch.equal(own, gradients(model)), "under no_sync, the gradients are those of this rank alone"
    model.zero_grad()
    functional.cross_entropy(model.module(images), labels).backward()
    by_hand = gradients(model)
    dist.all_reduce(by_hand)
    largest = (by_ddp - by_hand / dist.get_world_size()).abs().max().item()
    if dist.get_rank() == 0:
        print(f"largest difference between DDP's gradients and those averaged by hand: {largest:.1e}")
    assert largest < 1e-12, largest


def gradients(model: nn.Module) -> Tensor:
    """Return a copy of all gradients, one after the other."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def forward_decides(rank: int, world: int) -> None:
    """Check that no_sync applies to the forward: it decides whether its backward exchanges, wherever that runs."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    x = torch.tensor([[rank + 1.0]])  # also the gradient of the weight
    output = model(x)
    with model.no_sync():
        output.backward()
    outside = gradients(model).item()
    model.zero_grad()
    with model.no_sync():
        output = model(x)
    output.backward()
    inside = gradients(model).item()
    assert (outside, inside) == ((world + 1) / 2, rank + 1)
    if rank == 0:
        print(f"forward outside no_sync, backward inside: {outside}, the mean; the other way round: {inside}, its own")


def save_and_load(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Save and load on one rank of the group, and let DDP give the model, and only the model, to the others."""
    loaded = network()
    of_loaded = torch.optim.SGD(loaded.parameters(), lr=0.05, momentum=0.5)
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


def compare_with_one_process(model: nn.Module, train: TensorDataset, last_loss: Tensor) -> None:
    """Train again in this process alone; compare weights and the last loss.

    The batches of all ranks together are the next samples of the epoch's order.
    """
    world = dist.get_world_size()
    torch.manual_seed(SEED)
    control = network()
    of_control = torch.optim.SGD(control.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SEED + epoch))
        order = torch.cat([order, order[: -len(train) % world]])  # repeated, so that all ranks get equally many
        mean = torch.zeros(1)
        for indices in order.split(GLOBAL_BATCH // world * world):
            images, labels = train[indices]
            of_control.zero_grad()
            loss = functional.cross_entropy(control(images), labels)
            loss.backward()
            of_control.step()
            mean += loss.item() * len(labels) / len(order)
    difference = max((a - b).abs().max().item() for a, b in zip(model.parameters(), control.parameters(), strict=True))
    if dist.get_rank() == 0:
        print(f"largest difference of a weight between {world} ranks and one process: {difference:.1e}")
    assert difference < 1e-9, difference
    assert torch.isclose(last_loss, mean, rtol=1e-4), (last_loss, mean)


def network() -> nn.Module:
    """Return a network without dropout, so that one process can repeat what many did.

    Its numbers are float64: with float32, the differences of rounding would grow with every step.
    """
    convolutions = nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10)).double()


def dataset() -> TensorDataset:
    """Return ten patterns of 28 x 28 pixels, under noise, with their numbers as labels. Your own data go here."""
    generator = torch.Generator().manual_seed(SEED)
    patterns = torch.randn(10, 7, 7, generator=generator).repeat_interleave(4, 1).repeat_interleave(4, 2)
    labels = torch.randint(10, (SAMPLES,), generator=generator)
    images = patterns[labels] + torch.randn(SAMPLES, 28, 28, generator=generator)
    return TensorDataset(images.double()[:, None], labels)


if __name__ == "__main__":
    main()
