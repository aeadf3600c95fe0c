"""Data parallelism by hand: every rank trains on a part of the data, and gradients are averaged before each step.

    torchrun --nproc-per-node 2 -m ddptrain.lessons.tutorial

``sampler`` and ``ddp`` replace the parts of this file by torch's own, one after the other: compare them with diff.
"""

import os
import random
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch._dynamo  # before the group exists, see docs/torch-distributed/initialization.md
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from ddptrain.data.mnist import load

EPOCHS, GLOBAL_BATCH, SEED = 5, 32, 1234


class Partition(Dataset[tuple[Tensor, ...]]):
    """The samples of a dataset with the given indices."""

    def __init__(self, data: TensorDataset, indices: Sequence[int]) -> None:
        self.data, self.indices = data, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        sample: tuple[Tensor, ...] = self.data[self.indices[index]]
        return sample


class DataPartitioner:
    """Divides a dataset at random in parts of the given fractions, in the same way on every rank."""

    def __init__(self, data: TensorDataset, fractions: Sequence[float] = (0.7, 0.2, 0.1), seed: int = SEED) -> None:
        indices = list(range(len(data)))
        random.Random(seed).shuffle(indices)  # noqa: S311
        # The ends are rounded, not the lengths: three parts of .3333 would lose samples.
        ends = [round(len(data) * sum(fractions[: part + 1])) for part in range(len(fractions))]
        self.parts = [Partition(data, indices[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def use(self, part: int) -> Partition:
        """Return one of the parts."""
        return self.parts[part]


class Net(nn.Module):
    """Two convolutions and two linear layers. There is no dropout, so one process can repeat what many did."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2))
        x = functional.relu(self.fc1(x.flatten(1)))
        return functional.log_softmax(self.fc2(x), dim=1)


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over all ranks. Gradients are averaged, never parameters or their updates."""
    for parameter in model.parameters():
        if parameter.grad is not None:  # a layer that was not used has none
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()


def batches(part: Partition, size: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of an epoch. The part is shuffled for each epoch, and never exchanged with other ranks."""
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
    for first in range(0, len(part) - size + 1, size):  # equal batches: their mean is the mean over all samples
        images, labels = zip(*(part[index] for index in order[first : first + size]), strict=True)
        yield torch.stack(images), torch.stack(labels)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = datasets()
    train = TensorDataset(*train[: len(train) // world * world])  # parts of equal length: equally many steps
    parts = DataPartitioner(train, [1 / world] * world)
    torch.manual_seed(SEED)  # the same initial weights on every rank
    model = Net().double()  # in float32, rounding differences would grow with every step
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(EPOCHS):
        total = torch.zeros(2)
        for images, labels in batches(parts.use(rank), GLOBAL_BATCH // world, epoch):
            optimizer.zero_grad()
            loss = functional.nll_loss(model(images), labels)
            loss.backward()
            average_gradients(model)
            optimizer.step()  # after every batch
            total += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(total)  # the loss of all samples, not only of this rank's
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.4f}, accuracy {accuracy(model, test):.2%}")
    if rank == 0:
        compare_with_one_process(model, parts, float(total[0] / total[1]))
    dist.destroy_process_group()


def compare_with_one_process(model: nn.Module, parts: DataPartitioner, last_loss: float) -> None:
    """Train again in this process alone, with the batches of all ranks joined; compare weights and the last loss."""
    world = dist.get_world_size()
    torch.manual_seed(SEED)
    control = Net().double()
    optimizer = torch.optim.SGD(control.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(EPOCHS):
        losses = []
        of_ranks = [batches(parts.use(other), GLOBAL_BATCH // world, epoch) for other in range(world)]
        for together in zip(*of_ranks, strict=True):
            images, labels = (torch.cat(tensors) for tensors in zip(*together, strict=True))
            optimizer.zero_grad()
            loss = functional.nll_loss(control(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    difference = max((a - b).abs().max().item() for a, b in zip(model.parameters(), control.parameters(), strict=True))
    print(f"largest difference of a weight between {world} ranks and one process: {difference:.1e}")
    assert difference < 1e-9, difference
    mean = sum(losses) / len(losses)
    assert abs(last_loss - mean) < 1e-4 * mean, (last_loss, mean)


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test set: MNIST if DDPJOB_DATA_DIR is set, otherwise the digits of scikit-learn."""
    folder = os.environ.get("DDPJOB_DATA_DIR", "")
    data = load("mnist" if folder else "digits", folder)
    pairs = ((data.train_images, data.train_labels), (data.test_images, data.test_labels))
    train, test = (
        TensorDataset((torch.tensor(images)[:, None].double() / 255 - 0.1307) / 0.3081, torch.tensor(labels).long())
        for images, labels in pairs
    )
    return train, test


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Return the fraction of the test set that the model recognizes."""
    images, labels = test.tensors
    with torch.no_grad():
        return float((model(images).argmax(dim=1) == labels).double().mean())


if __name__ == "__main__":
    main()
