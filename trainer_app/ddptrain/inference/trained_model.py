"""A checkpoint's model, and the settings and data that it was trained with."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ddprun.checkpoint_files import Saved, read_newest
from ddprun.distributed.process_group import Group, alone
from ddprun.distributed.topology import Ranks
from ddprun.errors import ConfigMismatch
from ddprun.resources import threads_per_rank
from ddptrain import weights
from ddptrain.config import Config
from ddptrain.data import mnist
from ddptrain.data.batches import normalise
from ddptrain.device import resolve_device
from ddptrain.errors import DataMismatch
from ddptrain.manifest import fault_of
from ddptrain.training import models


def open_checkpoint(config: Config, *, run: int | None = None, step: int | None = None) -> tuple[Config, Saved, bytes]:
    """Return the newest valid checkpoint, of ``run`` and ``step`` if given, as (its config, what it is, its content).

    Raises:
        UsageError: no directory given. DataMissing: no valid checkpoint in it.
        ConfigMismatch: another program, or a newer version of ddptrain, trained it.
    """
    saved, content = read_newest(config.checkpoint_root(), run=run, step=step)
    if fault := fault_of(saved.manifest):
        raise ConfigMismatch(
            f"{saved.path} is not a checkpoint of ddptrain: {fault}", next_step="name the directory of such a training"
        )
    return as_trained(config, saved.manifest), saved, content


def as_trained(config: Config, manifest: Mapping[str, Any]) -> Config:
    """Return the config with the settings that the manifest records."""
    return config.replaced(Config.identity_of(manifest))


def data_of(config: Config, manifest: Mapping[str, Any]) -> mnist.Dataset:
    """Return the data set, if the checkpoint was trained on it.

    Raises:
        DataMismatch: the checkpoint was trained on other data. DataError: the data set is absent or damaged.
    """
    dataset = mnist.load(config.data, config.data_dir)
    if dataset.digest != manifest["dataDigest"]:
        raise DataMismatch(
            f"the data in {config.data_dir or config.data} differ from those the checkpoint was trained on",
            next_step="give the --data-dir of the training",
        )
    return dataset


def model_of(config: Config, content: bytes, device: torch.device, origin: str) -> nn.Module:
    """Return the configured model with the weights in ``content``, read from ``origin``."""
    model = models.build(config, device)
    weights.load(model, weights.parse(content, device), origin)
    return model.eval()


def one_process(config: Config) -> Group:
    """Return a group of this process only, on the configured device and with the configured number of threads."""
    torch.set_num_threads(config.threads or threads_per_rank(1))
    return alone(resolve_device(config, Ranks(local_rank=0)))


class Classifier(nn.Module):
    """Maps ``pixels`` (N, 28, 28) uint8, light digits on dark, to logits (N, 10)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(model.parameters()).dtype

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the ten logits of each image."""
        logits: torch.Tensor = self.model(normalise(pixels, self.dtype).unsqueeze(1))
        return logits
