"""How the launcher of ``ddprun`` runs the trainer: what it imports before it forks, and what each rank calls."""

import importlib
from dataclasses import dataclass

from ddprun.program import RankProcess
from ddprun.resources import set_torch_defaults, uncollected_imports
from ddprun.signals import StopFlag
from ddptrain.config import Config


@dataclass(frozen=True)
class TrainerProgram:
    """The program whose ranks run ``worker``."""

    config: Config

    sends_an_ending = True
    shares_progress = True

    def preload(self) -> str:
        """Import everything that a rank needs, and nothing that computes.

        For DistributedDataParallel also ``torch._dynamo``, which takes as long as torch itself: its constructor imports
        it, with some 900 modules.
        """
        set_torch_defaults()
        with uncollected_imports():
            for module in (*(["torch._dynamo"] if self.config.sync == "ddp" else []), "ddptrain.worker"):
                importlib.import_module(module)
        return ""

    def run(self, rank: RankProcess) -> int:
        """Train on one rank and return its exit code."""
        from ddptrain.worker import Worker

        worker = Worker(self.config, rank.ranks, StopFlag.installed(), rank.diagnostics)
        return worker.run.run_forked(worker.train, rank)
