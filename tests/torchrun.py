"""Real torchrun on two nodes of this machine, with a plain training script that fails: the logs of its nodes."""

import os
import subprocess
import sys
from pathlib import Path

from tests.processes import die_with_parent, free_port

# Like scripts of users: nothing of this project. FAULT is the statement that the ranks in VICTIMS execute at step 5.
SCRIPT = """\
import ctypes
import os
import signal
import sys

import torch
import torch.distributed as dist


def train():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(1, 9):
        dist.all_reduce(torch.ones(4))
        print(f"step {step} of rank {rank}", flush=True)
        if step == 5 and str(rank) in os.environ["VICTIMS"].split():
            exec(os.environ["FAULT"])
    dist.destroy_process_group()


if os.environ.get("RECORD"):
    from torch.distributed.elastic.multiprocessing.errors import record

    train = record(train)
if __name__ == "__main__":
    train()
"""
FAULT_LINE = SCRIPT.splitlines().index('            exec(os.environ["FAULT"])') + 1
VALUE_ERROR = "raise ValueError('sample 17 has 3 channels, expected 1')"
_SECONDS = 300


def node_logs(
    folder: Path, fault: str, *, nodes: int = 2, victims: str = "2", record: bool = False
) -> tuple[Path, list[str]]:
    """Run the script with two ranks per node until it fails, and return it and the log of each node."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    port, torchrun = free_port(), Path(sys.executable).with_name("torchrun")
    group = {"PET_NNODES": nodes, "PET_NPROC_PER_NODE": 2, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    rest = {"PET_MAX_RESTARTS": 0, "OMP_NUM_THREADS": 1, "FAULT": fault, "VICTIMS": victims}
    rest |= {"RECORD": 1} if record else {}
    processes = []
    for node_rank in range(nodes):
        values = {key: str(value) for key, value in (group | rest | {"PET_NODE_RANK": node_rank}).items()}
        with (folder / f"{node_rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [torchrun, script],
                    env=os.environ | values,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=die_with_parent,  # noqa: PLW1509 - one call into the kernel, no locks taken
                )
            )
    try:
        for process in processes:
            assert process.wait(_SECONDS) == 1
    finally:
        for process in processes:
            process.terminate()
            process.wait(_SECONDS)
    return script, [(folder / f"{node_rank}.log").read_text(errors="replace") for node_rank in range(nodes)]
