"""The networks. None has BatchNorm or Dropout: both would tie the result to how a batch is split over ranks.

``train`` builds one on each rank, ``inspect_checkpoint`` one to fill with saved weights.
"""

from __future__ import annotations

import torch
from torch import nn

from ddptrain.config import Config
from ddptrain.data.sampling import derived_seed


def build(config: Config, device: torch.device) -> nn.Module:
    """The configured network, its weights drawn on the CPU from the seed alone, then moved to ``device``."""
    torch.manual_seed(derived_seed(config.seed, "weights"))
    model = plain(config.model).to(device=device, dtype=getattr(torch, config.dtype))
    # On these shapes a pooling layer is seven times faster so, and a first convolution's backward pass four times.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def plain(name: str) -> nn.Module:
    """The network ``cnn`` or ``mlp`` as PyTorch makes it."""
    return _cnn() if name == "cnn" else _mlp()


def _cnn() -> nn.Module:
    """Two 5×5 convolutions and one hidden layer; pooling before ReLU saves three quarters of the ReLUs."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 10))
