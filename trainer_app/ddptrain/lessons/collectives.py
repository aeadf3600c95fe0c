"""Collectives: every rank of a group calls the same operation, and each gets its part of the result.

    torchrun --nproc-per-node 4 collectives.py

Each function below shows one operation on every rank before and after, and checks the answer that a formula gives.
The forms with one tensor need no list and no copy, and are the ones that NCCL carries out directly.
"""

import re
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

# The names before torch 2.13 were all_gather_into_tensor and reduce_scatter_tensor.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    one_to_all(rank, world)
    all_to_one(rank, world)
    reduce_to_all(rank, world)
    reduce_to_one(rank, world)
    parts_to_all(rank, world)
    reduce_and_divide(rank, world)
    exchange_all(rank, world)
    together(rank, world)
    coalesced(rank, world)
    dist.destroy_process_group()


def one_to_all(rank: int, world: int) -> None:
    """broadcast copies rank 0's tensor; scatter divides rank 0's list."""
    tensor = torch.full((2,), float(rank))
    before = tensor.clone()
    dist.broadcast(tensor, src=0)
    show("broadcast, src=0", before, tensor)
    assert tensor.tolist() == [0, 0]

    parts = [torch.tensor([float(to + 1)]) for to in range(world)] if rank == 0 else None
    mine = torch.zeros(1)
    dist.scatter(mine, parts, src=0)  # the list is given on src only
    show("scatter, src=0", parts, mine)
    assert mine.item() == rank + 1


def all_to_one(rank: int, world: int) -> None:
    """gather collects a tensor of every rank in a list on rank 0, which has one place for each rank."""
    mine = torch.tensor([float(rank)])
    places = [torch.zeros(1) for _ in range(world)] if rank == 0 else None
    dist.gather(mine, places, dst=0)
    show("gather, dst=0", mine, places)
    assert places is None or [place.item() for place in places] == list(range(world))


def reduce_to_all(rank: int, world: int) -> None:
    """all_reduce combines the tensors of all ranks element by element, in place."""
    numbers = range(1, world + 1)  # rank r has r + 1
    product, total = torch.tensor([*numbers]).prod().item(), sum(numbers)
    answers = {
        ReduceOp.SUM: total, ReduceOp.PRODUCT: product, ReduceOp.MIN: 1, ReduceOp.MAX: world,
        ReduceOp.AVG: total / world,
    }  # fmt: skip
    for op, answer in answers.items():
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, op=op)
        show(f"all_reduce, {op.name}", [rank + 1], tensor)
        assert tensor.item() == answer, (op, tensor)

    all_and, all_or, all_xor = ~0, 0, 0
    for number in numbers:
        all_and, all_or, all_xor = all_and & number, all_or | number, all_xor ^ number
    for op, answer in ((ReduceOp.BAND, all_and), (ReduceOp.BOR, all_or), (ReduceOp.BXOR, all_xor)):
        bits = torch.tensor([rank + 1])  # integers: floating point has no bitwise operations
        dist.all_reduce(bits, op=op)
        show(f"all_reduce, {op.name}", f"{rank + 1:03b}", f"{bits.item():03b}")
        assert bits.item() == answer, (op, bits)

    try:
        dist.all_reduce(torch.tensor([rank + 1]), op=ReduceOp.AVG)
    except RuntimeError as error:
        show("all_reduce, AVG of integers with gloo", "integers", str(error)[:80])
    else:
        raise AssertionError("gloo has the mean of integers")


def reduce_to_one(rank: int, world: int) -> None:
    """reduce gives the sum to dst only. What the other ranks find in their tensors afterwards is not defined.

    With gloo and four ranks of ones, the tensors are 4, 3, 2 and 1: gloo passes partial sums from rank to rank towards
    dst, in place, and each rank keeps what it passed on. No scheduler accumulates anything. Use the tensor on dst only.
    """
    tensor = torch.ones(8)  # enough for gloo to divide them: with another dst, rank 0 would have a part of the sums
    dist.reduce(tensor, dst=0, op=ReduceOp.SUM)
    show("reduce, dst=0: only rank 0 has the sum", [1], tensor[:1])
    assert rank != 0 or tensor.tolist() == [world] * 8


