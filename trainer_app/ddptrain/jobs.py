"""What a rank does once it has joined its group; ``worker`` runs it. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Infer:
    """Write the predictions of a checkpoint for the samples of ``split`` to ``out``.

    Attributes:
        run, step: of the checkpoint; None for the newest valid one.
    """

    out: Path
    split: str
    run: int | None
    step: int | None


Job = Literal["train", "preflight"] | Infer
