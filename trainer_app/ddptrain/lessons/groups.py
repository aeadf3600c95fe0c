"""Groups: collectives among some of the ranks, and barriers.

    torchrun --nproc-per-node 4 groups.py

All ranks must call ``new_group`` for every group and in the same order, also those that are not members. ``src`` and
``dst`` are global ranks, in a group too.
"""

import re
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    halves(rank, world)
    global_ranks(rank, world)
    one_after_the_other(rank)
    missing_rank(rank, world)
    not_called_by_all(rank, world)
    dist.destroy_process_group()


def halves(rank: int, world: int) -> None:
    """Even and odd ranks sum among themselves, at the same time."""
    members = [list(range(parity, world, 2)) for parity in (0, 1)]
    groups = [dist.new_group(ranks) for ranks in members if ranks]  # both groups, on every rank
    mine = members[rank % 2]
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=groups[rank % 2])
    show("all_reduce among the even, and among the odd ranks", [rank], tensor.tolist())
    assert tensor.item() == sum(mine)
    assert dist.get_rank(groups[rank % 2]) == mine.index(rank), "a rank in a group counts its members"


def global_ranks(rank: int, world: int) -> None:
    """The source of a broadcast in a group is named by its global rank, here the last one."""
    last = world - 1
    upper = dist.new_group(list(range(world // 2, world)))
    tensor = torch.tensor([float(rank)])
    if rank >= world // 2:
        dist.broadcast(tensor, src=last, group=upper)
    show(f"broadcast in the group of the upper half, src={last}", [rank], tensor.tolist())
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
    show("barrier while rank 0 prepares 0.2 s", "", "passed after rank 0" if passed >= finished.item() else "too early")
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
    show(f"monitored_barrier without rank {world - 1}", "", error.splitlines()[0][:110] if error else "")
    if rank == 0 and world > 1:
        assert str(world - 1) in error, error


def not_called_by_all(rank: int, world: int) -> None:
    """With gloo, new_group does not wait for ranks that are not members. What it misses shows later, if at all."""
    members, ends = sorted({0, world - 1}), "no group"
    if rank in members:
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group(members))
        assert total.item() == len(members), "the members alone make a group that works"
    if rank == 0:
        dist.new_group([0])  # returns at once. But from here on, rank 0 has made one group more than the others:
        try:
            dist.new_group(members, timeout=timedelta(seconds=1))  # and rank 0 waits for the last rank
            ends = "made"
        except RuntimeError as error:
            ends = type(error).__name__
        assert ends == ("made" if world == 1 else "DistStoreError")
    show(f"new_group({members}) on rank 0 alone", "", ends)


def show(title: str, before: Any, after: Any) -> None:
    """Print on rank 0 what every rank had before and has after."""
    text = re.sub(r"\.0\b", "", f"{before} -> {after}")  # 2.0 is printed as 2
    line = torch.frombuffer(bytearray(text.encode().ljust(500)[:500]), dtype=torch.uint8)
    lines = [torch.empty_like(line) for _ in range(dist.get_world_size())]
    dist.all_gather(lines, line)
    if dist.get_rank() == 0:
        print(f"\n{title}")
        for rank, line in enumerate(lines):
            print(f"  rank {rank}: {bytes(line.tolist()).decode().rstrip()}", flush=True)


if __name__ == "__main__":
    main()