def parts_to_all(rank: int, world: int) -> None:
    """all_gather gives every rank the tensors of all ranks, as a list or one after the other in one tensor."""
    mine = torch.tensor([float(rank), rank + 0.5])
    places = [torch.zeros(2) for _ in range(world)]
    dist.all_gather(places, mine)
    show("all_gather", mine, places)
    assert torch.stack(places).tolist() == [[r, r + 0.5] for r in range(world)]

    joined = torch.zeros(2 * world)
    all_gather_single(joined, mine)
    show("all_gather_single", mine, joined)
    assert joined.tolist() == [x for r in range(world) for x in (r, r + 0.5)]


def reduce_and_divide(rank: int, world: int) -> None:
    """reduce_scatter sums as all_reduce does, but every rank keeps only its part: ZeRO and FSDP divide gradients so."""
    parts = [torch.tensor([float(10 * rank + to)]) for to in range(world)]
    answer = sum(10 * r + rank for r in range(world))
    mine = torch.zeros(1)
    dist.reduce_scatter(mine, parts)
    show("reduce_scatter", parts, mine)
    assert mine.item() == answer

    mine = torch.zeros(1)
    reduce_scatter_single(mine, torch.cat(parts))
    show("reduce_scatter_single", torch.cat(parts), mine)
    assert mine.item() == answer


def exchange_all(rank: int, world: int) -> None:
    """all_to_all transposes: what rank a has for rank b arrives on b at place a. Experts of one model use it."""
    parts = [torch.tensor([float(10 * rank + to)]) for to in range(world)]
    places = [torch.zeros(1) for _ in range(world)]
    dist.all_to_all(places, parts)
    show("all_to_all", parts, places)
    assert [place.item() for place in places] == [10 * sender + rank for sender in range(world)]

    # In one tensor, and not equally large: every rank sends r + 1 numbers to rank r.
    sent = torch.full((world * (world + 1) // 2,), float(rank))
    received = torch.zeros((rank + 1) * world)
    dist.all_to_all_single(received, sent, [rank + 1] * world, [to + 1 for to in range(world)])
    show("all_to_all_single, rank r gets r + 1 numbers from each", sent, received)
    assert received.tolist() == [sender for sender in range(world) for _ in range(rank + 1)]


def together(rank: int, world: int) -> None:
    """Started together, waited for once: async_op returns before the operation is done, and wait() ends it."""
    tensors = [torch.full((2,), float(rank + add)) for add in range(3)]
    if rank == 0:
        time.sleep(0.2)  # a rank that is late: until wait() returns, the others have no sum
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()  # until then, neither read nor change the tensor
    sums, total = [tensor.tolist() for tensor in tensors], sum(range(world))
    show("three all_reduce, async_op=True", [[rank + add] * 2 for add in range(3)], sums)
    assert sums == [[total + add * world] * 2 for add in range(3)]


def coalesced(rank: int, world: int) -> None:
    """Several tensors of one type, in one exchange in place of one for each.

    torch warns that this function may go: join small tensors yourself, as DDP joins gradients in buckets.
    """
    tensors, total = [torch.full((size,), float(rank)) for size in (1, 2)], sum(range(world))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced(tensors)
    show("all_reduce_coalesced of two tensors", [[rank], [rank] * 2], tensors)
    assert [tensor.tolist() for tensor in tensors] == [[total], [total] * 2]


def show(title: str, before: Any, after: Any) -> None:
    """Print on rank 0 what every rank had before and has after."""
    text = re.sub(r"\.0\b", "", f"{plain(before)} -> {plain(after)}")  # 2.0 is printed as 2
    line = torch.frombuffer(bytearray(text.encode().ljust(500)[:500]), dtype=torch.uint8)
    lines = [torch.empty_like(line) for _ in range(dist.get_world_size())]
    dist.all_gather(lines, line)
    if dist.get_rank() == 0:
        print(f"\n{title}")
        for rank, line in enumerate(lines):
            print(f"  rank {rank}: {bytes(line.tolist()).decode().rstrip()}", flush=True)


def plain(value: Any) -> Any:
    """Return the value with lists in place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(part) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
