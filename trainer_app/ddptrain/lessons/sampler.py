"""The same training with DistributedSampler and DataLoader in place of the partition by hand.

    torchrun --nproc-per-node 2 sampler.py

    diff tutorial.py sampler.py

The sampler shuffles the whole dataset in every epoch and gives rank r every ``world_size``-th index, beginning with r;
parts are not contiguous. It repeats some indices, so that all ranks get equally many. Without ``set_epoch`` the order
is the same in every epoch.
"""

import warnings
from datetime import timedelta

import torch
import torch._dynamo  # before the group exists: otherwise the group's threads outlive it
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

EPOCHS, GLOBAL_BATCH, SAMPLES, SEED = 3, 16, 161, 1234


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient by its mean over all ranks. Gradients are averaged, never parameters or their updates."""
    for parameter in model.parameters():
        if parameter.grad is not None:  # a layer that was not used has none
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()


def generator_of(rank: int) -> torch.Generator:
    """Return the generator that gives every worker process of this rank its seed.

    With it, random augmentation differs between workers and ranks, and can be repeated.
    """
    return torch.Generator().manual_seed(SEED + rank)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    train = dataset()
    sampler: DistributedSampler[int] = DistributedSampler(train, world, rank, seed=SEED)  # which shuffles
    # num_workers=N prepares batches in processes; on GPUs, pin_memory=True copies them to where a GPU can read them.
    loader = DataLoader(train, GLOBAL_BATCH // world, sampler=sampler, generator=generator_of(rank))
    torch.manual_seed(SEED)  # the same initial weights on every rank
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            average_gradients(model)
            optimizer.step()  # after every batch
            total += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(total)  # the loss of all samples, not only of this rank's
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.4f}")
    check_samples(sampler, len(train))
    check_workers(rank, world)
    compare_with_one_process(model, train, total[0] / total[1])
    dist.destroy_process_group()


def check_samples(sampler: DistributedSampler[int], samples: int) -> None:
    """Check that the ranks use every sample in an epoch, and few of them twice."""
    used, world = torch.zeros(samples), dist.get_world_size()
    for index in sampler:
        used[index] += 1
    dist.all_reduce(used)
    repeated = int(used.sum().item()) - samples
    assert used.min().item() == 1 and repeated == -samples % world
    if dist.get_rank() == 0:
        print(f"every sample was used once in an epoch, {repeated} of {samples} twice, by {world} ranks")


class Seeds(Dataset[int]):
    """Two samples, each of which is the seed of the process that loads it."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return torch.initial_seed()


def check_workers(rank: int, world: int) -> None:
    """Check that each of two worker processes on every rank has a seed of its own, and has it again in a new loader."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # also where a node has one CPU
    first, again = (
        list(DataLoader(Seeds(), batch_size=None, num_workers=2, generator=generator_of(rank))) for _ in range(2)
    )
    assert first == again, "the seeds cannot be repeated"
    of_ranks = [torch.zeros(2, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(of_ranks, torch.tensor(first))
    assert len(torch.cat(of_ranks).unique()) == 2 * world, "two worker processes have one seed"


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
