"""Convert rank 0's report (``GET /progress`` or the termination message) to ``status.progress`` and ``.checkpoint``.

docs/trainer.md describes the report. Every field may be absent or of the wrong type: any program may send it.
"""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from ddpjob.api.objects import Json
from ddpjob.api.text import clean
from ddpjob.api.times import timestamp

UNKNOWN_SECONDS = 60.0
"""How long rank 0 may be silent: a trainer opens its port some time after its container has started."""
_MAX_INT = 2**53  # every JSON reader represents it exactly
_MAX_PHASE = 64
_MAX_AGE = 365 * 86_400.0
_STEP_FILE = "run-{run:06d}/step-{step:09d}.pt"
_INTEGERS = ("epoch", "totalEpochs", "step", "totalSteps", "etaSeconds")
_NUMBERS = ("loss", "accuracy", "samplesPerSecond", "ageSeconds")
_CHECKPOINTS = ("checkpoint", "resumedFrom")


def known_part(report: Mapping[str, Any]) -> Json:
    """Return the fields that this module reads, without values that it ignores: less than 1 KiB of any report.

    ``progress_status`` and ``checkpoint_status`` return the same for the result as for the report.
    """
    known: Json = {key: value for key in _INTEGERS if (value := _int(report, key)) is not None}
    known |= {key: number for key in _NUMBERS if (number := _float(report, key)) is not None}
    if isinstance(phase := report.get("phase"), str):
        known["phase"] = phase[:_MAX_PHASE]
    for key in _CHECKPOINTS:
        if isinstance(place := report.get(key), Mapping):
            known[key] = {part: value for part in ("run", "step") if (value := _int(place, part)) is not None}
    return known


def progress_status(report: Mapping[str, Any], before: Mapping[str, Any], now: datetime) -> Json:
    """Return ``status.progress`` for a report; the heartbeat time changes only if another value does."""
    epoch, epochs = _int(report, "epoch"), _int(report, "totalEpochs")
    step, steps = _int(report, "step"), _int(report, "totalSteps")
    speed = _float(report, "samplesPerSecond")
    progress: Json = {
        "phase": clean(phase)[:_MAX_PHASE] if isinstance(phase := report.get("phase"), str) else None,
        "epoch": epoch,
        "totalEpochs": epochs,
        "step": step,
        "totalSteps": steps,
        "percent": 100 * step // steps if step is not None and steps else None,
        "loss": _number_text(report, "loss", ".4g"),
        "accuracy": _number_text(report, "accuracy", ".6f"),
        "samplesPerSecond": f"{speed:.0f}" if speed is not None else None,
        "etaSeconds": _int(report, "etaSeconds"),
    }
    progress = {key: value for key, value in progress.items() if value is not None}
    progress["display"] = _display(progress)
    is_same_run = progress.get("step", 0) >= before.get("step", 0)
    if "loss" not in progress and "loss" in before and is_same_run:
        progress["loss"] = before["loss"]  # the phases data and evaluate have no loss; keep the last one
    unchanged = all(before.get(key) == value for key, value in progress.items())
    if unchanged and "lastHeartbeatTime" in before:
        return dict(before)
    age = min(max(_float(report, "ageSeconds") or 0.0, 0.0), _MAX_AGE)
    progress["lastHeartbeatTime"] = timestamp(now - timedelta(seconds=0.0 if math.isnan(age) else age))
    return progress


def checkpoint_status(report: Mapping[str, Any], before: Mapping[str, Any] | None, now: datetime) -> Json | None:
    """Return ``status.checkpoint`` for a report, or the recorded one if the report has no checkpoint."""
    before = dict(before or {})
    checkpoint = report.get("checkpoint")
    resumed = report.get("resumedFrom")
    resumed_step = _int(resumed, "step") if isinstance(resumed, Mapping) else None
    if not isinstance(checkpoint, Mapping):
        checkpoint = resumed if resumed_step is not None else None
    if not isinstance(checkpoint, Mapping):
        return before or None
    run, step = _int(checkpoint, "run"), _int(checkpoint, "step")
    if run is None or step is None:
        return before or None
    path = _STEP_FILE.format(run=run, step=step)
    time = before["time"] if before.get("path") == path else timestamp(now)
    status: Json = {"path": path, "step": step, "time": time}
    if resumed_step is not None:
        status["resumedFromStep"] = resumed_step
    return status


def _display(progress: Mapping[str, Any]) -> str:
    step, steps = progress.get("step"), progress.get("totalSteps")
    if step is None:
        return str(progress.get("phase") or "reporting")
    if not steps:
        return f"step {step}"
    return f"{progress['percent']}% {step}/{steps}"


def _int(report: Mapping[str, Any], key: str) -> int | None:
    value = report.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT else None


def _float(report: Mapping[str, Any], key: str) -> float | None:
    value = report.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isinstance(value, float) or abs(value) <= _MAX_INT else None


def _number_text(report: Mapping[str, Any], key: str, form: str) -> str | None:
    value = _float(report, key)
    return None if value is None else format(value, form)
