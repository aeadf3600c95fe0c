"""Check that all ranks start with the same weights.

DDP broadcasts rank 0's weights when it wraps a model and never compares them, so a rank with other weights would not be
noticed.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

from ddprun.distributed.process_group import Group
from ddptrain.errors import WeightsDiffer


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values; the memory format does not matter."""
    sha = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        sha.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        sha.update(value.view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return sha.hexdigest()


def check_equal_on_all_ranks(model: nn.Module, group: Group) -> None:
    """Compare the weights of all ranks by digest; collective.

    Raises:
        WeightsDiffer: with the ranks whose weights differ from rank 0's.
    """
    if group.world_size == 1:
        return
    digests = group.gather(digest(model.state_dict()), "all_gather of digests")
    different = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if different:
        raise WeightsDiffer(
            f"rank(s) {', '.join(map(str, different))} have different initial weights from rank 0",
            hint="their node has another version of ddptrain or torch, or another --seed",
            next_step="use the same image and flags on every node",
        )
