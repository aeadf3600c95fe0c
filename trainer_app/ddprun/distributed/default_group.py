"""The process group that a script has initialized, if it has: how its ranks agree. A script without one is alone.

Nothing is imported for a script that has not imported torch.distributed itself.
"""

import os
import sys
from typing import Any

_CHUNK = 64 * 2**20  # bytes of a broadcast at once: memory of the GPU, with NCCL


def group() -> Any:
    """Return ``torch.distributed`` if this process shares a process group with other ranks, else None."""
    dist = sys.modules.get("torch.distributed")
    shared = dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist if shared else None


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: of the process group, else as the launcher has set them."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() else 0, int(size) if size.isdecimal() else 1


def any_rank(value: bool) -> bool:
    """Return whether ``value`` is true on any rank; every rank calls it."""
    dist = group()
    if dist is None:
        return value
    import torch

    number = torch.tensor([int(value)], device=_device(dist))
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return bool(number.item())


def from_rank_zero(content: bytes | memoryview) -> bytes | bytearray | memoryview:
    """Return rank 0's ``content`` on every rank, which all call it; that of the other ranks is not used."""
    dist = group()
    if dist is None:
        return content
    import torch

    is_zero, device = dist.get_rank() == 0, _device(dist)
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, src=0)
    received = bytearray(0 if is_zero else int(size.item()))
    for start in range(0, int(size.item()), _CHUNK):
        # A copy of rank 0's part, because torch takes no memory that cannot be written; the other ranks' own memory.
        part = bytearray(content[start : start + _CHUNK]) if is_zero else memoryview(received)[start : start + _CHUNK]
        own = torch.frombuffer(part, dtype=torch.uint8)
        shared = own.to(device)
        dist.broadcast(shared, src=0)
        if not is_zero and shared is not own:
            own.copy_(shared)
    return content if is_zero else received


def _device(dist: Any) -> Any:
    """Return the device of the group's collectives: the CPU if the group has a backend for it, as gloo is."""
    import torch

    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return getattr(dist.group.WORLD, "bound_device_id", None) or torch.device("cuda", torch.cuda.current_device())
