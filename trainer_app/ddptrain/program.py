"""How the launcher of ``ddprun`` runs the trainer: what it imports before it forks, and what each rank calls."""

import importlib
from dataclasses import dataclass

from ddprun.program import RankProcess
from ddprun.resources import set_torch_defaults, uncollected_imports
from ddptrain.config import Config


@dataclass(frozen=True)
class TrainerProgram:
    """The program whose ranks run ``worker``."""

    config: Config

    sends_an_ending = True
    shares_progress = True

    def preload(self) -> str:
        """Import torch and all modules of the training."""
        preload(ddp=self.config.sync == "ddp")
        return ""

    def run(self, rank: RankProcess) -> int:
        """Train on one rank and return its exit code."""
        from ddptrain.worker import run_forked

        return run_forked(self.config, rank)


def preload(*, ddp: bool) -> None:
    """Import everything that a rank needs, and nothing that computes.

    Args:
        ddp: also ``torch._dynamo``, which takes as long as torch itself: the constructor of DistributedDataParallel
            imports it, with some 900 modules.
    """
    set_torch_defaults()
    with uncollected_imports():
        for module in (*(["torch._dynamo"] if ddp else []), "ddptrain.worker", "ddptrain.training.gradient_sync"):
            importlib.import_module(module)
