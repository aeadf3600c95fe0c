"""Muon: momentum whose update is orthogonalized, for matrices and convolution filters.

Keller Jordan, https://kellerjordan.github.io/posts/muon. The singular values of the momentum are moved near 1 by a
polynomial, so all directions of a matrix learn equally fast. Used by ``optim``.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn

_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the polynomial a·x + b·x³ + c·x⁵, from the post
_STEPS = 4
_MOMENTUM = 0.9
_EPSILON = 1e-7


def matrices(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the weights of all layers but the last, whose outputs are the classes."""
    return [parameter for parameter in parameters if parameter.ndim >= 2][:-1]


def update(
    parameters: list[nn.Parameter], states: list[dict[str, torch.Tensor]], learning_rate: float,
    found_inf: torch.Tensor | None = None, *, weight_decay: float,
) -> None:  # fmt: skip
    """Apply one step with Nesterov momentum .9 and decoupled weight decay; a filter is a row of its matrix.

    Args:
        found_inf: as in the fused kernels: if it is 1.0 on the device, nothing changes.
    """
    rate: float | torch.Tensor = learning_rate
    weight: float | torch.Tensor = 1 - _MOMENTUM
    if found_inf is not None:
        acts = 1 - found_inf.double()
        rate, weight = learning_rate * acts, (weight * acts).to(parameters[0].dtype)
    for parameter, state in zip(parameters, states, strict=True):
        gradient = parameter.grad
        assert gradient is not None
        if found_inf is not None:
            gradient = gradient.masked_fill(found_inf.bool(), 0.0)  # a NaN remains a NaN if multiplied with 0
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        momentum = state["momentum_buffer"].lerp_(gradient, weight)
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
    rows = matrix / matrix.norm().clamp(min=_EPSILON)
    gram = rows @ rows.T
    factor = None
    for step in range(_STEPS):
        polynomial = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        polynomial.diagonal().add_(_A)
        factor = polynomial if factor is None else polynomial @ factor
        if step < _STEPS - 1:
            gram = polynomial @ gram @ polynomial
    assert factor is not None
    result: torch.Tensor = factor @ rows
    return result
