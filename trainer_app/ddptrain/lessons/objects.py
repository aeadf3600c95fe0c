"""Collectives of Python objects: dictionaries, strings, everything that can be pickled.

    torchrun --nproc-per-node 4 objects.py

They pickle the object, exchange its length and its bytes as tensors, and unpickle it: slow, and a peer that can send
bytes to the group can run code in it. They are for small things outside the training loop, such as a report per rank.
They need NumPy, which PyTorch does not install.
"""

import re
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "name": "abcdefgh"[rank % 8]}

    shared = [mine if rank == 0 else None]  # a list of equal length on every rank; src's values replace the others
    dist.broadcast_object_list(shared, src=0)
    show("broadcast_object_list, src=0", mine if rank == 0 else None, shared[0])
    assert shared == [{"rank": 0, "name": "a"}]

    part: list[Any] = [None]
    dist.scatter_object_list(part, [f"for rank {to}" for to in range(world)] if rank == 0 else None, src=0)
    show("scatter_object_list, src=0", None, part[0])
    assert part == [f"for rank {rank}"]

    everything: list[Any] = [None] * world  # as long as the world, not as the number of ranks of the example
    dist.all_gather_object(everything, mine)
    show("all_gather_object", mine, [entry["name"] for entry in everything])
    assert [entry["rank"] for entry in everything] == list(range(world))

    gathered = gather_objects(mine, dst=0)
    show("gather_objects, dst=0", mine, gathered and [entry["name"] for entry in gathered])
    assert gathered == (everything if rank == 0 else None)
    assert dist.get_backend(cpu_group()) == "gloo"
    cpu_group.cache_clear()  # the threads of a group that is still referred to can abort the process at its exit
    dist.destroy_process_group()


def gather_objects(mine: Any, dst: int) -> list[Any] | None:
    """Return the objects of all ranks on rank ``dst``, and None on the others.

    NCCL would copy the pickled bytes to the GPUs. They are exchanged by the CPU instead, in a group of their own.
    """
    places: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == dst else None
    dist.gather_object(mine, places, dst=dst, group=cpu_group())
    return places


@cache
def cpu_group() -> dist.ProcessGroup:
    """Return a group of all ranks for CPU tensors, which is made once.

    Every rank must call ``new_group``, and reaches this line, because every rank calls ``gather_objects``. In a branch
    that only rank 0 takes, it would wait for the other members until its timeout.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


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
