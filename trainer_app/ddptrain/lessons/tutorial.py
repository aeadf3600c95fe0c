"""Data parallelism by hand: every rank trains on a part of the data, and gradients are averaged before each step.

    torchrun --nproc-per-node 2 tutorial.py

``sampler.py`` and ``ddp.py`` replace the parts of this file by torch's own, one by one: compare them with diff.
"""

import random
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch._dynamo  # before the group exists: otherwise the group's threads outlive it
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset

EPOCHS, GLOBAL_BATCH, SAMPLES, SEED = 3, 16, 161, 1234


class DataPartitioner:
    """Divides a dataset at random in parts of the given fractions, in the same way on every rank."""

    def __init__(self, data: TensorDataset, fractions: Sequence[float] = (0.7, 0.2, 0.1), seed: int = SEED) -> None:
        indices = list(range(len(data)))
        random.Random(seed).shuffle(indices)  # noqa: S311
        # No sample is lost: three times .3333 is divided by its sum, and the ends are rounded, not the lengths.
        ends = [round(len(data) * sum(fractions[: part + 1]) / sum(fractions)) for part in range(len(fractions))]
        self.parts = [Subset(data, indices[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def use(self, part: int) -> Subset[tuple[Tensor, ...]]:
        """Return one of the parts."""
        return self.parts[part]


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over all ranks. Gradients are averaged, never parameters or their updates."""
    for parameter in model.parameters():
        if parameter.grad is not None:  # a layer that was not used has none
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()


def batches(part: Subset[tuple[Tensor, ...]], size: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of an epoch. The part is shuffled for each epoch, and never exchanged with other ranks."""
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
    for first in range(0, len(part) - size + 1, size):  # equal batches: their mean is the mean over all samples
        images, labels = zip(*(part[index] for index in order[first : first + size]), strict=True)
        yield torch.stack(images), torch.stack(labels)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    train = dataset()
    train = TensorDataset(*train[: len(train) // world * world])  # parts of equal length: equally many steps
    parts = DataPartitioner(train, [1 / world] * world)
    torch.manual_seed(SEED)  # the same initial weights on every rank
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(EPOCHS):
        total = torch.zeros(2)
        for images, labels in batches(parts.use(rank), GLOBAL_BATCH // world, epoch):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            average_gradients(model)
            optimizer.step()  # after every batch
            total += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(total)  # the loss of all samples, not only of this rank's
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.4f}")
    compare_with_one_process(model, parts, total[0] / total[1])
    dist.destroy_process_group()


def compare_with_one_process(model: nn.Module, parts: DataPartitioner, last_loss: Tensor) -> None:
    """Train again in this process alone, with the batches of all ranks joined; compare weights and the last loss."""
    world = dist.get_world_size()
    first_batches = [next(batches(parts.use(0), GLOBAL_BATCH // world, epoch))[0] for epoch in (0, 1)]
    assert not torch.equal(*first_batches), "two epochs have the same order"
    torch.manual_seed(SEED)
    control = network()
    of_control = torch.optim.SGD(control.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(EPOCHS):
        losses = []
        of_ranks = [batches(parts.use(other), GLOBAL_BATCH // world, epoch) for other in range(world)]
        for together in zip(*of_ranks, strict=True):
            images, labels = (torch.cat(tensors) for tensors in zip(*together, strict=True))
            of_control.zero_grad()
            loss = functional.cross_entropy(control(images), labels)
            loss.backward()
            of_control.step()
            losses.append(loss.item())
    difference = max((a - b).abs().max().item() for a, b in zip(model.parameters(), control.parameters(), strict=True))
    if dist.get_rank() == 0:
        print(f"largest difference of a weight between {world} ranks and one process: {difference:.1e}")
    assert difference < 1e-9, difference
    assert torch.isclose(last_loss, torch.tensor(losses).mean(), rtol=1e-4), (last_loss, losses)


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
