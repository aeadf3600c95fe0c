"""A step whose loss is not finite changes nothing; the host reads losses at agreed steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddprun.distributed.process_group import Group, alone
from ddprun.reporting.metrics import read_rows
from ddptrain.config import Config
from ddptrain.data.batches import TrainingBatches
from ddptrain.data.sampling import Schedule
from ddptrain.training import models, optim
from ddptrain.training.gradient_sync import LOSS, NUMBERS, SECONDS, STOP, GradientSync
from ddptrain.training.step import Step, StepResults, note_not_finite, read_interval
from tests.ddptrain.builders import SMALL
from tests.ddptrain.runs import ForkServer, assert_same_end, losses

CPU = torch.device("cpu")
SAMPLES, BATCH = 100, 30  # the last batch of an epoch has 10
OPTIMIZERS = ("muon", "adamw", "sgd")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread: these steps are so small that more of them only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Training:
    """The parts of a training of random images."""

    def __init__(self, config: Config, group: Group) -> None:
        numbers = np.random.default_rng(1)
        images = numbers.integers(0, 256, (SAMPLES, 28, 28), np.uint8)
        labels = numbers.integers(0, 10, SAMPLES, np.uint8)
        self.schedule = Schedule(SAMPLES, BATCH, 6, seed=3)
        batches = TrainingBatches(
            images, labels, self.schedule, shift=2, device=group.device, dtype=getattr(torch, config.dtype)
        )
        self.model = models.build(config, group.device)
        self.optimizer = optim.build(config, self.model)
        self.step = Step(batches, GradientSync(self.model, group), self.optimizer, group)

    def run(self, steps: range) -> None:
        """Run steps."""
        for step in steps:
            rate = optim.one_cycle(0.01, step, self.schedule.total_steps)
            self.step.run(step, rate, stop=False, seconds=0.5)

    def tensors(self) -> list[torch.Tensor]:
        """Return copies of all weights and of the optimizer's state."""
        states = self.optimizer.state_dict()["state"].values()
        found = [*self.model.parameters(), *(value for state in states for value in state.values())]
        return [tensor.detach().clone() for tensor in found]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_whose_loss_is_not_finite_changes_neither_weights_nor_state(optimizer: str) -> None:
    training = Training(Config(optimizer=optimizer), alone(CPU))
    training.run(range(2))
    before = training.tensors()
    note_not_finite(training.step.found_inf, torch.tensor([float("nan"), 0.0, 0.0]))
    training.run(range(2, 5))  # also the shorter batch
    assert equal(training.tensors(), before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_found_inf_on_the_device_decides_whether_an_update_acts(optimizer: str) -> None:
    trainings = [Training(Config(optimizer=optimizer), alone(CPU)) for _ in range(2)]
    for training in trainings:
        training.run(range(2))
    plain, guarded = trainings
    for fill, found_inf in ((0.01, 0.0), (float("nan"), 1.0)):
        for training in trainings:
            training.optimizer.learning_rate = 0.003
            for parameter in training.model.parameters():
                parameter.grad = torch.full_like(parameter, fill)
        if not found_inf:
            plain.optimizer.step()
        guarded.optimizer.step(torch.tensor(found_inf))
        assert equal(plain.tensors(), guarded.tensors())


def test_state_is_loaded_to_the_device_of_its_parameter() -> None:
    # PyTorch's own load_state_dict moves ``step`` to another device than the fused kernel needs (pytorch#124133).
    meta = torch.device("meta")
    for optimizer in OPTIMIZERS:
        training = Training(Config(optimizer=optimizer), alone(CPU))
        training.run(range(1))
        saved = copy.deepcopy(training.optimizer.state_dict())
        model = models.plain("strided").to(meta)
        plain = optim.build(Config(optimizer=optimizer), model)
        plain.load_state_dict(saved)
        found = [value for state in plain.state.values() for value in state.values()]
        assert len(found) == sum(len(state) for state in saved["state"].values())
        assert all(value.device == meta for value in found)


def test_reads_are_at_most_about_a_second_apart() -> None:
    assert [read_interval(seconds, 25) for seconds in (0.0, 1e-4, 0.04, 0.1, 0.6, 30.0)] == [1, 25, 25, 10, 1, 1]


def test_results_are_read_after_the_same_steps_on_every_rank() -> None:
    results = StepResults(alone(CPU), 25)
    reads: dict[int, Any] = {}
    for done in range(1, 60):
        results.begin()
        numbers = torch.zeros(NUMBERS, dtype=torch.float64)
        numbers[LOSS], numbers[STOP], numbers[SECONDS] = done / 2, done == 20, 0.125 if done < 40 else 1e-5
        results.add(done, numbers)
        if results.due:
            reads[done] = results.read()
    assert list(reads) == [1, 9, 17, 25, 33, 41]
    assert reads[25] == ([(step, step / 2) for step in range(18, 26)], True)
    assert not any(stop for step, (_, stop) in reads.items() if step != 25)


def test_losses_read_later_are_the_same_and_a_stop_ends_all_ranks_together(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    command = ("launch", "--nproc-per-node", 2, *SMALL, "--data-dir", idx, "--checkpoint-every", 0)
    # With 5, the last step is read only because it is the last.
    for name, flags in (("each", ()), ("some", ("--log-every", 5))):
        ddptrain.run(*command, "--checkpoint-dir", tmp_path / name, *flags)
    assert_same_end(tmp_path / "each", tmp_path / "some")
    assert [step for step, _ in losses(tmp_path / "some")] == list(range(1, 19))
    # Rank 1 is slow: if a rank's own time decided when it reads, the two would not leave after the same step.
    cut = (*command, "--checkpoint-dir", tmp_path / "cut", "--log-every", 1000, "--batch-size", 4, "--epochs", 1000)
    run = ddptrain.start(*cut, "--chaos", "slow:1:1")
    run.at_step(3)
    run.stop()
    assert run.wait() == 75, run.output()
    assert run.message()["saved"]


def test_a_stop_waits_about_a_second_also_if_steps_are_delayed(ddptrain: ForkServer, idx: Path, tmp_path: Path) -> None:
    flags = ("--log-every", 1000, "--step-delay", 0.6, "--checkpoint-every", 0, "--stop-after", 9)
    ddptrain.run("train", *SMALL, "--data-dir", idx, "--checkpoint-dir", tmp_path, *flags, code=75)
    reads = {round(row["time"] / 0.3) for row in read_rows(tmp_path) if row["event"] == "train"}
    assert len(reads) >= 8, "each step is read by itself"


def test_a_loss_that_is_not_finite_is_named_although_it_is_read_later(
    ddptrain: ForkServer, idx: Path, tmp_path: Path
) -> None:
    command = ("train", *SMALL, "--data-dir", idx, "--optimizer", "sgd", "--lr", 900, "--checkpoint-every", 0)
    messages = []
    for every in (1, 9):
        run = ddptrain.run(*command, "--checkpoint-dir", tmp_path / str(every), "--log-every", every, code=79)
        messages.append(run.message())
    one, other = messages
    assert (one["message"].partition(";")[0], one["step"]) == (other["message"].partition(";")[0], other["step"])
