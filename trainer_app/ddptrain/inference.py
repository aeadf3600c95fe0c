"""A trained model on the test set, in one process: the verb ``eval``."""

import io
from pathlib import Path

import torch

from ddprun.checkpoint_files import read_newest
from ddprun.distributed.process_group import alone
from ddprun.distributed.topology import Ranks
from ddprun.errors import ConfigMismatch, UsageError
from ddprun.files import dumps_json, write_result
from ddprun.resources import threads_per_rank
from ddptrain.config import Config
from ddptrain.data import mnist
from ddptrain.device import resolve_device
from ddptrain.errors import DataMismatch
from ddptrain.training import models
from ddptrain.training.checkpointer import fault_of
from ddptrain.training.evaluate import evaluate, logits_of, test_set


def evaluate_checkpoint(config: Config, *, run: int | None, step: int | None, out: str = "") -> int:
    """Print the accuracy of a checkpoint on the test set as one line of JSON. Returns 0.

    Args:
        run, step: of the checkpoint; None for the newest valid one.
        out: a file for the prediction of each sample as CSV: index, label, predicted, probability.
    Raises:
        UsageError: no directory given. DataError: no valid checkpoint in it, or the data set is absent or damaged.
        Mismatch: another program, or a newer version of ddptrain, trained it, or the data differ.
        VolumeError: the file cannot be written.
    """
    if not config.checkpoint_dir:
        raise UsageError(
            "no checkpoint directory given", next_step="add --checkpoint-dir DIR, or set DDPJOB_CHECKPOINT_DIR"
        )
    saved, content = read_newest(Path(config.checkpoint_dir), run=run, step=step)
    if fault := fault_of(saved.manifest):
        raise ConfigMismatch(
            f"{saved.path} is not a checkpoint of ddptrain: {fault}", next_step="name the directory of such a training"
        )
    config = config.replaced(Config.identity_of(saved.manifest))
    dataset = mnist.load(config.data, config.data_dir)
    if dataset.digest != saved.manifest["dataDigest"]:
        raise DataMismatch(
            f"the data in {config.data_dir or config.data} differ from those the checkpoint was trained on",
            next_step="give the --data-dir of the training",
        )
    torch.set_num_threads(config.threads or threads_per_rank(1))
    group = alone(resolve_device(config, Ranks(local_rank=0)))
    model = models.build(config, group.device)
    model.load_state_dict(torch.load(io.BytesIO(content), map_location=group.device, weights_only=True)["model"])

    images, labels = test_set(dataset, group.device)
    logits = logits_of(model, images, group)
    if out:
        certainties, classes = logits.softmax(1).max(1)
        rows = zip(labels.tolist(), classes.tolist(), certainties.tolist(), strict=True)
        lines = [f"{index},{label},{digit},{certainty:.6f}\n" for index, (label, digit, certainty) in enumerate(rows)]
        write_result(Path(out), ("index,label,predicted,probability\n" + "".join(lines)).encode())
    result = evaluate(logits, labels)
    shown = {"accuracy": round(result["accuracy"], 8), "checkpoint": saved.place, "data": config.data}
    print(dumps_json(result | shown))
    return 0
