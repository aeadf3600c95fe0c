"""What a script may call: ``ddprun.report``, ``ddprun.should_stop`` and ``ddprun.checkpoints``, under any launcher.

Nothing here imports torch by itself: what a script has not imported, it does not use.
"""

import contextlib
import operator
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddprun.distributed.default_group import any_rank, group, rank_and_size
from ddprun.files import Json
from ddprun.heartbeat import Heartbeat
from ddprun.reporting.progress import FACTS, LATER_FACTS, ProgressRecord
from ddprun.script_checkpoints import ScriptCheckpoints
from ddprun.script_metrics import ScriptMetrics
from ddprun.settings import Settings
from ddprun.signals import StopFlag
from ddprun.step_parts import StepTimer
from ddprun.step_profile import StepProfiler
from ddprun.turns import Turn

# The names of values in the progress report and in the rows of the metrics; other values keep theirs.
_NAMES = {
    "epoch": "epoch", "total_epochs": "totalEpochs", "loss": "loss", "samples_per_second": "samplesPerSecond",
    "learning_rate": "lr",
}  # fmt: skip
_INTERVAL = 0.1  # seconds between reports of quick steps, which add only their rate to what the heartbeat has
_TRAIN_ROW = ("epoch", "loss", "lr", "samplesPerSecond")


@dataclass
class _State:
    """What this process knows; a rank of the launcher has progress and heartbeat, any other process has not.

    Attributes:
        beats, reports: whether this process is the one whose steps, and whose reports, are the rank's.
        optimizers: the ids of those that have stepped since a step was counted last.
        only: the id of the optimizer if that is one; 0 if they are several or none.
        is_reported: the script reports its steps itself. is_each: it has reported the step after the one before.
        parts: measures the steps.
        quick_until: the steps before this time (CLOCK_MONOTONIC) are heartbeats only; 0 if the next is more than that.
    """

    progress: ProgressRecord | None = None
    beats: Turn | None = None
    reports: Turn | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    settings: Settings = field(default_factory=Settings)
    steps: int = 0
    optimizers: set[int] = field(default_factory=set)
    only: int = 0
    quick_until: float = 0.0
    parts: StepTimer | None = None
    is_reported: bool = False
    is_each: bool = False
    flag: StopFlag | None = None
    stop_agreed: bool = False
    saved: bool = False  # a checkpoint was saved or reported after the stop
    checkpoints: dict[Path, ScriptCheckpoints] = field(default_factory=dict)  # by directory
    metrics: ScriptMetrics | None = None  # of the first directory that the script uses
    profiler: StepProfiler | None = None


_state = _State()


def begin(
    progress: ProgressRecord,
    heartbeat: Heartbeat,
    settings: Settings,
    *,
    beats: Turn | None = None,
    reports: Turn | None = None,
    parts: StepTimer | None = None,
    profiler: StepProfiler | None = None,
) -> None:
    """Connect this process, a rank or a process that its script has started, with the launcher."""
    global _state  # noqa: PLW0603 - one process runs one script
    _state = _State(progress, beats, reports, heartbeat, settings, parts=parts, profiler=profiler)


def stepped(optimizer: object, *_: object) -> None:
    """Take note of an optimizer's step; a step is counted when an optimizer has stepped again.

    In the middle of a training the caches have nothing of this code: each line costs microseconds, and a report 60 of
    them. So steps of less than ``_INTERVAL`` are not all reported; each is a heartbeat.
    """
    state, now, own = _state, time.monotonic(), id(optimizer)
    if (parts := state.parts) is not None:
        parts.due -= 1
        if parts.due <= 0:
            parts.look(now)
    if own == state.only:
        step = None if state.is_reported else state.steps + 1
        if now < state.quick_until and state.heartbeat.count(step, now):
            state.steps = step or state.steps
            return
    elif state.optimizers and own not in state.optimizers:
        state.optimizers.add(own)  # of the same step, such as the generator after the discriminator
        state.only = 0
        still_steps()
        return
    else:
        state.optimizers, state.only = {own}, own
    state.quick_until = now + _INTERVAL if count_step() else 0.0
    if state.quick_until and _is_profiled():
        state.quick_until = 0.0


