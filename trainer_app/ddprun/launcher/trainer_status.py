"""Progress as programs report it to a TrainJob of Kubeflow: how a report is read, and what it adds to our own.

``KubeflowCallback`` of transformers (5.23) sends such reports from rank 0: with 0 % and the metric ``total_steps`` as
the training begins; at most every 5 s with the percentage, the remaining seconds, all metrics logged so far,
``current_step``, ``total_steps`` and ``current_epoch``; and with 100 % and the logged metrics at the end of the
training, which may have come early. The format is that of Kubeflow Trainer (KEP-2779).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from ddprun.files import Json, with_named_loss
from ddprun.reporting.progress import FACTS

_MAX_INT = 2**53
# The metric that a value of our report is taken from; the first that is known.
_SHOWN = {"loss": ("loss", "train_loss"), "samplesPerSecond": ("train_samples_per_second",)}
_STEP, _STEPS, _EPOCHS = "current_step", "total_steps", ("current_epoch", "epoch")
_RESULT = re.compile(r"eval_(?!loss$|runtime$|.*_per_second$)(\w{1,64})")  # of a test of the model
_MOST_RESULTS = 8  # that are shown
_USED = {_STEP, _STEPS, *_EPOCHS, *(name for names in _SHOWN.values() for name in names)}


@dataclass(frozen=True)
class TrainerStatus:
    """One report.

    Attributes:
        sent: when, in seconds since 1970.
        remaining: seconds until the training ends.
        metrics: those that are used and whose values are numbers; only a loss may be NaN or infinite.
    """

    sent: float
    percent: int | None = None
    remaining: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def begins(self) -> bool:
        """Whether a training begins with it."""
        return self.percent == 0 and _STEP not in self.metrics


def parse(body: bytes) -> TrainerStatus:
    """Return the report in the body of a request.

    Raises:
        ValueError: it is none; the text says why.
    """
    try:
        status = json.loads(body)["trainerStatus"]
        time_sent = datetime.fromisoformat(re.sub("Z$", "+00:00", status["lastUpdatedTime"]))  # Python 3.10 reads no Z
        percent, remaining = (status.get(name) for name in ("progressPercentage", "estimatedRemainingSeconds"))
        return TrainerStatus(
            time_sent.timestamp(),
            None if percent is None else int(percent),
            None if remaining is None else int(remaining),
            _metrics(status.get("metrics") or ()),
        )
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"no report of a TrainJob: {error!r}") from error


def _metrics(given: Sequence[Json]) -> dict[str, float]:
    """Return the numbers; one that is not finite, such as a speed, is left out, except a loss: it has diverged."""
    found: dict[str, float] = {}
    for metric in given:
        name = str(metric["name"])
        number = _number(metric["value"]) if name in _USED or _RESULT.fullmatch(name) else None
        if number is not None and (math.isfinite(number) or name in _SHOWN["loss"]):
            found[name] = number
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class ReportedTraining:
    """What the reports of one life of the ranks have said.

    Attributes:
        newest: when the last of them was sent.
        reports: how many were taken.
        step: of the training at the last report that had it; None before.
        counted: the optimizer steps of rank 0 that its launcher had counted then.
        loss_step: of the training at the last report that had a loss; None before.
    """

    newest: float = -math.inf
    reports: int = 0
    remaining: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    counted: int = 0
    loss_step: int | None = None

    def after(self, status: TrainerStatus, counted: int, now: float) -> "ReportedTraining":
        """Return what is known after this report; nothing new if it is older than the last.

        The clock of the reports is this machine's. If the last was sent after ``now``, the clock was set back.

        Args:
            counted: the optimizer steps of rank 0.
            now: seconds since 1970.
        """
        if status.sent < self.newest <= now:
            return self
        known = ReportedTraining(counted=counted) if status.begins else self
        step = _count(status.metrics, _STEP)
        if step is not None:
            known = replace(known, step=step, counted=counted)
        if not status.metrics.keys().isdisjoint(_SHOWN["loss"]):
            known = replace(known, loss_step=known.step_at(counted))
        return replace(
            known,
            newest=min(status.sent, now), reports=self.reports + 1,
            remaining=status.remaining, metrics={**known.metrics, **status.metrics},
        )  # fmt: skip

    def step_at(self, counted: int) -> int:
        """Return the step of the training when rank 0 has counted so many optimizer steps."""
        return max(0, counted - self.counted + (self.step or 0))

    def added_to(self, own: Json, age: float) -> Json:
        """Return the progress report of rank 0 with what it lacks; what the script itself has reported stays.

        The optimizer steps counted since the last report are added to its step.

        Args:
            age: seconds since the last report.
        """
        if not self.reports:
            return own
        metrics = self.metrics
        known: Json = {
            name: next((metrics[metric] for metric in names if metric in metrics), None)
            for name, names in _SHOWN.items()
        }
        known = with_named_loss(known) | {"etaSeconds": self.remaining, "epoch": _epoch(metrics)}
        known["lossStep"] = self.loss_step
        shown = own | {"epoch": own["epoch"] or None}  # 0 if the script has not reported it
        found = ((_RESULT.fullmatch(name), value) for name, value in metrics.items())
        results = [(match[1], value) for match, value in found if match and match[1] not in FACTS][:_MOST_RESULTS]
        shown |= {name: value for name, value in {**dict(results), **known}.items() if shown.get(name) is None}
        shown |= {"seq": own["seq"] + self.reports, "ageSeconds": min(own["ageSeconds"], round(age, 3))}
        if own.get("totalSteps") is not None:
            return shown
        total = _count(metrics, _STEPS) or None
        step = self.step_at(own["step"])
        return shown | {"totalSteps": total, "step": min(step, total) if total else step}


def _epoch(metrics: Mapping[str, float]) -> int | None:
    """Return the epoch that is trained, counting from 1; the metric is the number of finished epochs, a fraction."""
    finished = next((metrics[name] for name in _EPOCHS if name in metrics), None)
    return max(1, math.ceil(finished)) if finished is not None and 0 <= finished <= _MAX_INT else None


def _count(metrics: Mapping[str, float], name: str) -> int | None:
    value = metrics.get(name)
    return int(value) if value is not None and 0 <= value <= _MAX_INT and value == int(value) else None
