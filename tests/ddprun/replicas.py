"""Replicas of a model in one process, which exchange gradients as DistributedDataParallel does, each with its audit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddprun import replica_audit
from ddprun.launcher.replicas import Diverged, Replicas
from ddprun.replica_audit import SIZE, ReplicaAudit, read, read_names

Optimizers = Callable[[Any], torch.optim.Optimizer]


class Wrapped(SimpleNamespace):
    """What the audit reads of a DistributedDataParallel."""


def model(seed: int = 0, width: int = 16) -> nn.Module:
    """Return a model with layers, a buffer that is constant and a BatchNorm, in several groups."""
    torch.manual_seed(seed)
    made = nn.Sequential(
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width),
        nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4, bias=False),
    )  # fmt: skip
    made.register_buffer("positions", torch.randn(width))
    return made


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


class Group:
    """Ranks that train replicas; every step of them is audited."""

    def __init__(self, ranks: int = 3, module: nn.Module | None = None, optimizers: Optimizers = adamw) -> None:
        module = module or model()
        self.ranks, self.step_number = ranks, 0
        self.modules: list[Any] = [copy.deepcopy(module) for _ in range(ranks)]
        self.wrapped = [
            Wrapped(
                module=each, process_group=SimpleNamespace(size=lambda: ranks), require_backward_grad_sync=True,
                parameters_to_ignore=set(),
            )
            for each in self.modules
        ]  # fmt: skip
        self.optimizers = [optimizers(each.parameters()) for each in self.modules]
        self.memories = [bytearray(SIZE) for _ in range(ranks)]
        self.audits = [
            ReplicaAudit(memoryview(memory), ranks, partial(list, [each]), lambda: True, lambda: self.step_number)
            for memory, each in zip(self.memories, self.wrapped, strict=True)
        ]
        self.replicas = Replicas(ranks)
        self._given = [0.0] * ranks

    def step(self, *, is_averaged: bool = True) -> None:
        """Make a step of all ranks, each on samples of its own."""
        for rank, (module, optimizer) in enumerate(zip(self.modules, self.optimizers, strict=True)):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(1000 * self.step_number + rank)
            width = module[0].in_features
            module(torch.randn(8, width, generator=generator)).square().mean().backward()
        if is_averaged:
            for same in zip(*(module.parameters() for module in self.modules), strict=True):
                if same[0].grad is not None:
                    mean = torch.stack([one.grad for one in same]).mean(0)
                    for one in same:
                        one.grad.copy_(mean)
        for rank, optimizer in enumerate(self.optimizers):
            self.audits[rank].begin_step(optimizer)
            optimizer.step()
        self.step_number += 1

    def compare(self) -> Diverged | None:
        """Give the new records to the launcher's comparison, and return its verdict."""
        for rank, memory in enumerate(self.memories):
            records = [one for one in read(bytes(memory)) if one.time > self._given[rank]]
            if records:
                self._given[rank] = records[-1].time
            self.replicas.take(rank, records)
        self.replicas.turn()
        return self.replicas.verdict

    def run(self, steps: int, **options: bool) -> Diverged | None:
        """Make steps until there is a verdict, this number at most, and return it."""
        for _ in range(steps):
            self.step(**options)
            if found := self.compare():
                return found
        return None

    @property
    def plan(self) -> list[list[str]]:
        """The names of the tensors, by group."""
        [names] = read_names(bytes(self.memories[0])[replica_audit.RING :]).values()
        return names  # type: ignore[no-any-return]

    def group_of(self, name: str) -> int:
        return next(number for number, names in enumerate(self.plan) if name in names)

    def name(self, found: Diverged) -> str:
        _, _, group, place = found.tensor
        return self.plan[group][place]

    def first_after(self, name: str) -> int:
        """Return the first step that can show a change of a tensor that is made now."""
        groups, group = len(self.plan), self.group_of(name)
        return next(step for step in range(self.step_number, 10**9) if (step + 1) % groups == group)

    def tensor(self, rank: int, name: str) -> torch.Tensor:
        """Return the elements of a parameter or buffer, without its history."""
        found = dict(self.modules[rank].named_parameters()) | dict(self.modules[rank].named_buffers())
        tensor: torch.Tensor = found[name].detach()
        return tensor


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    """Flip a bit of an element, counted from the lowest."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = tensor.element_size()
    numbers = tensor.as_strided((tensor.numel(),), (1,)).view(kinds[size])
    mask = 1 << bit
    numbers[place] ^= mask - (1 << 8 * size) if mask >= 1 << 8 * size - 1 and size > 1 else mask


@pytest.fixture
def each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audit each step, whatever it costs."""
    audit_each_step(monkeypatch.setattr)


def audit_each_step(set_attribute: Callable[[object, str, object], None]) -> None:
    set_attribute(replica_audit, "_INTERVAL", 0.0)
    set_attribute(replica_audit, "_SHARE", 1e9)
