"""Command lines, environments, data and rank states for several modules of the trainer's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddprun.launcher.hang_detector import RankSnapshot

REAL = Path(__file__).parents[3] / "shared" / "mnist"
needs_mnist = pytest.mark.skipif(not REAL.is_dir(), reason="the real MNIST is not in ../shared/mnist")

# 300 samples in batches of 37: 9 steps an epoch, the last of 4 samples, of which four ranks get one each.
SMALL = ("--data", "idx", "--batch-size", 37, "--epochs", 2)
SAVING = ("--epochs", 3, "--checkpoint-every", 4, "--keep", 50)
RESUMED = (*SMALL, *SAVING)
STEPS = 27  # of RESUMED

# The fields of every progress report.
PROGRESS = {
    "schema", "seq", "ageSeconds", "phase", "epoch", "totalEpochs", "step", "totalSteps", "loss", "lossStep",
    "accuracy", "samplesPerSecond", "stepsPerSecond", "worldSize", "data", "checkpoint", "checkpointProblem",
    "resumedFrom", "savingSeconds", "fenced",
}  # fmt: skip


def command(world_size: int, idx: Path, checkpoints: Path, *more: object) -> list[object]:
    """Return the command of a training of STEPS steps that keeps every checkpoint."""
    return [*verb(world_size), *RESUMED, "--data-dir", idx, "--checkpoint-dir", checkpoints, *more]


def verb(world_size: int) -> list[object]:
    """Return the start of a command that trains with ``world_size`` ranks."""
    return ["train"] if world_size == 1 else ["launch", "--nproc-per-node", world_size]


def node(rank: int, port: int, *, nnodes: int = 2, nproc: int = 2, **more: object) -> dict[str, object]:
    """Return the environment that the operator sets for a node."""
    one = {"RANK": rank, "WORLD_SIZE": nnodes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1} if nproc == 1 else {}
    return one | {
        "NNODES": nnodes, "NODE_RANK": rank, "NPROC_PER_NODE": nproc, "MASTER_ADDR": "localhost", "MASTER_PORT": port,
        "PET_RDZV_CONF": "timeout=60", "DDPJOB_UID": "u", "DDPJOB_ATTEMPT": 0, **more,
    }  # fmt: skip


def rank_state(rank: int, **more: Any) -> RankSnapshot:
    """Return the state of a rank that waits in a collective, two ranks per node; ``more`` overrides fields."""
    facts: dict[str, Any] = {
        "rank": rank, "node": rank // 2, "step": 5, "phase": "step", "collective": "all_reduce", "collectives": 9,
        "quiet": 60.0, "stopped": False, "answered": True, "where": None,
    }  # fmt: skip
    return RankSnapshot(**facts | more)


def place(run: int, step: int) -> dict[str, Any]:
    """Return a checkpoint as reports name it, of a run without DDPJOB_CHECKPOINT_DIR."""
    return {"run": run, "step": step, "path": f"run-{run:06d}/step-{step:09d}.pt"}
