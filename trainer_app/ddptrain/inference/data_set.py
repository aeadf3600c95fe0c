"""A trained model on a whole data set: the verbs ``eval``, in one process, and ``infer``, on every rank of a group."""

from typing import Any

from ddprun.distributed.process_group import Group
from ddprun.files import dumps_json, write_result
from ddptrain.config import Config
from ddptrain.inference.trained_model import as_trained, data_of, model_of, one_process, open_checkpoint
from ddptrain.jobs import Infer
from ddptrain.training.evaluate import ResidentSet, evaluate, probabilities


def evaluate_checkpoint(config: Config, *, run: int | None, step: int | None) -> int:
    """Print the accuracy of a checkpoint on the test set as one line of JSON. Returns 0.

    Raises:
        UsageError, DataError, Mismatch: as ``open_checkpoint`` and ``data_of``.
    """
    config, saved, content = open_checkpoint(config, run=run, step=step)
    group = one_process(config)
    dataset = data_of(config, saved.manifest)
    model = model_of(config, content, group.device, config.checkpoint_dir)
    result = evaluate(model, ResidentSet.on(group.device, dataset.test_images, dataset.test_labels), group)
    found = result.as_dict() | {"accuracy": round(result.accuracy, 8), "checkpoint": saved.place, "data": config.data}
    print(dumps_json(found))
    return 0


def infer(config: Config, group: Group, timeout: float, job: Infer) -> str:
    """Write ``index,label,predicted,probability`` for every sample of the split; collective. Returns a summary.

    Only rank 0 reads the checkpoint and writes the file, which is the same for any number of ranks.

    Args:
        timeout: seconds that ranks wait for another rank to read or write.
    Raises:
        UsageError, DataError, Mismatch, VolumeError: as for ``eval``; the output cannot be written.
    """
    content = b""

    def read() -> dict[str, Any]:
        nonlocal content
        _, saved, content = open_checkpoint(config, run=job.run, step=job.step)
        return {"manifest": saved.manifest, "size": len(content)}

    shared = group.run_on_rank_zero("checkpoint", read, timeout)
    content = group.broadcast_bytes(content, shared["size"])
    trained = as_trained(config, shared["manifest"])
    dataset = group.run_on_all_ranks("data", lambda: data_of(trained, shared["manifest"]), timeout)
    model = model_of(trained, content, group.device, config.checkpoint_dir)
    images, labels = (getattr(dataset, f"{job.split}_{part}") for part in ("images", "labels"))

    certainties, classes = probabilities(model, images, group).max(1)
    rows = list(zip(labels.tolist(), classes.tolist(), certainties.tolist(), strict=True))
    lines = [f"{index},{label},{digit},{certainty:.6f}\n" for index, (label, digit, certainty) in enumerate(rows)]
    text = "index,label,predicted,probability\n" + "".join(lines)
    group.run_on_rank_zero("write", lambda: write_result(job.out, text.encode()), timeout)
    correct = sum(label == digit for label, digit, _ in rows)
    return f"wrote {len(rows)} predictions to {job.out}, {correct} of them correct ({correct / len(rows):.2%})"
