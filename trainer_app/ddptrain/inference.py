"""A trained model on a whole data set: the verbs ``eval``, in one process, and ``infer``, on every rank of a group."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddprun.checkpoint_files import Saved, read_newest
from ddprun.distributed.process_group import Group, alone
from ddprun.distributed.topology import Ranks
from ddprun.errors import ConfigMismatch
from ddprun.files import dumps_json, write_result
from ddprun.resources import threads_per_rank
from ddptrain.config import Config
from ddptrain.data import mnist
from ddptrain.device import resolve_device
from ddptrain.errors import DataMismatch
from ddptrain.training import models
from ddptrain.training.checkpointer import fault_of
from ddptrain.training.evaluate import ResidentSet, evaluate, logits_of


def evaluate_checkpoint(config: Config, *, run: int | None, step: int | None) -> int:
    """Print the accuracy of a checkpoint on the test set as one line of JSON. Returns 0.

    Raises:
        UsageError: no directory given. DataError: no valid checkpoint in it, or the data set is absent or damaged.
        Mismatch: another program, or a newer version of ddptrain, trained it, or the data differ.
    """
    saved, content = _open_checkpoint(config, run=run, step=step)
    config = config.replaced(Config.identity_of(saved.manifest))
    torch.set_num_threads(config.threads or threads_per_rank(1))
    group = alone(resolve_device(config, Ranks(local_rank=0)))
    dataset = _data_of(config, saved.manifest)
    model = _model_of(config, content, group.device)
    result = evaluate(model, ResidentSet.on(group.device, dataset.test_images, dataset.test_labels), group)
    found = result.as_dict() | {"accuracy": round(result.accuracy, 8), "checkpoint": saved.place, "data": config.data}
    print(dumps_json(found))
    return 0


def infer(config: Config, group: Group, timeout: float, *, out: Path, run: int | None, step: int | None) -> str:
    """Write ``index,label,predicted,probability`` for every test sample to ``out``; collective. Returns a summary.

    Only rank 0 reads the checkpoint and writes the file, which is the same for any number of ranks.

    Args:
        run, step: of the checkpoint; None for the newest valid one.
        timeout: seconds that ranks wait for another rank to read or write.
    Raises:
        UsageError, DataError, Mismatch, VolumeError: as for ``eval``; the output cannot be written.
    """
    content = b""

    def read() -> dict[str, Any]:
        nonlocal content
        saved, content = _open_checkpoint(config, run=run, step=step)
        return dict(saved.manifest)

    manifest = group.run_on_rank_zero("checkpoint", read, timeout)
    content = group.broadcast_bytes(content)
    trained = config.replaced(Config.identity_of(manifest))
    dataset = group.run_on_all_ranks("data", lambda: _data_of(trained, manifest), timeout)
    model = _model_of(trained, content, group.device)

    test = ResidentSet.on(group.device, dataset.test_images, dataset.test_labels)
    certainties, classes = logits_of(model, test.images, group).softmax(1).max(1)
    rows = list(zip(test.labels.tolist(), classes.tolist(), certainties.tolist(), strict=True))
    lines = [f"{index},{label},{digit},{certainty:.6f}\n" for index, (label, digit, certainty) in enumerate(rows)]
    text = "index,label,predicted,probability\n" + "".join(lines)
    group.run_on_rank_zero("write", lambda: write_result(out, text.encode()), timeout)
    correct = sum(label == digit for label, digit, _ in rows)
    return f"wrote {len(rows)} predictions to {out}, {correct} of them correct ({correct / len(rows):.2%})"


def _open_checkpoint(config: Config, *, run: int | None, step: int | None) -> tuple[Saved, bytes]:
    saved, content = read_newest(config.checkpoint_root(), run=run, step=step)
    if fault := fault_of(saved.manifest):
        raise ConfigMismatch(
            f"{saved.path} is not a checkpoint of ddptrain: {fault}", next_step="name the directory of such a training"
        )
    return saved, content


def _data_of(config: Config, manifest: Mapping[str, Any]) -> mnist.Dataset:
    dataset = mnist.load(config.data, config.data_dir)
    if dataset.digest != manifest["dataDigest"]:
        raise DataMismatch(
            f"the data in {config.data_dir or config.data} differ from those the checkpoint was trained on",
            next_step="give the --data-dir of the training",
        )
    return dataset


def _model_of(config: Config, content: bytes, device: torch.device) -> nn.Module:
    model = models.build(config, device)
    model.load_state_dict(torch.load(io.BytesIO(content), map_location=device, weights_only=True)["model"])
    return model.eval()
