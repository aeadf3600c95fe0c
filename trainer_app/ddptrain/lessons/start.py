"""Starting: what a process must know to join a group, and the ways to tell it.

    torchrun --nproc-per-node 2 start.py
    python start.py        # without a launcher: torch.multiprocessing.spawn

Each process needs its rank, the number of all ranks, and a place where they meet. With gloo, ``init_process_group``
returns when all ranks have come to that place. It starts no process, and it does not look for GPUs.
"""

import argparse
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)


def main() -> None:
    outside_a_group()
    local = local_rank(sys.argv[1:])
    rank, world, file, url = by_variables(local)
    by_tcp(url, rank, world)
    by_file(file, local)
    one_missing(url, rank, world)


def get_rank() -> int:
    """Return the rank, or 0 without a group, so that the same program also runs as one process."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """Return the number of ranks, or 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def outside_a_group() -> None:
    """Before init_process_group, and after destroy_process_group, dist.get_rank() raises ValueError."""
    assert (get_rank(), get_world_size()) == (0, 1)
    try:
        dist.get_rank()
    except ValueError:
        return
    raise AssertionError("there is a group already")


def local_rank(arguments: Sequence[str]) -> int:
    """Return the number of this process on its machine, which selects its GPU.

    torchrun sets LOCAL_RANK. torch.distributed.launch, which is deprecated, sets it too and also passes an argument:
    ``--local-rank=N`` since PyTorch 2.0, ``--local_rank=N`` before. With its flag --use-env it passes no argument.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    return int(parser.parse_known_args(arguments)[0].local_rank)


def by_variables(local: int) -> tuple[int, int, str, str]:
    """Join by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, the default; agree on the places of the other ways."""
    dist.init_process_group("gloo", init_method="env://", timeout=TIMEOUT)
    rank, world = get_rank(), get_world_size()
    assert [str(rank), str(world)] == [os.environ["RANK"], os.environ["WORLD_SIZE"]]
    meet("env://", rank)
    places = torch.tensor([free_port(), time.time_ns()])  # a port of rank 0's machine, which will listen on it
    dist.broadcast(places, src=0)
    port, moment = places.tolist()
    dist.destroy_process_group()
    # The store of env:// is in the agent if torchrun is used. At an address of their own, rank 0 hosts it.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    file = Path(tempfile.gettempdir()) / f"ranks-{moment}-{rank - local}"  # one for each machine
    return rank, world, str(file), f"tcp://{os.environ['MASTER_ADDR']}:{port}"


def by_tcp(url: str, rank: int, world: int) -> None:
    """Join by the address of rank 0, with rank and world size as arguments: without them it is an error."""
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world, timeout=TIMEOUT)
    meet("tcp://HOST:PORT", rank)
    dist.destroy_process_group()


def by_file(file: str, local: int) -> None:
    """Join by a file on a shared disk that supports locks. It must be new: another group's file misleads the ranks.

    The ranks of each machine form a group of their own here, as a lesson cannot expect a disk that all machines share.
    """
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=local, world_size=size, timeout=TIMEOUT)
    total = torch.tensor([float(get_rank())])
    dist.all_reduce(total)
    assert (get_rank(), total.item()) == (local, sum(range(size)))
    show("file:///NEW-FILE: all_reduce of the ranks", [local], total.tolist())
    dist.destroy_process_group()


def one_missing(url: str, rank: int, world: int) -> None:
    """A group of one rank more than there are processes: all wait, and fail after the timeout."""
    try:
        missing = timedelta(seconds=1)
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world + 1, timeout=missing)
    except RuntimeError as error:
        if rank == 0:
            print(f"\n{world} of {world + 1} ranks started: {str(error).splitlines()[0]}")
        assert f"/{world + 1} clients joined" in str(error) or rank != 0, error
        return
    raise AssertionError("a group was formed without one of its ranks")


def meet(way: str, rank: int) -> None:
    """Check that the group is complete and that its ranks have their own numbers."""
    total = torch.tensor([float(get_rank())])
    dist.all_reduce(total)
    show(f"{way}: all_reduce of the ranks", [rank], total.tolist())
    assert get_rank() == rank
    assert total.item() == sum(range(get_world_size()))


def free_port() -> int:
    """Return a port that no program uses now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def spawned(index: int, world: int, port: int) -> None:
    """Be the rank that mp.spawn numbered: what a launcher does for other programs is a few variables."""
    rank = {"RANK": index, "LOCAL_RANK": index, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in rank.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    main()


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
    if "RANK" in os.environ:
        main()
    else:
        mp.spawn(spawned, args=(2, free_port()), nprocs=2)  # a free port: with a fixed one, two jobs would mix
