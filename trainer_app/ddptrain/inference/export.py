"""The verb ``export``: a checkpoint's model for other programs, as a state_dict or as a program of ``torch.export``."""

import io
import warnings
from pathlib import Path

import torch

from ddprun.errors import TrainerError
from ddprun.files import write_result
from ddptrain.config import Config
from ddptrain.data.mnist import SIDE
from ddptrain.inference.trained_model import Classifier, model_of, open_checkpoint


@torch.no_grad()
def export(config: Config, out: Path, kind: str, *, run: int | None, step: int | None) -> int:
    """Write the model of a checkpoint to ``out``, as a state_dict or as a program of ``torch.export``. Returns 0.

    The program takes raw pixels, normalises them itself, and needs neither this package nor its model definitions.

    Raises:
        UsageError, DataError: no checkpoint. VolumeError: ``out`` cannot be written.
    """
    config, saved, content = open_checkpoint(config, run=run, step=step)
    model = model_of(config, content, torch.device("cpu"), config.checkpoint_dir)
    buffer = io.BytesIO()
    if kind == "state-dict":
        torch.save({name: value.contiguous() for name, value in model.state_dict().items()}, buffer)
    else:
        classifier = Classifier(model)
        example = torch.zeros(2, SIDE, SIDE, dtype=torch.uint8)  # a batch of one would become a constant
        shapes = {"pixels": {0: torch.export.Dim("batch", min=1)}}
        program = torch.export.export(classifier, (example,), dynamic_shapes=shapes)
        with warnings.catch_warnings():
            # PyTorch warns about weights in channels_last, which are not contiguous. _check compares the results.
            warnings.filterwarnings("ignore", message="No complete tensor found")
            torch.export.save(program, buffer)
        _check(buffer, classifier)
    write_result(out, buffer.getvalue())
    print(f"wrote the {kind} of run {saved.run}, step {saved.step} to {out} ({len(buffer.getvalue()):,} bytes)")
    return 0


def _check(buffer: io.BytesIO, classifier: Classifier) -> None:
    """Read the program back and compare its logits with the model's, for one image and for several."""
    buffer.seek(0)
    program = torch.export.load(buffer).module()
    generator = torch.Generator().manual_seed(0)
    for count in (1, 5):
        pixels = torch.randint(0, 256, (count, SIDE, SIDE), dtype=torch.uint8, generator=generator)
        ours, theirs = classifier(pixels), program(pixels)
        if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4):
            worst = float((ours - theirs).abs().max())
            raise TrainerError(
                f"the logits of the exported program differ from the model's by {worst:g}",
                next_step="use --format state-dict, and report this with your version of torch",
            )
