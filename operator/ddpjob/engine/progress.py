"""Convert the last report of rank 0's training to ``status.progress``, ``pause`` and ``checkpoint``."""

import math
from datetime import datetime, timedelta

from ddpjob.api.report import Divergence, Slow, TrainingReport
from ddpjob.api.status import (
    CheckpointStatus,
    DDPJobStatus,
    DivergedStatus,
    Furthest,
    NotFiniteLoss,
    PauseStatus,
    Progress,
    SlowStatus,
)
from ddpjob.api.times import timestamp

_MAX_AGE = 365 * 86_400.0
_LARGE = 1e15
LOSSES_TO_REPORT = 3
"""Losses of different steps that are not finite: one step may have skipped a batch that overflowed."""


def progress_status(report: TrainingReport, before: Progress | None, now: datetime) -> Progress:
    """Return ``status.progress`` for a report; the heartbeat time changes only if another value does."""
    step, loss = report.step, _number_text(report.loss, ".4g")
    if loss is None and before is not None and (step or 0) >= (before.step or 0):  # in the same run
        loss = before.loss  # the phases data and evaluate have no loss; keep the last one
    before_saved = before.saving_seconds if before is not None else None
    # The most that was reported in this attempt: after an older report, no second is new again.
    saved = max((seconds for seconds in (saved_for(report), before_saved) if seconds is not None), default=None)
    progress = Progress(
        display=_display(report),
        phase=report.phase,
        epoch=report.epoch,
        total_epochs=report.total_epochs,
        step=step,
        total_steps=report.total_steps,
        percent=_percent(report),
        loss=loss,
        accuracy=_number_text(report.accuracy, ".6f"),
        samples_per_second=_number_text(report.samples_per_second, ".0f"),
        steps_per_second=_number_text(report.steps_per_second, ".3g"),
        eta_seconds=report.eta_seconds,
        saving_seconds=saved,
    )
    given = {name: value for name, value in progress.__dict__.items() if value is not None}
    if before is not None and before.last_heartbeat_time and given.items() <= before.__dict__.items():
        return before
    return progress.changed(last_heartbeat_time=_last_work(report, now))


def pause_status(report: TrainingReport, before: DDPJobStatus, now: datetime) -> PauseStatus | None:
    """Return ``status.pause`` for a report; its time does not change until the next step."""
    if report.pause is None:
        return None
    is_known = before.pause is not None and before.progress is not None and before.progress.step == report.step
    step = _number_text(report.pause.step_seconds, ".3g")
    return before.pause if is_known else PauseStatus(since=_last_work(report, now), step_seconds=step)


def slow_status(report: Slow, before: SlowStatus | None, now: datetime, node_name: str | None) -> SlowStatus:
    """Return ``status.slow`` for what is reported of a slow rank; its times are those of the first report."""
    if before is not None and (before.rank, before.part) == (report.rank, report.part):
        return before
    given = {name: getattr(report, name) for name in ("seconds", "step_seconds", "throttled")}
    numbers = {name: _number_text(value, ".3g") for name, value in given.items()}
    return SlowStatus(since=timestamp(now), rank=report.rank, part=report.part, node_name=node_name, **numbers)


def diverged_status(report: Divergence | None, before: DivergedStatus | None, now: datetime) -> DivergedStatus | None:
    """Return ``status.diverged`` for what is reported of parameters that differ between the ranks."""
    if report is None or report.step is None:
        return None
    since = timestamp(now)
    if before is not None and (before.step, before.tensor) == (report.step, report.tensor):
        since = before.since
    return DivergedStatus(
        since=since, step=report.step, agreed_step=report.agreed_step, rank=report.rank, tensor=report.tensor,
        cause=report.cause,
    )  # fmt: skip


