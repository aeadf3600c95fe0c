"""Read weights from a file, load them into a model, and check that all ranks start with the same.

DDP broadcasts rank 0's weights when it wraps a model and never compares them, so a rank with other weights would not be
noticed. Used at the start of a training, and by ``inference``.
"""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddprun.distributed.process_group import Group
from ddprun.errors import ConfigMismatch, DataCorrupt, DataMissing
from ddptrain.errors import WeightsDiffer

StateDict = Mapping[str, torch.Tensor]


def digest(state: StateDict) -> str:
    """Return the SHA-256 of names, types, shapes and values; the memory format does not matter."""
    sha = hashlib.sha256()
    for name in sorted(state):
        value = state[name].detach().cpu().contiguous()
        sha.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        sha.update(value.view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return sha.hexdigest()


def read(path: Path) -> bytes:
    """Return the content of a checkpoint or a state_dict.

    Raises:
        DataMissing: absent or unreadable.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataMissing(
            f"cannot read the weights {path}: {error.strerror}",
            hint="the volume may not be mounted there",
            next_step="give a checkpoint or a state_dict",
        ) from error


def parse(content: bytes, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Return the weights in a checkpoint (its ``model``) or in a bare state_dict. It executes no code of the file.

    Raises:
        DataCorrupt: the content is neither of the two.
    """
    try:
        loaded: Any = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except Exception as error:  # the unpickler raises many types on other content
        reason = str(error).partition("\n")[0].partition(". ")[0][:200] or type(error).__name__
        raise DataCorrupt(
            f"torch.load cannot read the weights: {reason}",
            next_step="give a checkpoint of ddptrain, or a file with a state_dict",
        ) from error
    state = loaded.get("model", loaded) if isinstance(loaded, dict) else None
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    ):
        raise DataCorrupt("the file of weights has no state_dict", next_step="write model.state_dict() into the file")
    return state


def load(model: nn.Module, state: StateDict, origin: str) -> None:
    """Copy ``state`` into ``model``.

    Raises:
        ConfigMismatch: names or shapes differ.
    """
    ours = model.state_dict()
    differ = sorted(set(ours) ^ set(state)) + [n for n in ours if n in state and ours[n].shape != state[n].shape]
    if differ:
        raise ConfigMismatch(
            f"the weights in {origin} do not fit this model: {', '.join(differ[:4])}"
            + (f" and {len(differ) - 4} more" if len(differ) > 4 else ""),
            hint="they are of another --model",
            next_step="choose the --model they were trained with",
        )
    model.load_state_dict(dict(state))


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
