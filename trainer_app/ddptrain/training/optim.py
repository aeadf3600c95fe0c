"""The optimizer and its one-cycle learning rate, a pure function of the step: nothing of the latter is ever saved.

``train`` builds the one and sets the other before each step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ddptrain.config import Config

_WARM_UP = 0.2  # share of all steps on the way up
_START, _END = 1 / 25, 1 / 10_000  # of the peak


def build(config: Config, model: nn.Module, *, world_size: int = 1) -> torch.optim.Optimizer:
    """Fused AdamW with betas .7/.9, or SGD with momentum .9; with ``--zero`` its state spread over the ranks.

    ZeRO stage 1 (Rajbhandari et al., arXiv:1910.02054): each rank updates some of the parameters and holds the
    optimizer's state for these alone; then the parameters are broadcast. An update is computed for each parameter by
    itself, so the weights are those of the unsharded optimizer, bit for bit.
    """
    way: type[torch.optim.Optimizer] = torch.optim.SGD if config.optimizer == "sgd" else torch.optim.AdamW
    settings: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    settings |= {"momentum": 0.9} if config.optimizer == "sgd" else {"betas": (0.7, 0.9)}
    if config.zero and world_size > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), way, **settings)
    return way(model.parameters(), **settings)


def consolidate(optimizer: torch.optim.Optimizer) -> None:
    """Bring sharded state together on rank 0, whose ``state_dict`` is then that of the unsharded optimizer.

    Collective where the optimizer is sharded, nothing elsewhere.
    """
    gather = getattr(optimizer, "consolidate_state_dict", None)
    if gather:
        gather(to=0)


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
