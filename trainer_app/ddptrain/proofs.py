"""What must hold of trials that differ only in the number of ranks: measured values against limits.

Pure reading: ``compare`` has run the trials, and prints the table of what these functions return.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddptrain import audit, weights
from ddptrain.checkpoint import newest_valid
from ddptrain.order import Schedule
from ddptrain.trials import Trial

LOSS_LIMIT = 1e-12  # absolute, in double precision
SAME_PLACES = 0.1  # of two epochs' orders; two permutations agree in about one place of all
GRADIENT_LIMIT = 1e-6  # relative, in single precision


@dataclass(frozen=True)
class Proof:
    """One line of the table."""

    what: str
    subject: str
    limit: str
    measured: str
    holds: bool


def equal_losses(subject: str, alone: Trial, trial: Trial) -> Proof:
    """The losses of all steps against those of one process."""
    ours, theirs = alone.losses(), trial.losses()
    worst = max((abs(theirs[step] - loss) for step, loss in ours.items() if step in theirs), default=1.0)
    whole = ours.keys() == theirs.keys() and len(ours) > 0
    learned = whole and min(ours.values()) < 0.9 * ours[1]  # of a training that learns nothing, equality proves nothing
    return Proof(
        f"loss of {len(ours)} steps, float64",
        subject,
        f"≤ {LOSS_LIMIT:g}",
        f"{worst:.1e}" if learned else "steps are missing" if not whole else "it learned nothing",
        learned and worst <= LOSS_LIMIT,
    )


def equal_first_gradients(subject: str, alone: Trial, trial: Trial) -> Proof:
    """SGD's momentum after one step is the first gradient."""
    ours, theirs = _first_gradient(alone), _first_gradient(trial)
    worst = float((ours - theirs).norm() / ours.norm())
    return Proof("first gradient, float32", subject, f"≤ {GRADIENT_LIMIT:g}", f"{worst:.1e}", worst <= GRADIENT_LIMIT)


def equal_bits(what: str, subject: str, reference: Trial, trial: Trial) -> Proof:
    """SHA-256 of the final weights, and every loss on the way."""
    ours, theirs = _digest(reference), _digest(trial)
    losses = reference.losses() == trial.losses()
    return Proof(
        what, subject, ours[:12], theirs[:12] + ("" if losses else ", other losses"), ours == theirs and losses
    )


def samples_used_once(subject: str, trial: Trial, schedule: Schedule, test_samples: int) -> Proof:
    """By what the ranks wrote down: every epoch used every sample once, in its own order; so did every evaluation."""
    used = audit.read(trial.audit)
    train, judged = used.get("train", {}), used.get("eval", {})
    epochs: list[list[int]] = [[] for _ in range(schedule.epochs)]
    for step, indices in train.items():
        epochs[schedule.cursor(step).epoch] += indices.tolist()
    wrong = sum(_misused(epoch, schedule.samples) for epoch in epochs)
    wrong_tests = sum(_misused(indices.tolist(), test_samples) for indices in judged.values())
    alike = max((_share_alike(a, b) for a, b in itertools.pairwise(epochs)), default=0.0)
    faults = [f"{len(train)} of {schedule.total_steps} steps written down"] * (len(train) != schedule.total_steps)
    faults += [f"{len(judged)} of {schedule.epochs} evaluations written down"] * (len(judged) != schedule.epochs)
    faults += [f"{wrong} training samples not once in an epoch"] * (wrong > 0)
    faults += [f"{wrong_tests} test samples not judged once"] * (wrong_tests > 0)
    faults += [f"two epochs agree at {alike:.0%} of their places"] * (alike > SAME_PLACES)
    return Proof(
        "samples used, as the ranks wrote down",
        subject,
        "each once",
        "; ".join(faults) or f"each of {schedule.samples} + {test_samples} once in {schedule.epochs} epochs",
        not faults,
    )


def table(proofs: Sequence[Proof]) -> str:
    """Aligned columns, one line per proof."""
    rows = [("what", "of", "must be", "measured", "")]
    rows += [(p.what, p.subject, p.limit, p.measured, "holds" if p.holds else "FAILS") for p in proofs]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, (*widths, 0), strict=True)).rstrip() for row in rows)


def _misused(indices: Iterable[int], samples: int) -> int:
    """How many of range(samples) do not occur exactly once."""
    return int((np.bincount(np.fromiter(indices, np.int64), minlength=samples) != 1).sum())


def _share_alike(one: list[int], other: list[int]) -> float:
    if len(one) != len(other):
        return 0.0
    return float(np.mean(np.array(one) == np.array(other)))


def _first_gradient(trial: Trial) -> torch.Tensor:
    state = _state(trial, step=1)["optimizer"]["state"]
    return torch.cat([state[key]["momentum_buffer"].flatten() for key in sorted(state)])


def _digest(trial: Trial) -> str:
    return weights.digest(_state(trial)["model"])


def _state(trial: Trial, step: int | None = None) -> dict[str, dict[str, Any]]:
    found = newest_valid(trial.checkpoints, lambda path, reason: None, step=step)
    assert found is not None, f"{trial.folder} holds no checkpoint"
    loaded: dict[str, dict[str, Any]] = torch.load(io.BytesIO(found[1]), weights_only=True)
    return loaded
