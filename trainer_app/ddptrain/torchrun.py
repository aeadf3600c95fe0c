"""``--how torchrun``: the same ranks started by PyTorch's own launcher instead of ours, to compare the two.

``cli`` asks for the command and becomes it. Where torchrun was started by somebody else, ``ranks`` reads what it set.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ddptrain.errors import UsageError
from ddptrain.launch import Options
from ddptrain.ranks import Ranks


def command(ranks: Ranks, arguments: Mapping[str, Any], options: Options) -> list[str]:
    """The command that starts the ranks of this node; torchrun has no watchdog and no report of ours.

    Args:
        ranks: the node's place.
        arguments: settings by their names; None means not given.
    Raises:
        UsageError: something was asked for that only our own launcher does.
    """
    if options.max_restarts or options.log_dir:
        raise UsageError(
            "--how torchrun knows neither --max-restarts nor --log-dir",
            hint="these are of our own launcher",
            next_step="leave them out, or use --how spawn",
        )
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={ranks.nnodes}", f"--node-rank={ranks.node_rank}",
        f"--nproc-per-node={ranks.nproc_per_node}", f"--master-addr={ranks.master_addr}",
        f"--master-port={ranks.master_port}", "--max-restarts=0", "-m", "ddptrain", "train", *_spelled(arguments),
    ]  # fmt: skip


def _spelled(arguments: Mapping[str, Any]) -> list[str]:
    """The flags that say what ``arguments`` hold."""
    flags = {name.replace("_", "-"): value for name, value in arguments.items() if value is not None}
    switches = [f"--{name}" if value else f"--no-{name}" for name, value in flags.items() if isinstance(value, bool)]
    return switches + [f"--{name}={value}" for name, value in flags.items() if not isinstance(value, bool)]
