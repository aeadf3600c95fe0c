"""The ``export`` verb: a trained model for other programs, as a bare state_dict or as a program of ``torch.export``.

The program takes raw pixels, normalises them itself, and needs neither this package nor its model definitions. What was
written is read back and must answer as the model does.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import torch
from torch import nn

from ddptrain.batches import normalise
from ddptrain.config import Config
from ddptrain.errors import TrainerError
from ddptrain.files import write_result
from ddptrain.inspect_checkpoint import model_of, open_checkpoint
from ddptrain.mnist import SIDE


class Classifier(nn.Module):
    """``pixels`` (N, 28, 28) uint8, light digits on dark, to logits (N, 10)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(model.parameters()).dtype

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The ten logits of each image."""
        logits: torch.Tensor = self.model(normalise(pixels, self.dtype).unsqueeze(1))
        return logits


@torch.no_grad()
def export(config: Config, out: Path, kind: str, *, run: int | None, step: int | None) -> int:
    """Write the newest valid checkpoint's model (or that of ``run``, ``step``) to ``out``. Returns 0.

    Raises:
        UsageError, DataError: no checkpoint. VolumeError: ``out`` cannot be written.
    """
    saved, content = open_checkpoint(config, run=run, step=step)
    config = dataclasses.replace(config, **Config.identity_of(saved.manifest))
    model = model_of(config, content, torch.device("cpu"), config.checkpoint_dir)
    buffer = io.BytesIO()
    if kind == "state-dict":
        torch.save({name: value.contiguous() for name, value in model.state_dict().items()}, buffer)
    else:
        torch.export.save(program_of(Classifier(model)), buffer)
        _check(buffer, Classifier(model))
    write_result(out, buffer.getvalue())
    print(f"{kind} of run {saved.run}, step {saved.step} in {out} ({len(buffer.getvalue()):,} bytes)")
    return 0


def program_of(classifier: Classifier) -> torch.export.ExportedProgram:
    """The classifier as an exported program for any number of images."""
    example = torch.zeros(2, SIDE, SIDE, dtype=torch.uint8)  # two: one would be taken for a constant
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(classifier, (example,), dynamic_shapes={"pixels": {0: batch}})


def _check(buffer: io.BytesIO, classifier: Classifier) -> None:
    """Read the program back and compare its answers for one image and for several."""
    buffer.seek(0)
    program = torch.export.load(buffer).module()
    generator = torch.Generator().manual_seed(0)
    for count in (1, 5):
        pixels = torch.randint(0, 256, (count, SIDE, SIDE), dtype=torch.uint8, generator=generator)
        ours, theirs = classifier(pixels), program(pixels)
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4):
            worst = float((ours - theirs).abs().max())
            raise TrainerError(f"the exported program differs from the model by {worst:g} on {count} image(s)")
