"""Check every collective's result and measure its bandwidth, for ``preflight``.

The figures are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md there): ``algbw`` is bytes over time. ``busbw`` is
``algbw`` times the share of the data that each rank must send, which compares with the speed of the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddptrain.distributed.process_group import Group

SIZES = (2**20, 2**24)  # bytes
_WARM, _ROUNDS = 1, 4
# Renamed in newer versions of PyTorch, which warn of the older names.
all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def failed_collectives(group: Group) -> list[str]:
    """Return the names of the collectives with a wrong result on this rank. Collective: every rank must call it."""
    rank, world = group.rank, group.world_size
    total = world * (world + 1) / 2
    tests: dict[str, Callable[[], bool]] = {
        "all_reduce": lambda: _all_reduce(group, dist.ReduceOp.SUM) == total,
        "all_reduce max": lambda: _all_reduce(group, dist.ReduceOp.MAX) == world,
        "broadcast": lambda: _broadcast(group) == world,
        "all_gather": lambda: _all_gather(group) == list(range(1, world + 1)),
        "reduce_scatter": lambda: _reduce_scatter(group) == total + world * rank,
        "all_to_all": lambda: _all_to_all(group) == [float(peer * world + rank) for peer in range(world)],
        "send and recv": lambda: _send_and_recv(group) == (rank - 1) % world + 1,
        "objects": lambda: _objects(group) == [{"rank": peer} for peer in range(world)],
    }
    wrong = []
    for name, test in tests.items():
        with group.heartbeat.waiting_in(name):
            if not test():
                wrong.append(name)
    return wrong


def measure_bandwidths(group: Group) -> list[dict[str, Any]]:
    """Return one row per collective and size: seconds of the slowest rank, algbw and busbw in GB/s. Collective."""
    world, rows = group.world_size, []
    for size in SIZES:
        whole = torch.ones(size // 4 // world * world, device=group.device)
        part = torch.ones(len(whole) // world, device=group.device)
        moves: list[tuple[str, float, Callable[..., object], tuple[object, ...]]] = [
            ("all_reduce", 2 * (world - 1) / world, dist.all_reduce, (whole,)),
            ("all_gather", (world - 1) / world, all_gather_flat, (whole, part)),
            ("reduce_scatter", (world - 1) / world, reduce_scatter_flat, (part, whole)),
            ("broadcast", 1.0, dist.broadcast, (whole, 0)),
        ]
        for name, factor, move, arguments in moves:
            with group.heartbeat.waiting_in(f"{name}, {size} bytes"):
                seconds = _seconds(group.device, move, arguments)
            algorithm = whole.numel() * 4 / seconds / 1e9
            rows.append(
                {"collective": name, "bytes": whole.numel() * 4, "seconds": seconds, "algbw": algorithm,
                 "busbw": algorithm * factor}
            )  # fmt: skip
            whole.fill_(1.0)
    return rows


def _seconds(device: torch.device, move: Callable[..., object], arguments: tuple[object, ...]) -> float:
    """Return the seconds per call on the slowest rank."""
    for call in range(_WARM + _ROUNDS):
        if call == _WARM:
            _synchronize(device)
            dist.barrier()
            started = time.perf_counter()
        move(*arguments)
    _synchronize(device)
    taken = torch.tensor([(time.perf_counter() - started) / _ROUNDS], dtype=torch.float64, device=device)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tensor(group: Group, *values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=group.device)


def _all_reduce(group: Group, operation: Any) -> float:
    value = _tensor(group, group.rank + 1)
    dist.all_reduce(value, operation)
    return float(value)


def _broadcast(group: Group) -> float:
    value = _tensor(group, group.rank + 1)
    dist.broadcast(value, src=group.world_size - 1)
    return float(value)


def _all_gather(group: Group) -> list[float]:
    values = torch.zeros(group.world_size, device=group.device)
    all_gather_flat(values, _tensor(group, group.rank + 1))
    return values.tolist()


def _reduce_scatter(group: Group) -> float:
    value = _tensor(group, 0.0)
    reduce_scatter_flat(value, _tensor(group, *(group.rank + 1.0 + at for at in range(group.world_size))))
    return float(value)


def _all_to_all(group: Group) -> list[float]:
    sent = _tensor(group, *(float(group.rank * group.world_size + peer) for peer in range(group.world_size)))
    received = torch.zeros_like(sent)
    dist.all_to_all_single(received, sent)
    return received.tolist()


def _send_and_recv(group: Group) -> float:
    received = _tensor(group, 0.0)
    send = dist.P2POp(dist.isend, _tensor(group, group.rank + 1), (group.rank + 1) % group.world_size)
    receive = dist.P2POp(dist.irecv, received, (group.rank - 1) % group.world_size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return float(received)


def _objects(group: Group) -> list[Any]:
    gathered: list[Any] = [None] * group.world_size
    dist.all_gather_object(gathered, {"rank": group.rank})
    return gathered
