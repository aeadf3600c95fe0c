"""Groups: collectives among some of the ranks, and barriers.

    torchrun --nproc-per-node 4 -m ddptrain.lessons.groups

All ranks call ``new_group`` for every group and in the same order, also those that are not members. ``src`` and ``dst``
are global ranks, in a group too.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ddptrain.lessons.draw import draw


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    halves(rank, world)
    global_ranks(rank, world)
    one_after_the_other(rank)
    missing_rank(rank, world)
    dist.destroy_process_group()


def halves(rank: int, world: int) -> None:
    """Even and odd ranks sum among themselves, at the same time."""
    members = [list(range(parity, world, 2)) for parity in (0, 1)]
    groups = [dist.new_group(ranks) for ranks in members if ranks]  # both groups, on every rank
    mine = members[rank % 2]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=groups[rank % 2])
    draw("all_reduce among the even, and among the odd ranks", [rank], tensor)
    assert tensor.item() == sum(mine)
    assert dist.get_rank(groups[rank % 2]) == mine.index(rank), "a rank in a group counts its members"


def global_ranks(rank: int, world: int) -> None:
    """The source of a broadcast in a group is named by its global rank, here the last one."""
    last = world - 1
    upper = dist.new_group(list(range(world // 2, world)))
    tensor = torch.tensor([float(rank)])
    if rank >= world // 2:
        dist.broadcast(tensor, src=last, group=upper)
    draw(f"broadcast in the group of the upper half, src={last}", [rank], tensor)
    assert tensor.item() == (last if rank >= world // 2 else rank)


def one_after_the_other(rank: int) -> None:
    """Rank 0 prepares something, the others wait at the barrier. Ranks do not run in step by themselves."""
    finished = torch.zeros(1, dtype=torch.float64)
    if rank == 0:
        time.sleep(0.2)  # the preparation, for example a download
        finished.fill_(time.monotonic())  # one clock for all processes of a machine
    dist.barrier()
    passed = time.monotonic()
    dist.broadcast(finished, src=0)
    draw("barrier while rank 0 prepares 0.2 s", "", "passed after rank 0" if passed >= finished.item() else "too early")
    assert passed >= finished.item()


def missing_rank(rank: int, world: int) -> None:
    """monitored_barrier names the rank that does not come; barrier would only time out. It exists for gloo only."""
    apart = dist.new_group(timeout=timedelta(seconds=20))
    error = ""
    if world > 1 and rank != world - 1:
        try:
            dist.monitored_barrier(group=apart, timeout=timedelta(seconds=1), wait_all_ranks=True)
        except RuntimeError as raised:
            error = str(raised)
    draw(f"monitored_barrier without rank {world - 1}", "", error.splitlines()[0][:110] if error else "")
    if rank == 0 and world > 1:
        assert str(world - 1) in error, error


if __name__ == "__main__":
    main()
