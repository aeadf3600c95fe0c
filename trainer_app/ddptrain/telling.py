"""What rank 0 says while it trains, to whoever watches: the console's line or bar, the progress report, the metrics.

``train`` calls it after each piece of completed work; the other ranks' words reach nobody.
"""

from __future__ import annotations

from typing import Any

from ddptrain.console import Console
from ddptrain.evaluate import Evaluation
from ddptrain.order import Schedule
from ddptrain.recorder import Recorder

_KEPT = 0.9  # share of the past in the smoothed speed


class Telling:
    """One run's story."""

    def __init__(self, recorder: Recorder, console: Console, schedule: Schedule) -> None:
        self._recorder, self._console, self._schedule = recorder, console, schedule
        self._speed = 0.0  # samples per second, smoothed
        recorder.progress.update(phase="setup", totalEpochs=schedule.epochs, totalSteps=schedule.total_steps)

    def resumed(self, place: dict[str, int], evaluation: dict[str, Any] | None) -> None:
        """Training goes on at the checkpoint ``place``, with which ``evaluation`` was recorded."""
        self._recorder.progress.update(
            step=place["step"], epoch=place["step"] // self._schedule.steps_per_epoch, checkpoint=place,
            accuracy=(evaluation or {}).get("accuracy"), resumedFrom=place,
        )  # fmt: skip

    def step(self, done: int, *, loss: float, rate: float, samples: int, seconds: float) -> None:
        """Step number ``done`` is completed; its ``samples`` took ``seconds``."""
        speed = samples / seconds
        self._speed = speed if self._speed == 0 else _KEPT * self._speed + (1 - _KEPT) * speed
        self._recorder.step(done, loss=loss, rate=rate, samples_per_second=self._speed)
        epoch = self._schedule.cursor(done - 1).epoch + 1
        text = f"epoch {epoch}/{self._schedule.epochs} · loss {loss:.4f} · {self._speed:,.0f} samples/s"
        self._console.step(done, self._schedule.total_steps, text)

    def evaluation(self, done: int, result: Evaluation) -> None:
        """The model of ``done`` completed steps was judged."""
        self._recorder.evaluation(done, result)
        epoch = done // self._schedule.steps_per_epoch
        self._console.say(
            f"epoch {epoch}/{self._schedule.epochs}: test accuracy {result.accuracy:.4f}, loss {result.loss:.4f}"
        )
