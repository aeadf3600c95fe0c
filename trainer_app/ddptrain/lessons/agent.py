"""Start workers as torchrun does, from a program: for the lessons about what torchrun gives to workers.

torchrun starts one agent per node. The agents find each other (the rendezvous), number the workers, start them and
watch them. Two kinds of rendezvous matter here:

- static: flags give each node its number and the address of node 0. (``--node-rank``, ``--master-addr``)
- c10d: all nodes get the same address and job name, and their numbers in the order in which they
  join. (``--rdzv-id``, ``--rdzv-backend=c10d``, ``--rdzv-endpoint``)
"""

import multiprocessing
import os
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser

from ddprun.distributed.topology import Ranks


def torchrun(flags: list[str], work: Callable[[], None]) -> int:
    """Start workers as ``torchrun FLAGS script`` does, with a function in place of the script; return the exit code.

    Without --max-restarts a failed worker ends the job: the default of torchrun is 0.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, which it prints a warning about
    # The agent has threads, so it must not fork. A server without threads imports the lesson once and forks workers.
    multiprocessing.set_forkserver_preload([work.__module__])
    arguments = get_args_parser().parse_args([*flags, "--start-method=forkserver", "--monitor-interval=0.1", "-"])
    config, _, _ = config_from_args(arguments)
    try:
        elastic_launch(config, work)()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"Error: rank {rank} failed with exit code {failure.exitcode}", flush=True)
        return 1
    return 0


def flags_of(ranks: Ranks) -> list[str]:
    """Return the flags of a static rendezvous, or only the sizes if PET_RDZV_BACKEND=c10d chooses the other kind.

    torchrun reads each flag that is not given from a variable: --rdzv-endpoint from PET_RDZV_ENDPOINT, and so on.
    """
    sizes = [f"--nnodes={ranks.nnodes}", f"--nproc-per-node={ranks.nproc_per_node}"]
    if os.environ.get("PET_RDZV_BACKEND", "static") != "static":
        return sizes
    place = [f"--node-rank={ranks.node_rank}", f"--master-addr={ranks.master_addr}"]
    return [*sizes, *place, f"--master-port={ranks.master_port}"]
