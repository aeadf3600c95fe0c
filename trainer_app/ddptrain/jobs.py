"""What a rank does once it has joined its group; ``worker`` runs it. No torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Train:
    """Train, evaluate and save."""


@dataclass(frozen=True)
class Preflight:
    """Check ranks, network, data and volume before a training."""


@dataclass(frozen=True)
class Infer:
    """Write the predictions of a checkpoint for the samples of ``split`` to ``out``.

    Attributes:
        run, step: of the checkpoint; None for the newest valid one.
    """

    out: Path
    split: str = "test"
    run: int | None = None
    step: int | None = None


Job = Train | Preflight | Infer
