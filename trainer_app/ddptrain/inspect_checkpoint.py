"""Saved models opened again: for the ``eval`` verb here, and for ``infer``, ``predict`` and ``export``.

All of them only read the checkpoint directory, so a read-only mount will do.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import torch
from torch import nn

from ddptrain import mnist, models, weights
from ddptrain.breadcrumbs import Breadcrumbs
from ddptrain.checkpoint import Saved, newest_valid, reading
from ddptrain.config import Config
from ddptrain.cpus import threads_per_rank
from ddptrain.device import resolve_device
from ddptrain.errors import DataError, Mismatch, UsageError
from ddptrain.evaluate import evaluate
from ddptrain.finite import dumps
from ddptrain.group import Group
from ddptrain.ranks import Ranks
from ddptrain.stop import StopFlag


def open_checkpoint(config: Config, *, run: int | None, step: int | None) -> tuple[Saved, bytes]:
    """The newest valid checkpoint below ``config.checkpoint_dir`` (or that of ``run``, ``step``) and its content.

    Raises:
        UsageError: no directory given. DataError: no valid checkpoint in it.
    """
    if not config.checkpoint_dir:
        raise UsageError("no --checkpoint-dir (or DDPJOB_CHECKPOINT_DIR) to read", next_step="name the directory")
    root = Path(config.checkpoint_dir)
    with reading(root):
        found = newest_valid(
            root, lambda path, reason: print(f"warning: {path}: {reason}", file=sys.stderr), run=run, step=step
        )
    if found is None:
        which = "".join(f" of {name} {n}" for name, n in (("run", run), ("step", step)) if n is not None)
        raise DataError(
            f"no valid checkpoint{which} in {config.checkpoint_dir}",
            hint="runs are folders run-000001, run-000002 … in there",
            next_step=f"`ddptrain ckpt verify --checkpoint-dir {config.checkpoint_dir}` says which there are"
            if which
            else "check the mount",
        )
    return found


def data_of(config: Config, digest: str) -> mnist.Dataset:
    """The data set that the checkpoint was trained on.

    Raises:
        Mismatch: the directory holds another one. DataError: it is absent.
    """
    dataset = mnist.load(config.data, config.data_dir)
    if dataset.digest != digest:
        raise Mismatch(
            f"the checkpoint was trained on other data than {config.data_dir or config.data} holds",
            next_step="give the --data-dir it was trained with",
        )
    return dataset


def model_of(config: Config, content: bytes, device: torch.device, origin: str) -> nn.Module:
    """The configured model with the weights in ``content``."""
    model = models.build(config, device)
    weights.load(model, weights.parse(content, device), origin)
    return model.eval()


def alone(device: torch.device) -> Group:
    """A group of this process only."""
    return Group(Ranks(local_rank=0), device, None, StopFlag(), Breadcrumbs())


def evaluate_checkpoint(config: Config, *, run: int | None, step: int | None) -> int:
    """Print one line of JSON with the accuracy of the newest valid checkpoint (or of ``run``, ``step``). Returns 0.

    Raises:
        UsageError, DataError, Mismatch: as ``open_checkpoint`` and ``data_of``.
    """
    saved, content = open_checkpoint(config, run=run, step=step)
    config = dataclasses.replace(config, **Config.identity_of(saved.manifest))
    device = resolve_device(config, Ranks(local_rank=0))
    torch.set_num_threads(config.threads or threads_per_rank(1))
    dataset = data_of(config, saved.manifest["dataDigest"])
    model = model_of(config, content, device, config.checkpoint_dir)
    result = evaluate(model, dataset.test_images, dataset.test_labels, alone(device))
    print(
        dumps(
            {
                "accuracy": round(result.accuracy, 8),
                "loss": result.loss,
                "correct": result.correct,
                "samples": result.samples,
                "checkpoint": saved.place,
                "data": config.data,
            }
        )
    )
    return 0
