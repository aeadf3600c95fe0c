"""The result of a save, and which checkpoints a training can continue."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ddprun.checkpoint_files import newest_valid
from ddprun.distributed.process_group import alone
from ddprun.errors import VolumeError
from ddprun.reporting.console import Console
from ddprun.reporting.progress import ProgressRecord
from ddptrain.config import Config
from ddptrain.data.mnist import load
from ddptrain.data.sampling import Schedule
from ddptrain.device import numerics
from ddptrain.training.checkpointer import Checkpointer, SaveResult, fault_of, numerics_changes
from ddptrain.training.metrics import MetricsLogger
from tests.ddptrain.builders import place
from tests.ddptrain.volume import LoggedVolume, crashes, put
from tests.metrics import effective_rows

LAST = 9  # step


def claimed(folder: Path | str, idx: Path) -> tuple[Checkpointer, MetricsLogger, ProgressRecord]:
    """Return the checkpointer of a new run of LAST steps in ``folder``."""
    config, dataset = Config(data="idx", checkpoint_dir=str(folder), epochs=1), load("idx", str(idx))
    progress = ProgressRecord(1)
    metrics = MetricsLogger(progress, Console(0), epochs=1, steps_per_epoch=LAST)
    schedule = Schedule(len(dataset.train_labels), 37, 1, seed=0)
    checkpointer = Checkpointer(
        config, dataset, schedule, alone(torch.device("cpu")), bf16=False, metrics=metrics, log=print
    )
    assert checkpointer.newest(lambda content: None) is None
    checkpointer.claim(None)
    return checkpointer, metrics, progress


def state() -> dict[str, Any]:
    return {"model": {}, "optimizer": {}}


def test_save_returns_the_checkpoint_that_it_wrote_after_the_rows(tmp_path: Path, idx: Path) -> None:
    checkpointer, metrics, progress = claimed(tmp_path, idx)
    for step in range(1, 5):
        metrics.step(step, loss=1.0, learning_rate=0.1, samples=37, seconds=0.1)
    result = checkpointer.save(4, state, None)
    assert result == SaveResult(place(1, 4))
    assert progress.snapshot()["checkpoint"] == place(1, 4)
    assert progress.snapshot()["savingSeconds"] > 0
    assert [row["step"] for row in effective_rows(tmp_path, "train")] == [1, 2, 3, 4]
    manifest = json.loads((tmp_path / "run-000001" / "step-000000004.json").read_text())
    assert manifest["complete"] is False


def test_power_cut_leaves_no_checkpoint_without_its_rows(
    tmp_path: Path, idx: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, left = tmp_path / "disk", tmp_path / "left"
    disk.mkdir()
    with monkeypatch.context() as patch:
        volume = LoggedVolume(disk, patch)
        checkpointer, metrics, _ = claimed(disk, idx)
        for step in range(1, LAST + 1):
            metrics.step(step, loss=1.0, learning_rate=0.1, samples=37, seconds=0.1)
            if step % 3 == 0:
                checkpointer.save(step, state, None)
    found = set()
    for done, kind, node in crashes(volume.log, random.Random(0)):
        put(node, left)
        newest = newest_valid(left, lambda path, reason: None)
        if newest is not None:
            found.add(newest[0].step)
            rows = [row["step"] for row in effective_rows(left, "train")]
            assert rows[: newest[0].step] == list(range(1, newest[0].step + 1)), f"after {done} operations ({kind})"
        shutil.rmtree(left)
    assert found == {3, 6, LAST}


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, idx: Path) -> None:
    checkpointer, _, _ = claimed(tmp_path, idx)
    checkpointer.save(4, state, None)
    infinite = {"model": {"weight": torch.ones(2), "bias": torch.tensor([0.0, torch.inf])}, "optimizer": {}}
    assert checkpointer.save(5, lambda: infinite, None) == SaveResult(None, "the weights are not finite")
    newest = newest_valid(tmp_path, lambda path, reason: None)
    assert newest is not None and newest[0].step == 4


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:125] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError('Error(s) in loading state_dict for Sequential:\n\tan exception occurred : ("CUDA error: ECC",)'),
    ],
)
def test_a_machine_that_cannot_load_a_checkpoint_does_not_refuse_it(
    tmp_path: Path, idx: Path, error: Exception
) -> None:
    checkpointer, _, _ = claimed(tmp_path, idx)
    checkpointer.save(4, state, None)

    def load(content: bytes) -> None:
        raise error

    with pytest.raises(type(error)) as caught:  # the same node or another may load it in the next attempt
        checkpointer.newest(load)
    assert caught.value is error


def test_last_save_makes_a_directory_that_has_vanished(tmp_path: Path, idx: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    checkpointer, _, _ = claimed(root, idx)
    checkpointer.save(4, state, None)
    root.rename(tmp_path / "elsewhere")
    assert checkpointer.save(LAST, state, None).checkpoint == place(1, LAST)
    assert newest_valid(root, lambda path, reason: None) is not None


def test_refused_save_returns_the_reason_and_raises_only_at_the_last_step(tmp_path: Path, idx: Path) -> None:
    checkpointer, _, progress = claimed(tmp_path, idx)
    shutil.rmtree(tmp_path / "run-000001")
    assert checkpointer.save(4, state, None) == SaveResult(None, "the volume refused")
    assert progress.snapshot()["checkpointProblem"].endswith("(1 in a row)")
    with pytest.raises(VolumeError):
        checkpointer.save(LAST, state, None)
    (tmp_path / "run-000001").mkdir()
    assert checkpointer.save(5, state, None).checkpoint == place(1, 5)
    assert progress.snapshot()["checkpointProblem"] is None


def test_changes_have_both_values() -> None:
    facts = numerics()
    assert numerics_changes(facts, facts) == []
    changed = numerics_changes({**facts, "threads": 64, "torch": "1.0"}, facts)
    assert changed == [f"threads was 64, is {facts['threads']}", f"torch was 1.0, is {facts['torch']}"]


TRAINED: dict[str, Any] = {"config": {}, "dataDigest": "d", "evaluation": None, "complete": False}
ENDED = {"complete": True, "evaluation": {"accuracy": 0.9, "loss": 0.1}}


def test_a_training_and_its_end_have_no_fault() -> None:
    assert fault_of(TRAINED) == fault_of(TRAINED | ENDED) == ""


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"config": []}, "no valid config"),
        ({"config": None, "dataDigest": {}}, "no valid config, dataDigest"),
        ({"evaluation": "99 %"}, "no valid evaluation"),
        ({"complete": True}, "no evaluation"),
        (ENDED | {"evaluation": {"accuracy": "99 %", "loss": 0.1}}, "no evaluation"),
        (ENDED | {"evaluation": {"accuracy": 0.9}}, "no evaluation"),
    ],
)
def test_the_manifest_of_another_program_has_a_fault(fields: dict[str, Any], fault: str) -> None:
    assert fault in fault_of(TRAINED | fields)