def loss_status(report: TrainingReport | None, before: DDPJobStatus, now: datetime) -> NotFiniteLoss | None:
    """Return ``status.lossNotFinite`` after a report; a report without a loss, and no report, change nothing."""
    known = before.loss_not_finite
    if report is None or report.loss is None:
        return known
    if math.isfinite(report.loss):
        return None
    step = report.step if report.loss_step is None else report.loss_step
    if step is None:
        return known
    if known is None or step < known.step:
        return NotFiniteLoss(since=timestamp(now), step=step, last_step=step, reports=1)
    if step <= known.last_step or known.reports == LOSSES_TO_REPORT:
        return known
    return known.changed(last_step=step, reports=known.reports + 1)


def _last_work(report: TrainingReport, now: datetime) -> str:
    age = min(max(report.age_seconds or 0.0, 0.0), _MAX_AGE)
    return timestamp(now - timedelta(seconds=0.0 if math.isnan(age) else age))


def saved_for(report: TrainingReport) -> int | None:
    """Return the whole seconds for which saves have blocked the training in this attempt; None if not reported."""
    seconds = report.saving_seconds
    return int(seconds) if seconds is not None and 0 <= seconds <= _MAX_AGE else None


def checkpoint_status(
    report: TrainingReport, before: CheckpointStatus | None, now: datetime
) -> CheckpointStatus | None:
    """Return ``status.checkpoint`` for a report, or the recorded one if the report has no checkpoint."""
    resumed_step = report.resumed_from.step if report.resumed_from else None
    place = report.checkpoint or report.resumed_from
    if place is None or place.step is None or place.path is None:
        return before
    time = before.time if before is not None and before.path == place.path else timestamp(now)
    agreed_path, agreed_step = (before.agreed_path, before.agreed_step) if before else (None, None)
    if (agreed := report.agreed_checkpoint) and agreed.path is not None:
        agreed_path, agreed_step = agreed.path, agreed.step
    return CheckpointStatus(
        path=place.path, step=place.step, time=time, resumed_from_step=resumed_step, agreed_path=agreed_path,
        agreed_step=agreed_step,
    )  # fmt: skip


def furthest(
    report: TrainingReport | None, before: Furthest | None, restarts: int, *, has_trained: bool = False
) -> Furthest | None:
    """Return ``status.furthest`` for a report and a number of restarts in place.

    A checkpoint that was loaded is no progress. Restarts that are new together with progress, in one report, are taken
    for earlier. The steps of a script that reports nothing itself begin at 0 in each life, so they say nothing.
    """
    known = before or Furthest()
    saved = report.checkpoint.step if report and report.checkpoint else None
    if saved is not None and saved > (-1 if known.checkpoint_step is None else known.checkpoint_step):
        return Furthest(checkpoint_step=saved)
    if report and known.checkpoint_step is None and reports_itself(report) and (report.step or 0) > (known.step or 0):
        return Furthest(step=report.step)
    if before is None:
        return Furthest(trained=True) if has_trained else None
    if before.trained or not restarts:
        return before
    return before.changed(restarts_since=(before.restarts_since or 0) + restarts)


def reports_itself(report: TrainingReport) -> bool:
    """Return whether the program reports its training, so that its steps are those of the training, not of a life."""
    return any(value is not None for value in (report.total_steps, report.percent, report.loss))


def _percent(report: TrainingReport) -> int | None:
    step, steps = report.step, report.total_steps
    return 100 * step // steps if report.percent is None and step is not None and steps else report.percent


def _display(report: TrainingReport) -> str:
    percent, step = _percent(report), report.step
    parts = [] if percent is None else [f"{percent}%"]
    if step is not None:
        parts.append(f"{step}/{report.total_steps}" if report.total_steps else f"step {step}")
    return " ".join(parts) or report.phase or "reporting"


def _number_text(value: float | None, form: str) -> str | None:
    """Return a number as text; one that is too long for a column with an exponent."""
    return None if value is None else format(value, form if abs(value) < _LARGE else ".4g")
