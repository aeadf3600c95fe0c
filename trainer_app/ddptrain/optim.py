"""The optimizer and its one-cycle learning rate, a pure function of the step: nothing of it is ever saved."""

from __future__ import annotations

import math

import torch
from torch import nn

from ddptrain.config import Config

_WARM_UP = 0.2  # share of all steps on the way up
_START, _END = 1 / 25, 1 / 10_000  # of the peak


def build(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW with betas .7/.9, or SGD with momentum .9."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            model.parameters(), lr=config.lr, momentum=0.9, weight_decay=config.weight_decay, fused=True
        )
    return torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.7, 0.9), weight_decay=config.weight_decay, fused=True
    )


def learning_rate(peak: float, step: int, total_steps: int) -> float:
    """Learning rate of the step after ``step`` completed ones: cosine up to ``peak``, cosine down to almost nothing.

    The one-cycle policy of Smith and Topin, arXiv:1708.07120.
    """
    top = _WARM_UP * total_steps
    if step < top:
        return peak * _cosine(_START, 1.0, step / top)
    return peak * _cosine(1.0, _END, (step - top) / max(1.0, total_steps - 1 - top))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Put ``rate`` into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, share))) / 2
