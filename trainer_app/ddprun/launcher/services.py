"""What a launcher offers through all restarts of its ranks: the ports of node 0, and its part in the agreement."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ddprun.distributed.topology import Ranks, loopback_of
from ddprun.launcher.agreement import Agreement
from ddprun.launcher.look_inside import LookInside
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.peers import Peers
from ddprun.launcher.processes import launcher_line
from ddprun.launcher.rank_table import NodeRanks
from ddprun.launcher.trainer_port import TrainerPort, is_wanted
from ddprun.program import Program
from ddprun.reporting.http_port import ProgressPort
from ddprun.resources import visible_gpus


@dataclass(frozen=True)
class Services:
    """What this launcher offers to the operator and to the other launchers, through all restarts of the ranks.

    Attributes:
        port: of node 0; None on other nodes, or if it cannot be opened.
        trainer_port: beside it, for a script of a user; None if the user has another server for its reports.
    """

    progress: NodeProgress
    peers: Peers
    table: NodeRanks
    look: LookInside
    agreement: Agreement
    port: ProgressPort | None
    trainer_port: TrainerPort | None = None

    @classmethod
    def started(cls, ranks: Ranks, program: Program, grant: int = 0, token: str = "") -> "Services":
        """Open the ports of node 0.

        Args:
            grant: how many restarts in place there may be.
            token: of the attempt; empty if there is none.
        """
        number = leader_port(ranks) if program.shares_progress else None
        progress, peers = NodeProgress(ranks.world_size), Peers(ranks, number, token)
        table = NodeRanks(ranks, peers, progress)
        look = LookInside(ranks, peers, table.steps_per_second)
        agreement = Agreement(ranks, peers, grant, progress, gpus=visible_gpus() > 0)
        port = trainer_port = None
        if ranks.node_rank == 0 and number is not None:
            try:
                port = ProgressPort(
                    number, lambda: progress.snapshot() | agreement.reports(), peers.takes,
                    ranks=table.answer, look=look.answer, host=loopback_of(ranks.master_addr),
                )  # fmt: skip
            except (OSError, OverflowError) as error:
                launcher_line(f"warning: no progress on port {number}: {error}")
            if is_wanted() and not program.sends_an_ending:
                try:
                    trainer_port = TrainerPort(progress.take)
                except OSError as error:
                    launcher_line(f"warning: no port for the reports of the script: {error}")
        return cls(progress, peers, table, look, agreement, port, trainer_port)

    def begin(self, life: int) -> None:
        """Set the variables for the ranks of this life."""
        if life > 1:
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(life - 1)
        self.agreement.begin(life)
        if self.trainer_port:
            self.trainer_port.begin(life)


def leader_port(ranks: Ranks, env: Mapping[str, str] = os.environ) -> int | None:
    """Return the port of node 0's launcher; None if a node that trains alone was given none.

    Local mode gives each pod another DDPJOB_PROGRESS_PORT, because all pods share the machine's ports.
    """
    for name in ("DDPJOB_LEADER_PORT", "DDPJOB_PROGRESS_PORT"):
        if (text := env.get(name, "")).isdecimal() and 0 < int(text) < 65536:
            return int(text)
    return ranks.master_port + 1 if ranks.nnodes > 1 and ranks.master_port < 65535 else None
