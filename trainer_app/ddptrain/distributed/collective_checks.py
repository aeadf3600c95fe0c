"""Check every collective's result and measure its bandwidth, for ``preflight``.

The figures are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md there): ``algbw`` is bytes over time. ``busbw`` is
``algbw`` times the share of the data that each rank must send, which compares with the speed of the network.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddptrain.distributed.process_group import Group

SIZES = (2**20, 2**24)  # bytes
_WARM, _ROUNDS = 1, 4
_MAX = dist.ReduceOp.MAX
# Renamed in newer versions of PyTorch, which warn of the older names.
all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def failed_collectives(group: Group) -> list[str]:
    """Return the names of the collectives with a wrong result on this rank. Collective: every rank must call it."""
    rank, world = group.rank, group.world_size
    ours, total = [rank + 1], world * (world + 1) // 2
    # (name, values sent, values expected, call with the tensors received and sent)
    tests: list[tuple[str, Sequence[int], Sequence[int], Callable[[torch.Tensor, torch.Tensor], object]]] = [
        ("all_reduce", ours, [total], lambda received, sent: dist.all_reduce(received.copy_(sent))),
        ("all_reduce max", ours, [world], lambda received, sent: dist.all_reduce(received.copy_(sent), _MAX)),
        ("broadcast", ours, [world], lambda received, sent: dist.broadcast(received.copy_(sent), src=world - 1)),
        ("all_gather", ours, range(1, world + 1), all_gather_flat),
        ("reduce_scatter", range(rank + 1, rank + 1 + world), [total + world * rank], reduce_scatter_flat),
        (
            "all_to_all",
            range(rank * world, (rank + 1) * world),
            range(rank, world * world, world),
            dist.all_to_all_single,
        ),
        ("send and recv", ours, [(rank - 1) % world + 1], functools.partial(_send_and_recv, group)),
    ]
    wrong = []
    for name, values, expected, collective in tests:
        sent = torch.tensor(values, dtype=torch.float32, device=group.device)
        received = torch.zeros(len(expected), device=group.device)
        with group.heartbeat.waiting_in(name):
            collective(received, sent)
            if received.tolist() != list(expected):
                wrong.append(name)
    if group.gather({"rank": rank}, "objects") != [{"rank": peer} for peer in range(world)]:
        wrong.append("objects")
    return wrong


def _send_and_recv(group: Group, received: torch.Tensor, sent: torch.Tensor) -> None:
    """Send to the next rank and receive from the one before."""
    send = dist.P2POp(dist.isend, sent, (group.rank + 1) % group.world_size)
    receive = dist.P2POp(dist.irecv, received, (group.rank - 1) % group.world_size)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


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
    dist.all_reduce(taken, _MAX)
    return float(taken)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
