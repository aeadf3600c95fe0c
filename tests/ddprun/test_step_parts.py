"""Where the time of a step goes, measured in a real training of one rank."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddprun import step_parts
from ddprun.step_parts import SIZE, StepSums, StepTimer, power_of_two, read

SLEEP = 0.01
STEPS = 80


@pytest.fixture
def _group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Training:
    """A model of which one part sleeps in each step."""

    def __init__(self, part: str = "") -> None:
        self.memory, self.waited, self._part = bytearray(SIZE), 0.0, part
        self.parts = StepTimer(memoryview(self.memory), 1, lambda: self.waited)
        layer = nn.Linear(4, 4)
        layer.register_forward_hook(lambda *_: self._sleep("forward"))
        layer.weight.register_hook(lambda _: self._sleep("backward"))
        self.module = nn.parallel.DistributedDataParallel(layer)
        if part == "hook":
            self.module.register_comm_hook(None, self.parts.timed_hook(self._exchange))
        self.parts.follow(self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def _sleep(self, part: str) -> None:
        if part == self._part:
            time.sleep(SLEEP)

    def _exchange(self, state, bucket):  # type: ignore[no-untyped-def]  # PyTorch compares annotations, if there are any
        self._sleep("hook")
        return allreduce_hook(state, bucket)

    def step(self) -> None:
        if self._part == "data":
            self._sleep("data")
            self.waited += SLEEP
        loss = self.module(torch.ones(2, 4)).sum()
        self._sleep("loss")
        loss.backward()
        self._sleep("script")
        self.parts.begin_step(self.optimizer)
        self._sleep("optimizer")
        self.optimizer.step()
        self.parts.due -= 1
        if self.parts.due <= 0:
            self.parts.look(time.monotonic())

    @property
    def records(self) -> list[StepSums]:
        return read(bytes(self.memory))


@pytest.mark.parametrize(
    ("slow", "part"),
    [(part, part) for part in ("forward", "backward", "hook", "data", "optimizer")] + [("loss", "backward")],
)
@pytest.mark.usefixtures("_group")
def test_the_part_that_takes_longest_has_the_largest_sum(slow: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_parts, "_WINDOW", 0.2)
    monkeypatch.setattr(step_parts, "_SAMPLED", 0.02)
    training = Training(slow)
    for _ in range(STEPS):
        training.step()
    first, last = training.records[0], training.records[-1]
    iterations, samples = last.iteration - first.iteration, last.samples - first.samples
    assert iterations >= 16
    assert 2 <= samples <= iterations
    per = {name: (getattr(last, name) - getattr(first, name)) / iterations for name in ("hook", "data", "optimizer")}
    per |= {name: (getattr(last, name) - getattr(first, name)) / samples for name in ("wait", "forward", "backward")}
    assert per[part] >= SLEEP
    if part == "hook":
        per["backward"] -= per["hook"]  # the reducer calls the hook in the backward pass
    assert max(per, key=lambda name: per[name]) == part


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("_group")
def test_records_are_at_multiples_of_a_power_of_two_and_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_parts, "_WINDOW", 0.002)
    monkeypatch.setattr(step_parts, "_SAMPLED", 0.0)
    training = Training()
    while len(training.records) < step_parts._KEPT or training.records[0].iteration <= 24:
        training.step()
    iterations = [sums.iteration for sums in training.records]
    assert len(iterations) == step_parts._KEPT
    assert iterations == sorted(iterations)
    assert all(iteration % 8 == 0 for iteration in iterations)


@pytest.mark.usefixtures("_group")
def test_a_quick_step_is_measured_ten_times_a_second_and_a_slow_one_always() -> None:
    training = Training()
    module = step_parts._Module(lambda: training.module)
    training.parts._modules = [module]
    for seconds, every, between in ((0.002, 32, 512), (0.03, 2, 64), (3.0, 1, 8)):
        training.parts._paced, module.seen = (100, 50.0), 200
        training.parts._set_pace(module, 50.0 + 100 * seconds)
        assert (training.parts._every, training.parts._between, module.rate) == (every, between, every)


@pytest.mark.usefixtures("_group")
def test_a_process_that_does_not_speak_for_the_rank_records_nothing() -> None:
    training = Training("forward")
    training.parts._may_write = lambda: False
    for _ in range(STEPS):
        training.step()
    assert training.records == []


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("answer", [{}, {"iteration": "x"}, {"iteration": 99, "forward_compute_time": "soon"}, None])
def test_another_interface_of_the_reducer_measures_nothing_and_ends_no_step(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_get_ddp_logging_data", lambda _: answer)
    training = Training()
    for _ in range(STEPS):
        training.step()
    assert training.records == []


@pytest.mark.usefixtures("_group")
def test_a_second_training_in_the_process_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_parts, "_WINDOW", 0.05)
    monkeypatch.setattr(step_parts, "_SAMPLED", 0.005)
    first = Training("forward")
    for _ in range(STEPS):
        first.step()
    kept, last = first.module, first.records[-1]
    second = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    first.parts.follow(second)
    first.module = second
    for _ in range(STEPS):
        first.step()
        time.sleep(0.002)
    assert kept is not second
    newest = first.records[-1]
    assert newest.time > last.time
    assert newest.iteration < STEPS


@pytest.mark.usefixtures("_group")
def test_two_modules_that_are_trained_in_turn_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a generator and a discriminator; the records are of one of them, and hold the times of both."""
    monkeypatch.setattr(step_parts, "_WINDOW", 0.05)
    monkeypatch.setattr(step_parts, "_SAMPLED", 0.005)
    first, second = Training("forward"), Training("forward")
    second.parts = first.parts
    first.parts.follow(second.module)
    while len(first.records) < 5:
        first.step()
        second.step()
    iterations = [sums.iteration for sums in first.records]
    assert iterations == sorted(set(iterations))
    begin, end = first.records[-2:]
    assert (end.forward - begin.forward) / (end.samples - begin.samples) >= 2 * SLEEP


