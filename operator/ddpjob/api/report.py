"""What a trainer reports: its progress (``GET /progress``), and in its termination message how it ended.

docs/reference/reports.md describes both. Any program may send a report, so a field that is absent or has a wrong
type or value is None here, and a text has a limit.
"""

import json
from collections.abc import Callable, Mapping
from math import isnan
from signal import NSIG
from sys import float_info
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, PlainValidator, TypeAdapter, ValidationError, WrapValidator
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass

from ddpjob.api import limits
from ddpjob.api.text import clean, shorten

_MAX_INT = 2**53  # every JSON reader represents it exactly
_MAX_FLOAT = float_info.max
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")
_MAX_PHASE = 64
_MAX_LIVES = 5
_MAX_TEXT = 4096  # bytes of a termination message
_CONFIG = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")


def _integer(low: int, high: int) -> PlainValidator:
    return PlainValidator(lambda value: value if type(value) is int and low <= value <= high else None)


def _number(value: object) -> float | None:
    if type(value) is float:
        return value if isnan(value) else max(-_MAX_FLOAT, min(value, _MAX_FLOAT))  # 1e999 is infinite
    return float(value) if type(value) is int and abs(value) <= _MAX_INT else None


def _loss(value: object) -> float | None:
    """Return a loss, also one that is NaN or infinite, which JSON has as text."""
    number = float(value) if isinstance(value, str) and value in _NOT_FINITE else value
    return number if type(number) is float else _number(number)


def _text(limit: Callable[[str], str]) -> PlainValidator:
    """Return the reader of a text with more than blanks in it."""
    return PlainValidator(lambda value: limit(clean(value).strip()) or None if isinstance(value, str) else None)


def _or_none(value: object, read: Callable[[object], Any]) -> Any:
    try:
        return read(value)
    except ValidationError:
        return None


_OrNone = WrapValidator(_or_none)
_Count = Annotated[int | None, _integer(0, _MAX_INT)]
_Percent = Annotated[int | None, _integer(0, 100)]
_Flag = Annotated[bool, PlainValidator(lambda value: value is True)]
_Number = Annotated[float | None, PlainValidator(_number)]
_Loss = Annotated[float | None, PlainValidator(_loss)]
_Phase = Annotated[str | None, PlainValidator(lambda v: clean(v)[:_MAX_PHASE] if isinstance(v, str) else None)]
_Name = Annotated[str | None, _text(lambda text: text[: limits.MAX_REASON])]
_Advice = Annotated[str | None, _text(lambda text: shorten(text, limits.MAX_ADVICE))]
_Text = Annotated[str | None, _text(lambda text: text[:_MAX_TEXT])]
_Path = Annotated[str | None, PlainValidator(lambda value: value if _is_inside(value) else None)]


def _is_inside(path: object) -> bool:
    """Return whether ``path`` is a relative path below its directory, and fit to be printed."""
    if not isinstance(path, str) or not 0 < len(path) <= limits.MAX_REPORTED_PATH or not path.isprintable():
        return False
    return not path.startswith("/") and ".." not in path.split("/")


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class ReportedCheckpoint:
    """A checkpoint.

    path: its file, relative to DDPJOB_CHECKPOINT_DIR; None for one elsewhere, which no reader could find.
    """

    step: _Count = None
    path: _Path = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Stall:
    """A pause that the launcher takes for a stall; it may end.

    message: names the rank that the others wait for, and what it does.
    rank, step, phase, where: of that rank, with the place in its code.
    """

    message: _Advice = None
    rank: Annotated[int | None, _integer(0, limits.MAX_NODES * limits.MAX_NPROC_PER_NODE - 1)] = None
    step: _Count = None
    phase: _Phase = None
    where: _Advice = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Slow:
    """The rank for which the others wait in each step.

    message: names it, and what it does longer. part: of the step. seconds: for which the others wait in each step of
    step_seconds. throttled: of each second, for which the CPU limit stops its container, with the part throttled.
    """

    message: _Advice = None
    rank: Annotated[int | None, _integer(0, limits.MAX_NODES * limits.MAX_NPROC_PER_NODE - 1)] = None
    part: _Name = None
    seconds: _Number = None
    step_seconds: _Number = None
    throttled: _Number = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Divergence:
    """A tensor that is to be the same on all ranks, and is not.

    message: names it, and the likely mistake. step: the first that showed it. agreed_step: the last that did not.
    rank: the first that differs from most others; None if no value has a majority. cause: the mistake, as a word.
    """

    message: _Advice = None
    step: _Count = None
    agreed_step: _Count = None
    rank: Annotated[int | None, _integer(0, limits.MAX_NODES * limits.MAX_NPROC_PER_NODE - 1)] = None
    tensor: _Advice = None
    cause: _Name = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class Pause:
    """A pause that is much longer than a step, and than the pauses before; it may be an evaluation that is new.

    step_seconds: the median step.
    """

    step_seconds: _Number = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class LifeReport:
    """How a life of an attempt ended: one start of all its processes, in pods that run on.

    node, rank: which failed first. progressed: whether the life made progress beyond those before it.
    recovery_milliseconds: from its failure to the first step of the next life.
    """

    life: Annotated[int | None, _integer(1, _MAX_INT)] = None
    node: Annotated[int | None, _integer(0, limits.MAX_NODES - 1)] = None
    rank: Annotated[int | None, _integer(0, limits.MAX_NODES * limits.MAX_NPROC_PER_NODE - 1)] = None
    kind: _Name = None
    message: _Advice = None
    progressed: Annotated[bool | None, PlainValidator(lambda value: value if type(value) is bool else None)] = None
    recovery_milliseconds: Annotated[int | None, _integer(0, _MAX_INT)] = None


