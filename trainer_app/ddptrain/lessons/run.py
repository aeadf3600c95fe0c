"""``ddptrain lesson NAME``: start the ranks of a lesson, or be one of them under torchrun."""

import importlib
import os
import pkgutil
from dataclasses import replace

import ddptrain.lessons
from ddprun.distributed import topology
from ddprun.errors import UsageError

_NOT_LESSONS = {"run", "draw", "agent"}
_OF_EVERY_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what init_process_group reads
_ALSO_READ = {
    "start": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "env": topology.WORKER_VARIABLES,
    "restart": topology.WORKER_VARIABLES,
}


def lesson_names() -> list[str]:
    """Return the names of all lessons, which are the modules of this package."""
    names = {module.name for module in pkgutil.iter_modules(ddptrain.lessons.__path__)}
    return sorted(names - _NOT_LESSONS)


def run_lesson(name: str, nproc_per_node: int | None) -> int:
    """Run a lesson and return the exit code.

    Args:
        name: of the lesson. One with a function ``launch`` starts its ranks itself, because that is its subject.
        nproc_per_node: how many ranks to start here; None: as NPROC_PER_NODE says, or 4. Under torchrun, which has
            started this process as a rank, it is ignored.
    Raises:
        UsageError: the environment describes an impossible rank, or a rank without a variable that the lesson reads.
    """
    environment = topology.without_operator_rank(os.environ)
    if "RANK" in environment:
        needed = dict.fromkeys((*_OF_EVERY_RANK, *_ALSO_READ.get(name, ())))
        if missing := [variable for variable in needed if not environment.get(variable)]:
            raise UsageError(
                f"RANK is set, but not {', '.join(missing)}",
                hint="torchrun sets them for each rank that it starts; see docs/torch-distributed/glossary.md",
                next_step=f"to let the lesson start its ranks, run `env -u RANK -u WORLD_SIZE ddptrain lesson {name}`, "
                f"or `torchrun --nproc-per-node 2 -m ddptrain.lessons.{name}`",
            )
        topology.from_rank_environment(environment)  # raises if the rank is impossible
        importlib.import_module(f"ddptrain.lessons.{name}").main()
        return 0
    if not environment.get("NPROC_PER_NODE"):
        nproc_per_node = nproc_per_node or 4
    ranks = topology.from_node_environment(environment, nproc_per_node=nproc_per_node)
    if ranks.nnodes == 1:
        ranks = replace(ranks, master_port=topology.free_port())
    own_launch = getattr(importlib.import_module(f"ddptrain.lessons.{name}"), "launch", None)  # what the lesson shows
    return int(own_launch(ranks)) if own_launch else _start(name, ranks)


def _start(name: str, ranks: topology.Ranks) -> int:
    """Fork one process per rank, as ``torch.multiprocessing.spawn`` does with fresh interpreters."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

    try:
        start_processes(_be_rank, (name, ranks), ranks.nproc_per_node, start_method="fork")
    except ProcessRaisedException as error:
        print(str(error).strip())
        return 1
    except ProcessExitedException as error:
        print(f"rank {ranks.of_local_rank(error.error_index).rank}: {error}")
        return int(error.exit_code if error.exit_code > 0 else 128 - error.exit_code)
    return 0


def _be_rank(local_rank: int, name: str, ranks: topology.Ranks) -> None:
    """Set the variables that torchrun sets, and run the lesson."""
    os.environ |= ranks.of_local_rank(local_rank).environment()
    import torch

    torch.set_num_threads(1)  # the ranks share the cores
    importlib.import_module(f"ddptrain.lessons.{name}").main()
