"""The ``eval`` verb: a saved model, judged anew on the test set. It only reads, so a read-only mount will do."""

from __future__ import annotations

import dataclasses
import io
import sys
from pathlib import Path

import torch

from ddptrain import mnist, models
from ddptrain.checkpoint import newest_valid
from ddptrain.config import Config
from ddptrain.cpus import threads_per_rank
from ddptrain.errors import DataError, Mismatch, UsageError
from ddptrain.evaluate import evaluate
from ddptrain.finite import dumps
from ddptrain.group import Group
from ddptrain.ranks import Ranks
from ddptrain.stop import StopFlag
from ddptrain.worker import resolve_device


def evaluate_checkpoint(config: Config, *, run: int | None, step: int | None) -> int:
    """Print one line of JSON with the accuracy of the newest valid checkpoint (or of ``run``, ``step``). Returns 0.

    Raises:
        UsageError: no directory given. DataError: no valid checkpoint in it, or no data. Mismatch: trained on other
        data.
    """
    if not config.checkpoint_dir:
        raise UsageError("eval needs --checkpoint-dir (or DDPJOB_CHECKPOINT_DIR)", next_step="name the directory")
    found = newest_valid(
        Path(config.checkpoint_dir),
        lambda path, reason: print(f"warning: {path}: {reason}", file=sys.stderr),
        run=run,
        step=step,
    )
    if found is None:
        raise DataError(
            f"no valid checkpoint in {config.checkpoint_dir}",
            hint="runs are folders run-000001, run-000002 … in there",
            next_step="check the mount, or leave --run and --step out",
        )
    saved, content = found
    config = dataclasses.replace(config, **Config.identity_of(saved.manifest))
    device = resolve_device(config, Ranks(local_rank=0))
    torch.set_num_threads(config.threads or threads_per_rank(1))
    dataset = mnist.load(config.data, config.data_dir)
    if dataset.digest != saved.manifest["dataDigest"]:
        raise Mismatch(
            f"the checkpoint was trained on other data than {config.data_dir} holds",
            next_step="give the --data-dir it was trained with",
        )
    model = models.build(config, device)
    state = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    alone = Group(Ranks(local_rank=0), device, None, StopFlag())
    result = evaluate(model, dataset.test_images, dataset.test_labels, alone)
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
