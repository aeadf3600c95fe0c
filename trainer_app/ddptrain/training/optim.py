"""The optimizers, and the one-cycle learning rate, which is a pure function of the step and therefore never saved.

Used by the trainer. Not ``torch.optim``: constructing any of its classes imports ``torch._dynamo``, which takes longer
than ``import torch`` itself. AdamW and SGD call the same fused kernels, so their updates are those of ``torch.optim``,
bit for bit, and the state has the same format.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ddptrain.config import Config
from ddptrain.training import muon

ParameterState = dict[str, torch.Tensor]  # what the rule of a parameter remembers, by the names of torch.optim
_WARM_UP = 0.2  # share of all steps with a rising learning rate
_START, _END = 1 / 25, 1 / 10_000  # of the peak
_BETAS, _EPSILON = (0.7, 0.9), 1e-8
_MOMENTUM = 0.9
_MUON_SCALE = 10.0  # times --lr, because an orthogonal update is small in every entry


@dataclass
class ParameterGroup:
    """Parameters with the same rule and the same hyperparameters.

    Attributes:
        update: applies one step to those parameters of the group that have a gradient.
        scale: factor of the step's learning rate for this group.
    """

    parameters: list[nn.Parameter]
    update: Callable[[list[nn.Parameter], list[ParameterState], float, torch.Tensor | None], None]
    scale: float = 1.0


@dataclass
class Optimizer:
    """Updates the parameters of ``groups`` from their gradients.

    Attributes:
        parameters: those of the model; their positions are the keys of the state, as in ``torch.optim``.
        learning_rate: of the next step.
        state: of each parameter; empty before its first step.
    """

    parameters: list[nn.Parameter]
    groups: list[ParameterGroup]
    learning_rate: float = 0.0
    state: dict[nn.Parameter, ParameterState] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, found_inf: torch.Tensor | None = None) -> None:
        """Update every parameter that has a gradient.

        Args:
            found_inf: 1.0 on the device if the loss is not finite, and then weights and state stay as they are; None
                if the host has seen that it is finite.
        """
        for group in self.groups:
            parameters = [p for p in group.parameters if p.grad is not None]
            if parameters:
                states = [self.state.setdefault(p, {}) for p in parameters]
                group.update(parameters, states, self.learning_rate * group.scale, found_inf)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of ``torch.optim``; the hyperparameters are in the run's configuration."""
        positions = range(len(self.parameters))
        state = {n: dict(self.state[self.parameters[n]]) for n in positions if self.parameters[n] in self.state}
        return {"state": state, "param_groups": [{"params": list(positions)}]}

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        """Replace the state by one that ``state_dict`` returned."""
        owners = {self.parameters[int(n)]: state for n, state in loaded["state"].items()}
        self.state = {p: {key: value.to(p.device) for key, value in state.items()} for p, state in owners.items()}


def build(config: Config, model: nn.Module) -> Optimizer:
    """Return the configured optimizer; the trainer sets the learning rate of each step."""
    parameters, decay = list(model.parameters()), config.weight_decay
    if config.optimizer == "sgd":
        return Optimizer(parameters, [ParameterGroup(parameters, partial(sgd, weight_decay=decay))])
    if config.optimizer == "adamw":
        return Optimizer(parameters, [ParameterGroup(parameters, partial(adamw, weight_decay=decay))])
    matrices = muon.matrices(parameters)
    chosen = {id(parameter) for parameter in matrices}
    others = [p for p in parameters if id(p) not in chosen]
    by_muon = ParameterGroup(matrices, partial(muon.update, weight_decay=decay), _MUON_SCALE)
    return Optimizer(parameters, [by_muon, ParameterGroup(others, partial(adamw, weight_decay=decay))])


def adamw(
    parameters: list[nn.Parameter], states: list[ParameterState], learning_rate: float,
    found_inf: torch.Tensor | None = None, *, weight_decay: float,
) -> None:  # fmt: skip
    """Apply one step of AdamW (Loshchilov and Hutter, arXiv:1711.05101) with betas .7/.9 in one fused kernel."""
    for parameter, state in zip(parameters, states, strict=True):
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        [*parameters], gradients(parameters),
        [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states], [], steps,
        lr=learning_rate, beta1=_BETAS[0], beta2=_BETAS[1], weight_decay=weight_decay, eps=_EPSILON,
        amsgrad=False, maximize=False, found_inf=found_inf,
    )  # fmt: skip
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def sgd(
    parameters: list[nn.Parameter], states: list[ParameterState], learning_rate: float,
    found_inf: torch.Tensor | None = None, *, weight_decay: float,
) -> None:  # fmt: skip
    """Apply one step of SGD with momentum .9 in one fused kernel; the momentum becomes the first gradient."""
    for parameter, state in zip(parameters, states, strict=True):
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    torch._fused_sgd_(
        [*parameters], gradients(parameters), [state["momentum_buffer"] for state in states],
        lr=learning_rate, weight_decay=weight_decay, momentum=_MOMENTUM, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False, found_inf=found_inf,
    )  # fmt: skip


def gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients of the parameters that have a gradient."""
    return [p.grad for p in parameters if p.grad is not None]


def one_cycle(peak: float, step: int, total_steps: int) -> float:
    """Return the learning rate after ``step`` completed steps: along a cosine up to ``peak``, then down to near 0.

    The one-cycle policy of Smith and Topin, arXiv:1708.07120.
    """
    top = _WARM_UP * total_steps
    if step < top:
        return peak * _cosine(_START, 1.0, step / top)
    return peak * _cosine(1.0, _END, (step - top) / max(1.0, total_steps - 1 - top))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, share))) / 2
