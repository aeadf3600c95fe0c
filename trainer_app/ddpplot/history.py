"""What the metrics of a training say: the steps that count, those that were computed again, and its runs. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

_PARTS = 80  # a speed that is computed from times is that of so many parts of a run
_SHORTEST = 0.2  # seconds of such a part; times are in milliseconds
_LARGEST = 1e300  # what is not smaller cannot be drawn


def drawable(value: object) -> float | None:
    """Return a number of a row; None if it is none, not finite, or too large to draw."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


def loss_of(value: object) -> float | None:
    """Return the loss of a row: NaN or infinite if the program reported that, or a number that is too large to draw."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        value = float(value)
    if isinstance(value, int | float) and abs(value) >= _LARGEST:
        return math.inf if value > 0 else -math.inf
    return float(value) if isinstance(value, int | float) else None


def loss_text(loss: float) -> str:
    """Return the loss for a person."""
    return "NaN" if math.isnan(loss) else f"{loss:.4g}"


def round_values(low: float, high: float, most: int) -> list[float]:
    """Return at most about ``most`` round values in the range, for an axis."""
    rough = (high - low) / most or 1.0
    unit = 10.0 ** math.floor(math.log10(rough))
    size = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    return [n * size for n in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


@dataclass(frozen=True)
class StepRow:
    """One training step.

    ``speed`` (samples per second) is None if it is not finite or too large to draw. Such a ``loss`` is NaN or infinite.
    """

    run: int
    step: int
    loss: float | None
    speed: float | None
    time: float | None


@dataclass(frozen=True)
class EvaluationRow:
    """One evaluation on the test set."""

    run: int
    step: int
    accuracy: float
    loss: float | None


@dataclass(frozen=True)
class SaveRow:
    """One checkpoint; ``seconds``: for how long the training waited for it, if that is known."""

    run: int
    step: int
    seconds: float | None


@dataclass(frozen=True)
class RunFailure:
    """Why a run, or an attempt that recorded no run, ended.

    Attributes:
        attempt, life: of which start of the ranks; None if that is not known.
        step: the last completed one, if that is known.
        time: seconds since 1970.
    """

    message: str
    attempt: int | None = None
    life: int | None = None
    reason: str = ""
    hint: str = ""
    next_step: str = ""
    step: int | None = None
    time: float | None = None


@dataclass(frozen=True)
class Run:
    """One start of the training.

    Attributes:
        attempt: the number of the attempt, as the operator gave it; empty without an operator.
        life: the number of the start within the attempt, from 1; None if the program does not say it.
        is_in_place: it is a restart in place of the run before it, in the same pods.
        resumed: the step from which it continued, 0 for none.
        began, ended: seconds since 1970 of its first and last row.
        reached: its last step; ``resumed`` if it recorded none.
        repeated: how many of its steps a later run computed again, because they came after its last checkpoint.
        cause: why it failed, if that is known; or what stopped it; else empty.
        failure: the same with hint and next step, if it failed.
    """

    number: int
    attempt: str
    host: str
    world_size: int | None
    resumed: int
    began: float | None
    ended: float | None
    reached: int
    repeated: int = 0
    cause: str = ""
    life: int | None = None
    is_in_place: bool = False
    failure: RunFailure | None = None


@dataclass(frozen=True)
class Throughput:
    """How fast the training was: ``unit`` a second, as (step, value) of each run.

    A program that does not report its speed has the one that follows from the times of its rows.
    """

    unit: str
    runs: list[list[tuple[int, float]]]

    @cached_property
    def median(self) -> float | None:
        found = [value for run in self.runs for _, value in run]
        return median(found) if found else None


@dataclass(frozen=True)
class History:
    """A training over all its runs.

    Attributes:
        steps, evaluations, saves: those that count, in order, as if there had been no interruption.
        lost: the steps that a later run computed again.
        data: the name of the data set; empty if it is not known.
    """

    runs: list[Run]
    steps: list[StepRow]
    lost: list[StepRow]
    evaluations: list[EvaluationRow]
    total_steps: int | None
    data: str
    saves: list[SaveRow] = field(default_factory=list)

    @property
    def restarts(self) -> list[Run]:
        """All runs but the first."""
        return self.runs[1:]

    @cached_property
    def last_step(self) -> int:
        steps = [step.step for step in self.steps] + [evaluation.step for evaluation in self.evaluations]
        return max(steps, default=0)

    @property
    def is_finished(self) -> bool:
        return bool(self.total_steps) and self.last_step >= (self.total_steps or 0)

    @property
    def loss(self) -> float | None:
        """The last training loss."""
        return next((step.loss for step in reversed(self.steps) if step.loss is not None), None)

    @cached_property
    def finite(self) -> list[tuple[int, float]]:
        """Step and training loss, where that is a number."""
        return [(s.step, s.loss) for s in self.steps if s.loss is not None and math.isfinite(s.loss)]

    @property
    def diverged(self) -> int | None:
        """The step from which no training loss is a finite number; None if the last one is."""
        first = None
        for step in reversed(self.steps):
            if step.loss is not None and math.isfinite(step.loss):
                break
            first = first if step.loss is None else step.step
        return first

    @property
    def began(self) -> float | None:
        return min((run.began for run in self.runs if run.began is not None), default=None)

    @property
    def ended(self) -> float | None:
        return max((run.ended for run in self.runs if run.ended is not None), default=None)

    @cached_property
    def throughput(self) -> Throughput:
        by_run: dict[int, list[StepRow]] = {}
        for step in self.steps:
            by_run.setdefault(step.run, []).append(step)
        if any(step.speed is not None for step in self.steps):
            reported = [[(s.step, s.speed) for s in own if s.speed is not None] for own in by_run.values()]
            return Throughput("samples", reported)
        timed = [[(s.step, s.time) for s in own if s.time is not None] for own in by_run.values()]
        return Throughput("steps", [speeds for own in timed if (speeds := _speeds(own))])


def _speeds(times: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return (step, steps per second up to it) of the (step, time) of one run."""
    part, first, found = max(1, len(times) // _PARTS), 0, []
    for at, (step, time) in enumerate(times):
        while first + 1 <= at - part and time - times[first + 1][1] >= _SHORTEST:
            first += 1
        passed = time - times[first][1]
        if at - first >= part and passed >= _SHORTEST:
            found.append((step, (step - times[first][0]) / passed))
    return found