def _is_profiled() -> bool:
    """Return whether a profile of the next steps is asked for, or runs: then each step is looked at."""
    return _state.profiler is not None and _state.profiler.turn(_step)


def _step() -> int:
    return _state.heartbeat.last.step if _state.is_reported else _state.steps


def count_step() -> bool:
    """Count a step, and return whether this process is the one whose steps are the rank's.

    A script that reports its steps itself knows their number better.
    """
    beats, progress = _state.beats, _state.progress
    is_first = beats is not None and not beats.is_taken
    if progress is None or _state.is_reported or not _takes(beats):
        return still_steps() and progress is not None
    if is_first:  # another process of the rank may have made steps before
        _state.steps = max(_state.steps, _state.heartbeat.last.step)
    _state.steps += 1
    _state.heartbeat.mark("train", _state.steps)
    if progress.is_of_another() and _state.reports and _state.reports.is_elsewhere():
        return False
    progress.update(phase="train", step=_state.steps, is_counted=True)
    return True


def replayed() -> None:
    """Take note of a replay of recorded work, if the steps of this process are already the rank's."""
    if _state.beats is None or _state.beats.is_taken:
        still_steps()


def report_counted() -> None:
    """Report the steps that are counted and not yet reported."""
    if _state.progress is not None and _state.quick_until and not _state.is_reported:
        _state.quick_until = 0.0
        _state.progress.update(step=_state.steps, is_counted=True)


def _forked() -> None:
    _state.quick_until = 0.0  # the child has not the turn of its parent


os.register_at_fork(after_in_child=_forked)


def _takes(turn: Turn | None) -> bool:
    return turn is None or turn.take()


def still_steps() -> bool:
    """Take note of a step that is not counted: the rank does not hang, and a save before the step has ended.

    Returns: whether this process is the one whose steps are the rank's.
    """
    if not _takes(_state.beats):
        return False
    if _state.heartbeat.last.phase == "save":
        _state.heartbeat.mark("train")
    else:
        _state.heartbeat.touch()
    return True


def step_is_exact() -> bool:
    """Return whether the script has completed no step after the last one that is known."""
    return _state.is_each or not _state.is_reported


def stop_was_asked() -> bool:
    """Return whether ``should_stop`` has returned True."""
    return _state.stop_agreed


def saved_after_stop() -> bool:
    """Return whether the script saved or reported a checkpoint after that."""
    return _state.saved


def report(
    *,
    step: int,
    total_steps: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **values: float | None,
) -> None:
    """Report completed work: for ``kubectl get ddp``, ``GET /progress``, the detection of hangs, and the metrics.

    The values of rank 0 count. They go to a file in the directory of ``checkpoints``, else in DDPJOB_CHECKPOINT_DIR;
    without either there are no metrics. A volume that fails does not end the training.

    Args:
        step: the number of completed steps, from the beginning of the training.
        total_steps: how many there will be.
        checkpoint: the file of the newest checkpoint, of this step; below DDPJOB_CHECKPOINT_DIR.
        values: epoch, total_epochs, loss, samples_per_second, learning_rate, and any result of a test of the model.
    Raises:
        TypeError: a value that is not a number, or the name of another value of reports.
    """
    own = _results(values)
    step = operator.index(step)
    shown: Json = {_NAMES[name]: _number(name, values[name]) for name in _NAMES if values.get(name) is not None} | own
    if total_steps is not None:
        shown["totalSteps"] = operator.index(total_steps)
    if (metrics := _metrics()) is not None:
        metrics.total_steps = shown.get("totalSteps", metrics.total_steps)
        if "loss" in shown:
            metrics.log("train", {"step": step, **{name: shown[name] for name in _TRAIN_ROW if name in shown}})
        if own:
            metrics.log("eval", {"step": step, **{name: shown[name] for name in ("epoch", *own) if name in shown}})
    # An exception would end a training that ran with an earlier release, which had no value of this name.
    for name in ("lr", *(own.keys() & LATER_FACTS)):
        shown.pop(name, None)
    if checkpoint is not None:
        if metrics is not None:
            metrics.log("save", {"step": step})
        base = os.environ.get("DDPJOB_CHECKPOINT_DIR") or os.curdir
        shown["checkpoint"] = {"step": step, "path": os.path.relpath(checkpoint, base)}
        _state.saved = _state.stop_agreed
    _state.is_reported = True
    if step != (last := _state.heartbeat.last.step):
        _state.is_each = step == last + 1
    if _state.progress is not None:
        if _takes(_state.beats):
            _state.heartbeat.mark("train", step)
        if _takes(_state.reports):
            _state.progress.update(phase="train", step=step, **shown)


