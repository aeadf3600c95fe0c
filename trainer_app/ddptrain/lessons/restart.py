"""Restarting: torchrun starts all workers again after one has failed, and they go on from a checkpoint.

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 restart.py

torchrun restarts nothing by default: --max-restarts is 0. It ends the workers that are left, because a group without
one of its ranks is not usable, and starts all of them again, each as a new process with nothing in memory. What must
survive is on disk, also if a rank is killed while it writes. --standalone is a c10d rendezvous of one node, with a free
port and an id of its own.
"""

import io
import os
import signal
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

STEPS, KILLED_AT = 10, 6


def main() -> None:
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=own_store(restarts), rank=rank, world_size=world)
    # The parent of all workers on this node stays, so its number finds the file again.
    file = Path(os.environ.get("DDPJOB_CHECKPOINT_DIR") or tempfile.gettempdir()) / f"restart-{os.getppid()}.pt"
    if rank == 0 and restarts == 0:
        file.unlink(missing_ok=True)  # of an interrupted run whose parent had the same number
    step, weight = load(file, rank)
    if rank == 0:
        print(f"start {restarts + 1}: process {os.getpid()} is rank 0 of {world}, and continues after step {step}")
    assert step == (KILLED_AT - 1 if restarts else 0), "a restarted worker continues where the checkpoint was saved"
    while step < STEPS:
        gradient = torch.tensor(float(rank + 1))
        dist.all_reduce(gradient)
        step, weight = step + 1, weight + gradient
        save(file, rank, step, weight, is_killed=restarts == 0 and step == KILLED_AT)
        assert torch.load(file, weights_only=True)[0] == step, "a rank went on before the checkpoint was written"
    assert weight.item() == STEPS * world * (world + 1) / 2, "the same end as without the failure"
    dist.barrier()  # until then, a rank may still read the checkpoint
    dist.destroy_process_group()
    if rank == 0:
        file.unlink()
        print(f"finished after step {step}, {restarts} restart", flush=True)
    assert restarts == 1


def own_store(restarts: int) -> Store:
    """Return the agent's store, with keys that belong to this start only.

    The agent keeps its store through a restart, and with it the addresses of the workers that have ended. Without the
    prefix, a worker that is fast reads an old address, and init_process_group fails or waits for minutes.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    return PrefixStore(f"start-{restarts}", store)


def load(file: Path, rank: int) -> tuple[int, torch.Tensor]:
    """Return the step and the weight of the checkpoint, which rank 0 reads and sends to all."""
    state = torch.zeros(2)
    if rank == 0 and file.exists():
        state = torch.load(file, weights_only=True)
    dist.broadcast(state, src=0)
    return int(state[0]), state[1]


def save(file: Path, rank: int, step: int, weight: torch.Tensor, *, is_killed: bool) -> None:
    """Write the checkpoint on rank 0, which may be killed meanwhile, and let no rank go on before it is written."""
    if rank == 0:
        content = io.BytesIO()
        torch.save(torch.stack([torch.tensor(float(step)), weight]), content)
        part = file.with_suffix(".part")
        with part.open("wb") as opened:
            opened.write(content.getvalue()[:100])
            if is_killed:
                opened.flush()
                print(f"rank 0 is killed while it writes the checkpoint of step {step}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            opened.write(content.getvalue()[100:])
        part.rename(file)  # a reader sees the whole file or none
    dist.barrier()


if __name__ == "__main__":
    main()
