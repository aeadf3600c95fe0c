"""The networks. None has BatchNorm or Dropout: the result of both depends on how a batch is divided among ranks.

Used by the trainer and by inference.
"""

import torch
from torch import nn

from ddptrain.config import Config
from ddptrain.data.sampling import derived_seed


def build(config: Config, device: torch.device) -> nn.Module:
    """Return the configured network with weights that depend on the seed alone, on ``device``."""
    torch.manual_seed(derived_seed(config.seed, "weights"))
    model = plain(config.model).to(device=device, dtype=getattr(torch, config.dtype))
    # With channels_last, pooling is seven times faster on these shapes, the backward pass of conv1 four times.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class ChannelsLastFlatten(nn.Module):
    """Flattens (N, C, H, W) in the order H, W, C: a view of a channels-last tensor, where ``nn.Flatten`` copies.

    The copy's gradient has another layout than the activations, which made the ReLU before it several times slower.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, H·W·C)."""
        return x.permute(0, 2, 3, 1).flatten(1)


def plain(name: str) -> nn.Module:
    """Return the network ``strided``, ``cnn`` or ``mlp`` with PyTorch's default initialization and memory format."""
    if name == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 10))
    if name == "strided":  # no feature map is larger than 12×12, so a step costs a third of the cnn's
        convolutions = [nn.Conv2d(1, 16, 6, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.MaxPool2d(2), nn.ReLU()]
        flat = [ChannelsLastFlatten(), nn.Linear(32 * 5 * 5, 128)]
    else:  # pooling before ReLU saves three quarters of the ReLUs
        convolutions = [nn.Conv2d(1, 16, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(16, 32, 5), nn.MaxPool2d(2)]
        flat = [nn.ReLU(), nn.Flatten(), nn.Linear(32 * 4 * 4, 128)]
    return nn.Sequential(*convolutions, *flat, nn.ReLU(), nn.Linear(128, 10))
