"""A plain training script that fails, to run under torchrun."""

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
