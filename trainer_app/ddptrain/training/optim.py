"""The optimizers, and the one-cycle learning rate, which is a pure function of the step and therefore never saved.

Not ``torch.optim``: constructing any of its classes imports ``torch._dynamo``, which takes longer than ``import torch``
itself. AdamW and SGD call the same fused kernels, so their updates are those of ``torch.optim``, bit for bit, and the
state has the same format.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ddptrain.config import Config

ParameterState = dict[str, torch.Tensor]  # what the rule of a parameter remembers, by the names of torch.optim
_WARM_UP = 0.2  # share of all steps with a rising learning rate
_START, _END = 1 / 25, 1 / 10_000  # of the peak
_BETAS, _EPSILON = (0.7, 0.9), 1e-8
_MOMENTUM = 0.9
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a, b and c of the polynomial a·x + b·x³ + c·x⁵, from the post on Muon
_STEPS = 4  # of Newton and Schulz
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
    if config.optimizer != "muon":
        rule = {"sgd": sgd, "adamw": adamw}[config.optimizer]
        return Optimizer(parameters, [ParameterGroup(parameters, partial(rule, weight_decay=decay))])
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2][:-1]  # not the layer of the classes
    chosen = {id(parameter) for parameter in matrices}
    others = [p for p in parameters if id(p) not in chosen]
    by_muon = ParameterGroup(matrices, partial(muon, weight_decay=decay), _MUON_SCALE)
    return Optimizer(parameters, [by_muon, ParameterGroup(others, partial(adamw, weight_decay=decay))])


def adamw(
    parameters: list[nn.Parameter], states: list[ParameterState], learning_rate: float,
    found_inf: torch.Tensor | None = None, *, weight_decay: float,
) -> None:  # fmt: skip
    """Apply one step of AdamW (Loshchilov and Hutter, arXiv:1711.05101) with betas .7/.9 in one fused kernel."""
    for parameter, state in zip(parameters, states, strict=True):
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    steps = [state["step"] for state in states]
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        [*parameters], gradients(parameters),
        buffers("exp_avg", parameters, states), buffers("exp_avg_sq", parameters, states), [], steps,
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
    torch._fused_sgd_(
        [*parameters], gradients(parameters), buffers("momentum_buffer", parameters, states),
        lr=learning_rate, weight_decay=weight_decay, momentum=_MOMENTUM, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False, found_inf=found_inf,
    )  # fmt: skip


def muon(
    parameters: list[nn.Parameter], states: list[ParameterState], learning_rate: float,
    found_inf: torch.Tensor | None = None, *, weight_decay: float,
) -> None:  # fmt: skip
    """Apply one step of Muon with Nesterov momentum .9 and decoupled weight decay; a filter is a row of its matrix.

    Keller Jordan, https://kellerjordan.github.io/posts/muon: the singular values of the momentum are moved near 1, so
    all directions of a matrix learn equally fast.
    """
    rate: float | torch.Tensor = learning_rate
    weight: float | torch.Tensor = 1 - _MOMENTUM
    found = gradients(parameters)
    if found_inf is not None:
        found = [g.masked_fill(found_inf.bool(), 0.0) for g in found]  # a NaN remains a NaN if multiplied with 0
        acts = 1 - found_inf.double()
        rate, weight = learning_rate * acts, (weight * acts).to(parameters[0].dtype)
    momenta = buffers("momentum_buffer", parameters, states)
    for parameter, gradient, momentum in zip(parameters, found, momenta, strict=True):
        momentum.lerp_(gradient, weight)
        matrix = gradient.lerp(momentum, _MOMENTUM).flatten(1)
        scale = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
        # Not add_ with alpha: it rounds once, which a rate on the device cannot.
        change = orthogonalized(matrix) * (rate * scale)
        parameter.mul_(1 - rate * weight_decay).sub_(change.view(parameter.shape))


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Return U·S·Vᵀ of a matrix U·Σ·Vᵀ, where S has the singular values that four Newton-Schulz steps make of Σ/|Σ|.

    A step replaces X by (a·I + b·XXᵀ + c·(XXᵀ)²)·X. All these factors are polynomials of the first XXᵀ and commute, so
    they are multiplied with each other, as small squares, and only once with the long rows of X.
    """
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalized(matrix.T).T
    rows = matrix / matrix.norm().clamp(min=1e-7)
    a, b, c = _NEWTON_SCHULZ
    gram = rows @ rows.T
    factor = None
    for step in range(_STEPS):
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal().add_(a)
        factor = polynomial if factor is None else polynomial @ factor
        if step < _STEPS - 1:
            gram = polynomial @ gram @ polynomial
    assert factor is not None
    result: torch.Tensor = factor @ rows
    return result


def gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients of the parameters that have a gradient."""
    return [p.grad for p in parameters if p.grad is not None]


def buffers(name: str, parameters: list[nn.Parameter], states: list[ParameterState]) -> list[torch.Tensor]:
    """Return each parameter's tensor of the name, which is zero before its first step."""
    for parameter, state in zip(parameters, states, strict=True):
        if name not in state:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return [state[name] for state in states]


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
