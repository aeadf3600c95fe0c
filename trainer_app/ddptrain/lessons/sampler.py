"""The same training with DistributedSampler and DataLoader in place of the partition by hand.

    torchrun --nproc-per-node 2 -m ddptrain.lessons.sampler

    diff trainer_app/ddptrain/lessons/tutorial.py trainer_app/ddptrain/lessons/sampler.py

The sampler shuffles the whole dataset in every epoch and gives rank r every ``world_size``-th index, beginning with r;
parts are not contiguous. It repeats some indices, so that all ranks get equally many. Without ``set_epoch`` the order
is the same in every epoch.
"""

import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from ddptrain.lessons.tutorial import EPOCHS, GLOBAL_BATCH, SEED, Net, accuracy, average_gradients, datasets


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = datasets()
    sampler, loader = loader_of(train, world, rank)
    torch.manual_seed(SEED)  # the same initial weights on every rank
    model = Net().double()  # in float32, rounding differences would grow with every step
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    orders = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        total = torch.zeros(2)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.nll_loss(model(images), labels)
            loss.backward()
            average_gradients(model)
            optimizer.step()  # after every batch
            total += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(total)  # the loss of all samples, not only of this rank's
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total[0] / total[1]:.4f}, accuracy {accuracy(model, test):.2%}")
    check(orders, sampler, loader, train.tensors[1])
    check_workers(rank, world)
    equal_weights(model)
    dist.destroy_process_group()


def loader_of(data: TensorDataset, world: int, rank: int) -> tuple[DistributedSampler[int], DataLoader[object]]:
    """Return the sampler of this rank, and a loader of its batches.

    pin_memory copies batches to memory from which a GPU can read directly.
    """
    sampler: DistributedSampler[int] = DistributedSampler(data, world, rank, shuffle=True, seed=SEED)
    loader: DataLoader[object] = DataLoader(
        data,
        batch_size=GLOBAL_BATCH // world,
        sampler=sampler,  # shuffle=True here would be refused: the sampler decides
        num_workers=0,  # worker processes that prepare batches; the images are in memory already
        pin_memory=torch.cuda.is_available(),
        generator=generator_of(rank),
    )
    return sampler, loader


def generator_of(rank: int) -> torch.Generator:
    """Return the generator that gives every worker process of this rank its seed.

    With it, random augmentation differs between workers and ranks, and can be repeated.
    """
    return torch.Generator().manual_seed(SEED + rank)


def check(
    orders: list[list[int]], sampler: DistributedSampler[int], loader: DataLoader[object], labels: Tensor
) -> None:
    """Check that every epoch had another order, which the loader takes, and that the ranks used every sample."""
    assert len(set(map(tuple, orders))) == len(orders), "two epochs had the same order: set_epoch was not called"
    taken = torch.cat([of_batch for _, of_batch in loader])
    assert torch.equal(taken, labels[list(sampler)]), "the loader does not take the sampler's samples"
    samples, world = len(labels), dist.get_world_size()
    used = torch.zeros(samples)
    for index in orders[0]:
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
    of_ranks: list[list[int]] = [[]] * world
    dist.all_gather_object(of_ranks, first)
    assert len({seed for seeds in of_ranks for seed in seeds}) == 2 * world, "two worker processes have one seed"


def equal_weights(model: nn.Module) -> None:
    """Check that all ranks have the same weights, bit for bit."""
    for parameter in model.parameters():
        lowest, highest = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        assert torch.equal(lowest, highest), "the weights differ between ranks"


if __name__ == "__main__":
    main()
