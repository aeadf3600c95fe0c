"""Whether a run may continue a checkpoint, and whether a rank trains the same as rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.config import Config
from ddptrain.distributed.device import numerics
from ddptrain.errors import ConfigMismatch, DataMismatch


def check_compatible(manifest: Mapping[str, Any], facts: Mapping[str, Any], root: Path) -> None:
    """Refuse to resume from the checkpoint of another training.

    Raises:
        ConfigMismatch: with the settings that differ. DataMismatch: the data differ.
    """
    if differ := _differences(Config.identity_of(manifest), facts["config"]):
        raise ConfigMismatch(
            f"the checkpoints in {root} belong to another configuration: {differ}",
            hint="resuming would mix two trainings",
            next_step="use the old settings, or a new --checkpoint-dir",
        )
    if manifest["dataDigest"] != facts["dataDigest"]:
        raise DataMismatch(
            f"the checkpoints in {root} were trained on other data: {manifest['dataDigest'][:16]}…, "
            f"now {facts['dataDigest'][:16]}…",
            hint="another volume is mounted as data directory",
            next_step="mount the old data, or use a new --checkpoint-dir",
        )


def check_same_as_rank_zero(theirs: Mapping[str, Any], facts: Mapping[str, Any], rank: int) -> None:
    """Refuse to train with settings or data that differ from rank 0's; the weights would drift apart without an error.

    Raises:
        ConfigMismatch: with everything that differs. DataMismatch: only the data differ.
    """
    differ = _differences(theirs["config"], facts["config"])
    error = ConfigMismatch if differ else DataMismatch
    if theirs["dataDigest"] != facts["dataDigest"]:
        data = f"data {theirs['dataDigest'][:16]}… → {facts['dataDigest'][:16]}…"
        differ = f"{differ}, {data}" if differ else data
    if differ:
        raise error(
            f"rank {rank} has different settings from rank 0: {differ}",
            hint="a flag, a variable or the data volume of its node differs",
            next_step="start every node with the same settings; `ddptrain preflight` compares them all",
        )


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return what differs, as in ``lr 0.006 → 0.5``; empty if nothing does."""
    return ", ".join(f"{k} {theirs.get(k)!r} → {v!r}" for k, v in ours.items() if theirs.get(k) != v)


def numerics_changes(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Return the facts that differ from the manifest's; an older manifest may lack some of them."""
    return [
        f"{key} was {manifest[key]}, is {facts[key]}"
        for key in (*numerics(), "bf16")
        if key in manifest and key in facts and manifest[key] != facts[key]
    ]
