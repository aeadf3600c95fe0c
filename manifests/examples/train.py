"""Train a classifier of handwritten digits data-parallel: copy this file and put your model and data into it.

    python train.py                                # one process
    ddprun --nproc-per-node 2 train.py             # or: torchrun --nproc-per-node 2 train.py
    ddpjob run train.py --nodes 2 --nproc 2        # two nodes on this machine

In a DDPJob: `command: [ddprun, train.py]`. The three calls of ddprun report loss and progress, stop on request, and
save and resume in DDPJOB_CHECKPOINT_DIR. Where ddprun is not installed, the script trains, and saves nothing;
train_plain.py saves by itself.
"""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

try:
    import ddprun
except ImportError:
    ddprun = None


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,500 samples to train on and 297 to test with; REPLACE them by your data."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


def network() -> nn.Module:
    """Return the model; REPLACE it by yours."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def join() -> tuple[torch.device, int, int]:
    """Join the other ranks, if there are any, and return this rank's device, its number and how many there are."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # set by torchrun, by ddprun, and by the operator
        dist.init_process_group("nccl" if cuda else "gloo")
    return device, *((dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1))


def accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    """Return the share of correct answers; every rank computes the same."""
    model.eval()
    with torch.no_grad():
        answers = model(test.tensors[0].to(device)).argmax(1).cpu()
    model.train()
    return (answers == test.tensors[1]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a classifier of handwritten digits.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.002)
    args = parser.parse_args()

    device, rank, world = join()
    torch.manual_seed(0)  # the same initial weights on every rank
    train, test = data()
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    sampler = DistributedSampler(train, world, rank, seed=0)
    loader = DataLoader(train, batch_size=max(1, args.batch_size // world), sampler=sampler)
    total, done = args.epochs * len(loader), 0

    checkpoints = ddprun and ddprun.checkpoints(os.environ.get("DDPJOB_CHECKPOINT_DIR", "checkpoints"))
    if checkpoints and (found := checkpoints.load_newest()):  # the same on every rank
        model.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
        done = found.step
        print(f"rank {rank} resumes after step {done}", flush=True)
    ddp = DistributedDataParallel(model) if dist.is_initialized() else model

    while done < total:
        epoch, skip = divmod(done, len(loader))
        sampler.set_epoch(epoch)  # another order in each epoch, the same after a restart
        torch.manual_seed(1 + epoch * len(loader) * world + rank)  # for random augmentation in workers of the loader
        for images, labels in islice(loader, skip, None):  # without those that were done before a restart
            (torch.cuda if device.type == "cuda" else torch.default_generator).manual_seed(1 + done * world + rank)
            loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # averages the gradients of all ranks
            optimizer.step()
            done += 1
            if ddprun:
                if done % 10 == 0 or done == total:
                    ddprun.report(step=done, total_steps=total, epoch=epoch, loss=loss.item())
                stop = ddprun.should_stop()  # the same on every rank
                if stop or done % 20 == 0 or done == total:
                    checkpoints.save(done, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
                if stop:
                    return
    if rank == 0:
        print(f"finished after {total} steps: accuracy {accuracy(model, test, device):.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
