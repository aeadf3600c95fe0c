"""How the launcher of ``ddprun`` runs the trainer: what it imports before it forks, and what each rank calls."""

import importlib
import sys
from dataclasses import dataclass, replace

from ddprun.distributed.topology import Ranks, free_port
from ddprun.errors import UsageError
from ddprun.launcher.supervisor import LaunchOptions
from ddprun.program import RankProcess
from ddprun.resources import set_torch_defaults, uncollected_imports
from ddptrain.config import Config
from ddptrain.jobs import Job


@dataclass(frozen=True)
class Trainer:
    """The program whose ranks run ``worker``."""

    config: Config
    job: Job

    sends_an_ending = True
    shares_progress = True

    def preload(self) -> str:
        """Import torch and all modules of the training."""
        preload(ddp=self.config.sync == "ddp")
        return ""

    def run(self, rank: RankProcess) -> int:
        """Run the job on one rank and return its exit code."""
        from ddptrain.worker import run_forked

        return run_forked(self.config, rank, job=self.job)


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


def torchrun_command(ranks: Ranks, options: LaunchOptions) -> list[str]:
    """Return the command that starts this node's ranks with torchrun, which has no hang detection and no report.

    The ranks read their settings from the environment.

    Raises:
        UsageError: an option that only our launcher has.
    """
    if options.max_restarts or options.log_dir:
        raise UsageError(
            "--how torchrun has neither --max-restarts nor --log-dir",
            hint="only our own launcher has these flags",
            next_step="leave them out, or use --how spawn",
        )
    if ranks.nnodes == 1 and not options.fixed_port:
        ranks = replace(ranks, master_port=free_port())
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={ranks.nnodes}", f"--node-rank={ranks.node_rank}",
        f"--nproc-per-node={ranks.nproc_per_node}", f"--master-addr={ranks.master_addr}",
        f"--master-port={ranks.master_port}", "--max-restarts=0", "-m", "ddptrain", "train",
    ]  # fmt: skip
