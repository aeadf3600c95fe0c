"""What several modules of the trainer's tests give the program: command lines, environments, data, rank_states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddptrain.launcher.hang_detector import RankState

REAL = Path(__file__).parents[3] / "shared" / "mnist"
needs_mnist = pytest.mark.skipif(not REAL.is_dir(), reason="the real MNIST is not in ../shared/mnist")

# 300 samples in batches of 37: 9 steps an epoch, the last of 4 samples, which four ranks get one each of.
SMALL = ("--data", "idx", "--batch-size", 37, "--epochs", 2)
RESUMED = (*SMALL, "--epochs", 3, "--checkpoint-every", 4, "--keep", 50)
STEPS = 27  # of RESUMED

# What the progress report holds, always.
PROGRESS = {
    "schema", "seq", "ageSeconds", "phase", "epoch", "totalEpochs", "step", "totalSteps", "loss", "accuracy",
    "samplesPerSecond", "worldSize", "data", "checkpoint", "checkpointProblem", "resumedFrom",
}  # fmt: skip


def command(world_size: int, idx: Path, checkpoints: Path, *more: object) -> list[object]:
    """A training of STEPS steps that leaves every checkpoint there."""
    verb = ["train"] if world_size == 1 else ["launch", "--nproc-per-node", world_size]
    return [*verb, *RESUMED, "--data-dir", idx, "--checkpoint-dir", checkpoints, *more]


def node(rank: int, port: int, *, nnodes: int = 2, nproc: int = 2, **more: object) -> dict[str, object]:
    """The environment that the operator gives a node."""
    return {
        "NNODES": nnodes, "NODE_RANK": rank, "NPROC_PER_NODE": nproc, "MASTER_ADDR": "localhost", "MASTER_PORT": port,
        "PET_RDZV_CONF": "timeout=60", "DDPJOB_UID": "u", "DDPJOB_ATTEMPT": 0, **more,
    }  # fmt: skip


def rank_state(rank: int, **more: Any) -> RankState:
    """A rank of a node of two that waits in a collective, as a watchdog sees it; but for ``more``."""
    facts: dict[str, Any] = {
        "rank": rank, "node": rank // 2, "step": 5, "phase": "step", "collective": "all_reduce", "collectives": 9,
        "quiet": 60.0, "stopped": False, "answered": True, "where": None,
    }  # fmt: skip
    return RankState(**facts | more)
