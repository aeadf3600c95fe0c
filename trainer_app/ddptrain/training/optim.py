"""The optimizer and its one-cycle learning rate, which is a pure function of the step and therefore never saved.

Used by the trainer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ddptrain.config import Config

_WARM_UP = 0.2  # share of all steps with a rising learning rate
_START, _END = 1 / 25, 1 / 10_000  # of the peak


def build(config: Config, model: nn.Module, *, sharded: bool = False) -> torch.optim.Optimizer:
    """Return fused AdamW with betas .7/.9, or SGD with momentum .9; the trainer sets the learning rate of each step.

    If ``sharded`` (ZeRO stage 1, Rajbhandari et al., arXiv:1910.02054) each rank updates some of the parameters, holds
    the optimizer's state for those alone, and broadcasts them. Each parameter is updated independently of the others,
    so the weights are those of the unsharded optimizer, bit for bit.
    """
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD if config.optimizer == "sgd" else torch.optim.AdamW
    settings: dict[str, Any] = {"weight_decay": config.weight_decay, "fused": True}
    settings |= {"momentum": 0.9} if config.optimizer == "sgd" else {"betas": (0.7, 0.9)}
    if sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), optimizer, **settings)
    return optimizer(model.parameters(), **settings)


def learning_rate(lr: float, step: int, total_steps: int) -> float:
    """Return the learning rate of the step after ``step`` completed ones: cosine up to ``lr``, cosine down to near 0.

    The one-cycle policy of Smith and Topin, arXiv:1708.07120.
    """
    top = _WARM_UP * total_steps
    if step < top:
        return lr * _cosine(_START, 1.0, step / top)
    return lr * _cosine(1.0, _END, (step - top) / max(1.0, total_steps - 1 - top))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, share))) / 2
