"""The optimizers make the updates of ``torch.optim``, and continue from its state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ddptrain.config import Config
from ddptrain.training import models, optim

CPU = torch.device("cpu")
STEPS = 25


def set_gradients(model: nn.Module, step: int) -> None:
    """Set gradients that depend on the step and the weights."""
    numbers = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, dtype=parameter.dtype, generator=numbers)
        parameter.grad = torch.empty_like(parameter).copy_(noise + parameter.detach())


def reference(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer for the configuration."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=config.weight_decay, fused=True)
    return torch.optim.AdamW(model.parameters(), betas=(0.7, 0.9), weight_decay=config.weight_decay, fused=True)


def test_the_learning_rate_rises_to_its_peak_and_falls_until_the_last_step() -> None:
    rates = [optim.one_cycle(0.5, step, 100) for step in range(100)]
    assert (rates[0], rates[20], rates[99]) == pytest.approx((0.5 / 25, 0.5, 0.5 / 10_000))
    assert rates[:21] == sorted(rates[:21]) and rates[20:] == sorted(rates[20:], reverse=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_equal_those_of_torch_optim_and_the_state_is_interchangeable(name: str, dtype: str) -> None:
    config = Config(optimizer=name, dtype=dtype, model="cnn")
    ours, theirs = models.build(config, CPU), models.build(config, CPU)
    optimizer, wanted = optim.build(config, ours), reference(config, theirs)
    for step in range(STEPS):
        if step == STEPS // 2:  # ours continues from theirs
            optimizer = optim.build(config, ours)
            optimizer.load_state_dict(copy.deepcopy(wanted.state_dict()))
        if step == STEPS // 2 + 3:  # and theirs from ours, which has no hyperparameters
            saved = copy.deepcopy(optimizer.state_dict()["state"])
            wanted = reference(config, theirs)
            wanted.load_state_dict({**wanted.state_dict(), "state": saved})
        rate = optim.one_cycle(0.01, step, STEPS)
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.learning_rate = wanted.param_groups[0]["lr"] = rate
        optimizer.step()
        wanted.step()
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other)
    ours_state, theirs_state = optimizer.state_dict()["state"], wanted.state_dict()["state"]
    assert ours_state.keys() == theirs_state.keys()
    for number, state in theirs_state.items():
        assert all(torch.equal(state[key], ours_state[number][key]) for key in state)


def test_muon_orthogonalizes_as_torch_optim_muon_does() -> None:
    torch.manual_seed(1)
    ours = nn.Parameter(torch.randn(32, 216, dtype=torch.float64))
    theirs = nn.Parameter(ours.detach().clone())
    wanted = torch.optim.Muon([theirs], lr=1.0, momentum=0.9, weight_decay=0.0, ns_steps=4)
    for _ in range(3):
        before, state = ours.detach().clone(), wanted.state[theirs]
        ours.grad = theirs.grad = torch.randn(32, 216, dtype=torch.float64)
        states = [{"momentum_buffer": state["momentum_buffer"].clone()} if state else {}]
        with torch.no_grad():
            optim.muon([ours], states, 1.0, weight_decay=0.0)
        wanted.step()
        expected = theirs.detach() - before
        # torch.optim.Muon computes in bfloat16, which has three decimal digits.
        assert (ours.detach() - before - expected).norm() / expected.norm() < 0.02
        with torch.no_grad():
            ours.copy_(theirs)


def test_muon_moves_all_singular_values_near_one_for_wide_and_tall_matrices() -> None:
    torch.manual_seed(2)
    for shape in ((24, 36), (128, 20)):
        found = torch.linalg.svdvals(optim.orthogonalized(torch.randn(shape, dtype=torch.float64)))
        assert 0.5 < found.min() <= found.max() < 1.3


def test_muon_updates_the_matrices_of_all_layers_but_the_last() -> None:
    by_muon, _ = optim.build(Config(), models.plain("cnn")).groups
    assert [tuple(p.shape) for p in by_muon.parameters] == [(16, 1, 5, 5), (32, 16, 5, 5), (128, 512)]