_HOOKED = """
import gc, pickle, time, warnings
warnings.simplefilter("error", UserWarning)
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from ddprun import step_parts
from ddprun.started_processes import after_import

parts = step_parts.StepTimer(memoryview(bytearray(step_parts.SIZE)), 1, lambda: 0.0)
step_parts.measure(parts, after_import)
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
module = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
module.register_comm_hook(None, allreduce_hook)
assert module._comm_hooks == [(allreduce_hook, None)]
try:
    module.register_comm_hook(None, 5)
except TypeError:
    print("refused as without ddprun")
compiled = torch.compile(module, backend="eager")
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
for _ in range(3):
    compiled(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    parts.look(time.monotonic())
gc.collect()
print(all((parts._buffers, parts._hook, parts._optimizer, parts._collection)))
"""


def test_hooks_of_a_compiled_module_time_its_parts_and_it_is_as_the_script_made_it() -> None:
    """Each warning is an error: what this package puts into PyTorch must give no reason for one."""
    done = subprocess.run([sys.executable, "-c", _HOOKED], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()[-5:]) == (0, ["refused", "as", "without", "ddprun", "True"]), (
        done.stderr
    )


def test_a_record_that_is_being_written_is_not_read() -> None:
    memory = bytearray(SIZE)
    assert read(bytes(memory)) == []
    parts = StepTimer(memoryview(memory), 1, lambda: 0.0)
    parts._record(64, 1.0)
    assert [sums.iteration for sums in read(bytes(memory))] == [64]
    place = next(n for n in range(0, SIZE, 8) if memory[n : n + 8] == (64).to_bytes(8, "little"))
    memory[place : place + 8] = bytes(8)
    assert read(bytes(memory)) == []


def test_powers_of_two() -> None:
    assert [power_of_two(limit) for limit in (0.0, 0.9, 1.0, 3.9, 4.0, 1000.0)] == [1, 1, 1, 2, 4, 512]
