"""One optimizer step, and when the host reads its loss and stop flag.

A GPU works through a queue that the host fills. Reading a number makes the host wait until the queue is empty, so the
trainer runs steps without reading: whether a loss is finite is decided on the device, before the update.
"""

import contextlib
import math
import time

import torch

from ddprun.distributed.process_group import Group
from ddptrain.data.batches import TrainingBatches
from ddptrain.training.gradient_sync import LOSS, NUMBERS, SECONDS, STOP, GradientSync
from ddptrain.training.optim import Optimizer

ON_GPU = 25  # steps between two reads of a GPU, at most; a CPU has the numbers at once, so each step's are read
READ_INTERVAL = 1.0  # seconds between two reads, about, where steps are slow: a stop signal waits for the next read


class Step:
    """Runs steps: batch, passes, exchange and update.

    Attributes:
        found_inf: 1.0 on the device once a loss was not finite; from then on nothing changes the weights.
    """

    def __init__(self, batches: TrainingBatches, gradients: GradientSync, optimizer: Optimizer, group: Group) -> None:
        self._batches, self._gradients, self._optimizer, self._group = batches, gradients, optimizer, group
        self.found_inf = torch.zeros((), device=group.device)

    def run(self, step: int, learning_rate: float, *, stop: bool, seconds: float) -> torch.Tensor:
        """Run the step after ``step`` completed ones, on a GPU without waiting for it.

        Args:
            stop, seconds: what this rank sends to the others, see ``GradientSync.step``.
        Returns:
            The step's numbers on the device, see ``GradientSync.step``.
        """
        self._optimizer.learning_rate = learning_rate
        numbers = self._gradients.step(self._batches.at(step), stop, seconds)
        note_not_finite(self.found_inf, numbers)
        if self._group.device.type != "cpu":
            self._optimizer.step(self.found_inf)
        elif not self.found_inf:
            self._optimizer.step()
        self._gradients.clear()
        return numbers


def note_not_finite(found_inf: torch.Tensor, numbers: torch.Tensor) -> None:
    """Set ``found_inf`` if the loss in a step's ``numbers`` is not finite, on the device."""
    found_inf.masked_fill_(numbers[LOSS].isfinite().logical_not_(), 1.0)


class StepResults:
    """The numbers of the steps that the host has not read yet.

    All ranks read after the same steps, because each rank computes the next read from numbers that all ranks have. They
    must: a rank that sees a stop flag leaves, and the others would wait for it.

    Args:
        every: steps between two reads, at most.
    Attributes:
        seconds: how long each of the steps took that were read last; 0 before the first read.
    """

    def __init__(self, group: Group, every: int) -> None:
        self._group, self._every = group, every
        self._numbers = torch.zeros(every, NUMBERS, dtype=torch.float64, device=group.device)
        self._steps: list[int] = []
        self._interval, self._started, self.seconds = 1, 0.0, 0.0

    @property
    def due(self) -> bool:
        return len(self._steps) >= self._interval

    def begin(self) -> None:
        """Begin a step."""
        if not self._steps:
            self._started = time.perf_counter()

    def add(self, done: int, numbers: torch.Tensor) -> None:
        """Keep the numbers of step ``done`` (from 1) until they are read."""
        self._numbers[len(self._steps)].copy_(numbers)
        self._steps.append(done)

    def read(self) -> tuple[list[tuple[int, float]], bool]:
        """Wait for the device, and return (step, sum of its losses) of each step, and whether any rank is to stop."""
        on_cpu = self._group.device.type == "cpu"  # where an exchange has already waited for the other ranks
        with contextlib.nullcontext() if on_cpu else self._group.heartbeat.waiting_in("read of losses"):
            rows = self._numbers[: len(self._steps)].tolist()
        self.seconds = (time.perf_counter() - self._started) / len(rows)
        self._interval = read_interval(rows[-1][SECONDS] / self._group.world_size, self._every)
        results = [(step, row[LOSS]) for step, row in zip(self._steps, rows, strict=True)]
        self._steps.clear()
        return results, any(row[STOP] > 0 for row in rows)


def read_interval(seconds: float, every: int) -> int:
    """Return the number of steps until the next read, given the seconds of one; 0 seconds are not known yet."""
    return max(1, min(every, math.floor(READ_INTERVAL / seconds))) if seconds > 0 else 1
