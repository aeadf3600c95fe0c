"""Common errors of data-parallel programs, injected into the trainer to check that the tests detect them.

The fork server applies one by name before the command starts; processes forked by the command inherit it.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from ddptrain import device
from ddptrain import lesson as run
from ddptrain.config import Config
from ddptrain.training import evaluate, models
from tests.mutants.mutant import Mutant, areas


def padding_counted_in_evaluation() -> None:
    """Evaluate the last chunk again, so that all ranks have the same number of chunks."""
    original = evaluate.chunks_of

    def padded(samples: int, rank: int, world_size: int) -> list[tuple[int, int]]:
        parts = [original(samples, r, world_size) for r in range(world_size)]
        longest = max(map(len, parts))
        last = parts[-1][-1]
        return parts[rank] + [last] * (longest - len(parts[rank]))

    evaluate.chunks_of = padded


def rank_1_draws_other_weights() -> None:
    """Draw other weights on rank 1, as a node with another image might."""
    original = models.build

    def build(config: Config, device: torch.device) -> torch.nn.Module:
        seed = config.seed + (os.environ.get("RANK") == "1")
        return original(dataclasses.replace(config, seed=seed), device)

    models.build = build


def bfloat16_on_rank_0_only() -> None:
    """Let only rank 0 have a processor with instructions for bfloat16."""
    device.has_bf16 = lambda: os.environ.get("RANK") == "0"


def edited(lesson: str, mutant: Mutant) -> Callable[[], None]:
    """Return a function that lets ``ddptrain lesson`` run a copy of the script with a mutant applied."""

    def load() -> None:
        script, copies = run.SCRIPTS / f"{lesson}.py", Path(tempfile.mkdtemp())
        (copies / script.name).write_text(mutant.apply_to(script.read_text()))
        run.SCRIPTS = copies

    return load


def title(mutant: Mutant) -> str:
    """Return a lesson's mutant as ``lesson: error``."""
    lesson = Path(mutant.file).stem
    return f"{lesson}: {mutant.name.removeprefix(lesson).strip('-').replace('-', ' ')}"


LESSONS = {title(mutant): edited(Path(mutant.file).stem, mutant) for mutant in areas()["lessons"]}


MUTANTS: dict[str, Callable[[], None]] = LESSONS | {
    mutant.__name__: mutant
    for mutant in (
        padding_counted_in_evaluation,
        rank_1_draws_other_weights,
        bfloat16_on_rank_0_only,
    )
}
