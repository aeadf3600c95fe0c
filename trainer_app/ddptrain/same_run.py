"""Whether two sets of facts mean one and the same training: a checkpoint's and ours, rank 0's and another rank's.

``recorder`` asks before it resumes, ``begin`` on every rank before the first step. Ranks that were told different
learning rates would begin with equal weights, exchange gradients, and drift apart without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddptrain.config import Config
from ddptrain.errors import Mismatch


def check_same_run(manifest: Mapping[str, Any], facts: Mapping[str, Any], root: Path) -> None:
    """Refuse to continue another run's weights.

    Raises:
        Mismatch: naming the settings that differ, or the data.
    """
    if differ := _differing(Config.identity_of(manifest), facts["config"]):
        raise Mismatch(
            f"the checkpoints in {root} belong to another configuration: {differ}",
            hint="resuming would mix two trainings",
            next_step="use the old settings, or a new --checkpoint-dir",
        )
    if manifest["dataDigest"] != facts["dataDigest"]:
        raise Mismatch(
            f"the checkpoints in {root} were trained on other data: {manifest['dataDigest'][:16]}…, "
            f"now {facts['dataDigest'][:16]}…",
            hint="another volume is mounted as data directory",
            next_step="mount the data of before, or use a new --checkpoint-dir",
        )


def check_same_as_rank_zero(theirs: Mapping[str, Any], facts: Mapping[str, Any], rank: int) -> None:
    """Refuse to train with settings or data that are not rank 0's.

    Raises:
        Mismatch: naming the settings that differ, or the data.
    """
    differ = _differing(theirs["config"], facts["config"])
    if theirs["dataDigest"] != facts["dataDigest"]:
        data = f"data {theirs['dataDigest'][:16]}… → {facts['dataDigest'][:16]}…"
        differ = f"{differ}, {data}" if differ else data
    if differ:
        raise Mismatch(
            f"rank {rank} was told otherwise than rank 0: {differ}",
            hint="a flag, a variable or the data volume of its node differs",
            next_step="start every node alike; `ddptrain preflight` compares them all",
        )


def _differing(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """``lr 0.006 → 0.5``; empty where all settings are alike."""
    return ", ".join(f"{k} {theirs.get(k)!r} → {v!r}" for k, v in ours.items() if theirs.get(k) != v)