def _last_objects(value: object) -> object:
    return [one for one in value[-_MAX_LIVES:] if isinstance(one, dict)] if isinstance(value, list) else None


_Lives = Annotated[list[LifeReport] | None, BeforeValidator(_last_objects)]


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class TrainingReport:
    """How far the training is: the response to ``GET /progress``.

    age_seconds: since the trainer finished the work in this report.
    loss_step: at which the loss was reported: later reports keep the loss. Older launchers do not report it.
    percent: of the training, if the trainer does not compute it from step and total_steps.
    checkpoint: the last one saved. resumed_from: the one that the attempt continues. agreed_checkpoint: the newest at
        which all ranks are known to have had the same parameters.
    saving_seconds: for which saves have blocked the training in this attempt.
    pause: rank 0 has made no step for long. stall: the launcher takes that for a stall. slow: a rank delays each step.
    diverged: the ranks do not have the same parameters.
    life: how often the processes of the attempt were started. lives: the last that have ended.
    fenced: the program cannot save beside a newer attempt.
    """

    phase: _Phase = None
    epoch: _Count = None
    total_epochs: _Count = None
    step: _Count = None
    total_steps: _Count = None
    percent: _Percent = None
    loss: _Loss = None
    loss_step: _Count = None
    accuracy: _Number = None
    samples_per_second: _Number = None
    steps_per_second: _Number = None
    eta_seconds: _Count = None
    age_seconds: _Number = None
    saving_seconds: _Number = None
    checkpoint: Annotated[ReportedCheckpoint | None, _OrNone] = None
    agreed_checkpoint: Annotated[ReportedCheckpoint | None, _OrNone] = None
    resumed_from: Annotated[ReportedCheckpoint | None, _OrNone] = None
    pause: Annotated[Pause | None, _OrNone] = None
    stall: Annotated[Stall | None, _OrNone] = None
    slow: Annotated[Slow | None, _OrNone] = None
    diverged: Annotated[Divergence | None, _OrNone] = None
    fenced: _Flag = False
    life: Annotated[int | None, _integer(1, _MAX_INT)] = None
    lives: _Lives = None


@dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)
class EndReport:
    """How a trainer ended: its termination message.

    cause: "own" failure or that of a "peer". outcome: "stopped" after SIGTERM. code: the exit code.
    before_stop: the training had ended before the pod was to be deleted, which ended a process that lingered.
    rank, step, where: the process that failed first, and the place. exact: ``step`` is not older than the failure.
    progress: the last report of the training.
    root: what the launcher of ``node`` reported, if that node failed first.
    fenced, life, lives: see ``TrainingReport``.
    """

    cause: _Name = None
    outcome: _Name = None
    before_stop: _Flag = False
    code: Annotated[int | None, _integer(-_MAX_INT, _MAX_INT)] = None
    kind: _Name = None
    exception: _Name = None
    message: _Text = None
    hint: _Advice = None
    next: _Advice = None
    signal: Annotated[int | None, _integer(1, NSIG - 1)] = None
    rank: Annotated[int | None, _integer(0, limits.MAX_NODES * limits.MAX_NPROC_PER_NODE - 1)] = None
    step: _Count = None
    exact: _Flag = False
    where: _Text = None
    node: _Count = None
    progress: Annotated[TrainingReport | None, _OrNone] = None
    root: Annotated["EndReport | None", _OrNone] = None
    fenced: _Flag = False
    life: Annotated[int | None, _integer(1, _MAX_INT)] = None
    lives: _Lives = None


_END_REPORT = TypeAdapter(EndReport)
_TRAINING_REPORT = TypeAdapter(TrainingReport)


def training_report(document: Mapping[str, Any]) -> TrainingReport:
    """Return the report in a response to ``GET /progress``."""
    return _TRAINING_REPORT.validate_python(document, by_alias=True, by_name=False)


def end_report(message: str) -> EndReport | None:
    """Return the report in a termination message; None for truncated JSON, for other text, and for {}."""
    if not message.lstrip().startswith("{"):
        return None
    try:
        document = json.loads(message)
    except (ValueError, RecursionError):  # 2 KB of "[" exceed Python's recursion limit
        return None
    if not isinstance(document, dict) or not document:
        return None
    if isinstance(progress := document.get("progress"), dict):
        # The end of the training adds to its last report.
        later = {key: document[key] for key in ("accuracy", "checkpoint", "resumedFrom") if document.get(key)}
        document |= {"progress": progress | later}
    return _END_REPORT.validate_python(document, by_alias=True, by_name=False)