def _results(values: Mapping[str, float | None]) -> Json:
    own = {name: _number(name, value) for name, value in values.items() if value is not None and name not in _NAMES}
    if taken := sorted(own.keys() & FACTS - LATER_FACTS):
        raise TypeError(f"ddprun.report: a result cannot be named {taken[0]}: reports have another value of this name")
    return own


def _number(name: str, value: Any) -> float:
    """Return the value as JSON has it; it may be a number of NumPy or a tensor with one element."""
    if type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    with contextlib.suppress(TypeError):
        return operator.index(value)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"ddprun.report: {name} is no number: {str(value)[:100]}") from error


def _metrics() -> ScriptMetrics | None:
    if _state.metrics is None:
        folder = _state.settings.checkpoint_dir or os.environ.get("DDPJOB_CHECKPOINT_DIR")
        _state.metrics = ScriptMetrics(Path(folder).absolute()) if folder else None
    return _state.metrics if rank_and_size()[0] == 0 else None


def should_stop() -> bool:
    """Return whether all ranks should save and end, because one of them got SIGTERM or Ctrl-C.

    Every rank calls it after the same steps: the ranks agree by an all-reduce of one number, so that none of them waits
    for a peer that has left. The first call installs the handlers; before it, the signals end the process.
    """
    if _state.flag is None and threading.current_thread() is threading.main_thread():
        _state.flag = StopFlag.installed()
    asked = _state.flag is not None and _state.flag.requested
    if group() is not None:
        with _state.heartbeat.waiting_in("all_reduce of should_stop") if _state.progress else contextlib.nullcontext():
            asked = any_rank(asked)
    _state.stop_agreed = _state.stop_agreed or asked
    return _state.stop_agreed


def checkpoints(directory: str | os.PathLike[str], *, keep: int = 3) -> ScriptCheckpoints:
    """Return the checkpoints in the directory, with ``save`` and ``load_newest``; the same object for each call.

    Args:
        directory: on a volume that rank 0 reaches after a restart, too: in a job, DDPJOB_CHECKPOINT_DIR.
        keep: the number of newest checkpoints to keep, at least 2.
    """
    path = Path(directory).absolute()
    if path not in _state.checkpoints:
        if _state.metrics is None:
            _state.metrics = ScriptMetrics(path)
        metrics = _state.metrics if _state.metrics.folder == path else ScriptMetrics(path)
        _state.checkpoints[path] = ScriptCheckpoints(
            metrics, keep=keep, heartbeat=_state.heartbeat, volume_timeout=_state.settings.volume_timeout,
            on_saved=_saved, on_loaded=_continue_from, timed=_timed_save,
        )  # fmt: skip
        if _state.progress is not None and _takes(_state.reports):
            _state.progress.update(fenced=True)
    return _state.checkpoints[path]


def _saved(place: Json) -> None:
    _state.saved = _state.stop_agreed
    report_counted()
    if _state.progress is not None and _takes(_state.reports):
        _state.progress.update(checkpoint=place)


def _timed_save() -> contextlib.AbstractContextManager[None]:
    if _state.progress is None or not _takes(_state.reports):
        return contextlib.nullcontext()
    return _state.progress.saving()


def _continue_from(step: int) -> None:
    _state.steps = step
