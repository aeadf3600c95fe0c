"""``ddptrain lesson NAME``: start the ranks of a lesson's script, or be one of them under torchrun."""

import os
import runpy
from dataclasses import replace
from pathlib import Path

from ddprun.distributed import topology
from ddprun.errors import UsageError

SCRIPTS = Path(__file__).parent / "lessons"  # data: no module imports them
_RESTARTING = ["--standalone", "--max-restarts=1"]
_OF_EVERY_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what init_process_group reads
_ALSO_READ = {
    "start": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "env": topology.WORKER_VARIABLES,
    "restart": topology.WORKER_VARIABLES,
}


def lesson_names() -> list[str]:
    """Return the names of all lessons."""
    return sorted(script.stem for script in SCRIPTS.glob("*.py"))


def run_lesson(name: str, nproc_per_node: int | None) -> int:
    """Run a lesson and return the exit code.

    Args:
        name: of the lesson. torchrun starts the ranks of those that are about torchrun.
        nproc_per_node: how many ranks to start here; None: as NPROC_PER_NODE says, or 4. Under torchrun, which has
            started this process as a rank, it is ignored.
    Raises:
        UsageError: the environment describes an impossible rank, or a rank without a variable that the lesson reads.
    """
    environment, script = topology.without_operator_rank(os.environ), str(SCRIPTS / f"{name}.py")
    if "RANK" in environment:
        needed = dict.fromkeys((*_OF_EVERY_RANK, *_ALSO_READ.get(name, ())))
        if missing := [variable for variable in needed if not environment.get(variable)]:
            raise UsageError(
                f"RANK is set, but not {', '.join(missing)}",
                hint="torchrun sets them for each rank that it starts; see docs/concepts/torch-distributed/glossary.md",
                next_step=f"to let the lesson start its ranks, run `env -u RANK -u WORLD_SIZE ddptrain lesson {name}`, "
                f"or `torchrun --nproc-per-node 2 {script}`",
            )
        topology.from_rank_environment(environment)  # raises if the rank is impossible
        runpy.run_path(script, run_name="__main__")
        return 0
    if not environment.get("NPROC_PER_NODE"):
        nproc_per_node = nproc_per_node or 4
    ranks = topology.from_node_environment(environment, nproc_per_node=nproc_per_node)
    if ranks.nnodes == 1:
        ranks = replace(ranks, master_port=topology.free_port())
    if name not in ("env", "restart"):
        return _start(script, ranks)
    if name == "restart" and ranks.nnodes > 1:
        raise UsageError(f"the lesson restart runs on one node, not on {ranks.nnodes}", next_step="set NNODES to 1")
    return _torchrun([*_flags_of(ranks), *(_RESTARTING if name == "restart" else []), script])


def _torchrun(words: list[str]) -> int:
    """Start workers as the command ``torchrun`` does, and return the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own default, which it prints a warning about
    try:
        run(get_args_parser().parse_args(words))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"Error: rank {rank} failed with exit code {failure.exitcode}", flush=True)
        return 1
    return 0


def _flags_of(ranks: topology.Ranks) -> list[str]:
    """Return the flags of a static rendezvous, or only the sizes if PET_RDZV_BACKEND=c10d chooses the other kind.

    static: flags give each node its number and the address of node 0. c10d: the nodes get their numbers in the order in
    which they join. torchrun reads each flag that is not given from a variable: --rdzv-endpoint from PET_RDZV_ENDPOINT.
    """
    sizes = [f"--nnodes={ranks.nnodes}", f"--nproc-per-node={ranks.nproc_per_node}"]
    if os.environ.get("PET_RDZV_BACKEND", "static") != "static":
        return sizes
    place = [f"--node-rank={ranks.node_rank}", f"--master-addr={ranks.master_addr}"]
    return [*sizes, *place, f"--master-port={ranks.master_port}"]


def _start(script: str, ranks: topology.Ranks) -> int:
    """Fork one process per rank, as ``torch.multiprocessing.spawn`` does with fresh interpreters."""
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

    try:
        start_processes(_be_rank, (script, ranks), ranks.nproc_per_node, start_method="fork")
    except ProcessRaisedException as error:
        print(str(error).strip())
        return 1
    except ProcessExitedException as error:
        print(f"rank {ranks.of_local_rank(error.error_index).rank}: {error}")
        return int(error.exit_code if error.exit_code > 0 else 128 - error.exit_code)
    return 0


def _be_rank(local_rank: int, script: str, ranks: topology.Ranks) -> None:
    """Set the variables that torchrun sets, and run the script."""
    os.environ |= ranks.of_local_rank(local_rank).environment()
    import torch

    torch.set_num_threads(1)  # the ranks share the cores
    runpy.run_path(script, run_name="__main__")
