"""Messages from one rank to one other: send and recv, their forms that do not wait, and what goes wrong with them.

    torchrun --nproc-per-node 4 p2p.py

A message has no name. The first recv from a rank gets its first send, so both sides agree on the number, order, size
and type of all messages. Ranks form pairs here: 0 and 1, 2 and 3. A last rank without a partner only looks on.
"""

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 120  # seconds: longer than the start of four processes on a busy machine


def main() -> None:
    # Before the group exists: a process with running threads must not fork.
    mistakes = [unmatched(), wrong_size()] if os.environ["RANK"] == "0" else []
    dist.init_process_group("gloo", timeout=timedelta(seconds=4 * TIMEOUT))
    rank, world = dist.get_rank(), dist.get_world_size()
    blocking(rank, world)
    not_blocking(rank, world)
    in_order(rank, world)
    ring(rank, world)
    shorter(rank, world)
    for mistake in mistakes:
        print(f"\n{mistake}")
    dist.destroy_process_group()


def partner(rank: int, world: int) -> int | None:
    """Return the other rank of the pair, or None."""
    other = rank ^ 1
    return other if other < world else None


def blocking(rank: int, world: int) -> None:
    """send returns when the tensor may be changed again, recv when the message is there. One side calls each first."""
    other, tensor = partner(rank, world), torch.tensor([float(rank)])
    before = tensor.clone()
    if other is not None and rank < other:
        dist.send(tensor + 10, dst=other)
    elif other is not None:
        dist.recv(tensor, src=other)  # overwrites the tensor, which has the size of the message
    show("send rank + 10 to the partner, recv", before.tolist(), tensor.tolist())
    assert tensor.item() == (rank - 1 + 10 if other is not None and other < rank else rank)


def not_blocking(rank: int, world: int) -> None:
    """isend and irecv return at once. Until wait() has returned, the tensors belong to the backend."""
    other, sent, received = partner(rank, world), torch.tensor([rank + 0.5]), torch.zeros(1)
    before, arrived = sent.clone(), received
    if other is not None:
        time.sleep(0.2 * (rank % 2))  # a partner that is late: its message is not there, and it takes ours later
        receiving = dist.irecv(received, src=other)  # both directions at once: no rank waits first
        sending = dist.isend(sent, dst=other)
        assert sending is not None and receiving is not None
        sending.wait()
        sent.fill_(-1)  # without the wait, the late partner would get this
        receiving.wait()
        arrived = received.clone()
    show("isend and irecv between partners, wait", before.tolist(), arrived.tolist())
    assert arrived.item() == (0 if other is None else other + 0.5)


def in_order(rank: int, world: int, messages: int = 5) -> None:
    """Messages between two ranks arrive in the order in which they were sent."""
    other, received = partner(rank, world), [torch.zeros(1) for _ in range(messages)]
    if other is not None and rank < other:
        for number in range(messages):
            dist.send(torch.tensor([float(number)]), dst=other)
    elif other is not None:
        for place in received:
            dist.recv(place, src=other)
    show(f"{messages} messages from the lower to the higher partner", [], [place.item() for place in received])
    assert other is None or rank < other or [place.item() for place in received] == list(range(messages))


def ring(rank: int, world: int) -> None:
    """Every rank sends to the next and receives from the one before, in one batch: no order of calls can block it."""
    sent, received = torch.tensor([float(rank)]), torch.tensor([float(rank)])
    if world > 1:
        batch = [
            dist.P2POp(dist.isend, sent, (rank + 1) % world),
            dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
    show("ring: batch_isend_irecv", sent.tolist(), received.tolist())
    assert received.item() == (rank - 1) % world


def shorter(rank: int, world: int) -> None:
    """gloo takes a message that is shorter than the tensor without an error: the rest of the tensor stays as it was."""
    other, tensor = partner(rank, world), torch.zeros(3)
    if other is not None and rank < other:
        dist.send(torch.tensor([7.0]), dst=other)
    elif other is not None:
        dist.recv(tensor, src=other)
    show("mistake: 1 number sent, 3 expected", [], tensor.tolist())
    assert tensor.tolist() == ([7, 0, 0] if other is not None and other < rank else [0, 0, 0])


# Two mistakes, each in processes of their own, because a group is not usable after them.


def unmatched() -> str:
    """A program for two ranks is started with four: ranks 2 and 3 wait for messages that no rank sends."""

    def for_two_ranks(rank: int) -> None:
        if rank == 0:
            dist.send(torch.zeros(1), dst=1)
        else:
            dist.recv(torch.zeros(1), src=0)

    began = time.monotonic()
    ends = _in_processes(4, for_two_ranks)
    assert (ends, time.monotonic() - began < TIMEOUT) == ([0, 0, 1, 1], True), ends
    return "a program for two ranks, started with four: ranks 2 and 3 get no message, and fail when rank 0 has left"


def wrong_size() -> str:
    """Rank 0 sends three numbers where rank 1 expects one: gloo aborts the process that gets more than it expects."""

    def disagree(rank: int) -> None:
        if rank == 0:
            dist.send(torch.zeros(3), dst=1)
        else:
            dist.recv(torch.zeros(1), src=0)

    ends = _in_processes(2, disagree)
    assert ends[1] == -signal.SIGABRT, ends
    return "3 numbers sent, 1 expected: gloo aborts the receiver with SIGABRT, and no except clause can catch it"


def _in_processes(world: int, work: Callable[[int], None]) -> list[int | None]:
    """Run ``work`` in ``world`` processes with a new process group; return the exit codes, -n after signal n."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        store = f"file://{folder}/store"
        ranks = [context.Process(target=_be_rank, args=(rank, world, store, work)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(2 * TIMEOUT)
            process.kill()  # only if it still runs
            process.join()
        return [process.exitcode for process in ranks]


def _be_rank(rank: int, world: int, store: str, work: Callable[[int], None]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the stack of the error is no part of the lesson
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT))
    work(rank)
    dist.destroy_process_group()


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
