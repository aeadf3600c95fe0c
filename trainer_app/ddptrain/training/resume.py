"""How a run begins: anew, from given weights, or where the newest checkpoint stands; the same on every rank.

``train`` calls it once. Only rank 0 needs to see the files: what it read travels to the others.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddptrain import weights
from ddptrain.config import Config, check_same_as_rank_zero
from ddptrain.distributed.process_group import Group
from ddptrain.errors import DataError
from ddptrain.reporting.metrics import Recorder


@dataclass(frozen=True)
class Beginning:
    """Where the run stands.

    Attributes:
        place: run and step of the checkpoint resumed from, or None.
        complete: that checkpoint is the end of the training.
        evaluation: the one recorded with it.
    """

    place: dict[str, int] | None
    complete: bool
    evaluation: dict[str, Any] | None

    @property
    def step(self) -> int:
        return self.place["step"] if self.place else 0


def begin(
    config: Config,
    group: Group,
    recorder: Recorder,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    say: Callable[[str], None],
) -> Beginning:
    """Claim a run and bring every rank's model and optimizer to its first step; collective.

    Raises:
        Mismatch, VolumeError, DataError: see recorder, same_run, weights. WeightsDiffer: the ranks do not agree.
    """
    group.crumbs.mark("resume")
    content = b""
    facts = {"config": _alike(config), "dataDigest": recorder.facts["dataDigest"]}

    def on_rank_zero() -> dict[str, Any]:
        nonlocal content
        found = recorder.resume(say)
        saved, content = found if found else (None, b"")
        manifest = saved.manifest if saved else {}
        complete = bool(manifest.get("complete"))
        if not saved and config.init_from:
            content = weights.read(Path(config.init_from))
        if not complete:
            recorder.claim(saved)
        return {
            "place": saved.place if saved else None,
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "complete": complete,
            "evaluation": manifest.get("evaluation"),
            "facts": facts,
        }

    told = group.from_rank_zero("resume", on_rank_zero, config.collective_timeout)
    check_same_as_rank_zero(told["facts"], facts, group.rank)
    beginning = Beginning(told["place"], told["complete"], told["evaluation"])
    if beginning.complete:
        return beginning
    if told["size"]:
        content = group.broadcast_bytes(content, told["size"])
        if hashlib.sha256(content).hexdigest() != told["sha256"]:
            raise DataError(
                f"the weights reached rank {group.rank} damaged", next_step="check the network, start again"
            )
    if beginning.place:
        _restore(model, optimizer, content, group.device)
        say(f"resumed from run {beginning.place['run']}, step {beginning.step}")
    elif config.init_from:
        weights.load(model, weights.parse(content, group.device), config.init_from)
        say(f"begins with the weights of {config.init_from}, SHA-256 {told['sha256'][:16]}…")
    weights.assert_alike(model, group)
    return beginning


def _alike(config: Config) -> dict[str, Any]:
    """What every rank must have been told alike: what decides the weights, and which collectives there will be."""
    values = config.identity() | {"zero": config.zero}
    if config.zero:  # before each save the optimizer's state is gathered
        values |= {"checkpoint_dir": bool(config.checkpoint_dir), "checkpoint_every": config.checkpoint_every}
    return values


def _restore(model: nn.Module, optimizer: torch.optim.Optimizer, content: bytes, device: torch.device) -> None:
    state = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
