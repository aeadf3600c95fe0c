"""What a script may call: ``ddprun.report`` and ``ddprun.should_stop``. Under another launcher they do no harm.

Nothing here imports torch by itself: what a script has not imported, it does not use.
"""

import contextlib
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from ddprun.heartbeat import Heartbeat
from ddprun.reporting.progress import Progress
from ddprun.signals import StopFlag

_NAMES = {
    "epoch": "epoch", "total_epochs": "totalEpochs", "loss": "loss", "accuracy": "accuracy",
    "samples_per_second": "samplesPerSecond",
}  # fmt: skip


@dataclass
class _State:
    """What this process knows; a rank of the launcher has progress and heartbeat, any other process has not."""

    progress: Progress | None = None
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    steps: int = 0
    reports: bool = False  # the script reports its steps itself
    flag: StopFlag | None = None
    stop_agreed: bool = False
    saved: bool = False  # a checkpoint was reported after the stop


_state = _State()


def begin(progress: Progress, heartbeat: Heartbeat) -> None:
    """Connect this process, a rank, with its launcher."""
    global _state  # noqa: PLW0603 - one process runs one script
    _state = _State(progress, heartbeat)


def count_step() -> None:
    """Take note of an optimizer's step; a script that reports its steps itself knows their number better."""
    if _state.reports:
        still_steps()
        return
    _state.steps += 1
    _completed(_state.steps, {})


def still_steps() -> None:
    """Take note of a step that is not counted: the rank does not hang."""
    _state.heartbeat.touch()


def stop_was_asked() -> bool:
    """Return whether ``should_stop`` has told the script to stop."""
    return _state.stop_agreed


def saved_after_stop() -> bool:
    """Return whether the script reported a checkpoint after that."""
    return _state.saved


def report(
    *,
    step: int,
    total_steps: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **values: float | None,
) -> None:
    """Report completed work: for ``kubectl get ddp``, ``GET /progress`` and the detection of hangs.

    Args:
        step: the number of completed steps, from the beginning of the training.
        total_steps: how many there will be.
        checkpoint: the file of the newest checkpoint, of this step; below DDPJOB_CHECKPOINT_DIR.
        values: epoch, total_epochs, loss, accuracy, samples_per_second.
    Raises:
        TypeError: another name.
    """
    if unknown := sorted(set(values) - set(_NAMES)):
        raise TypeError(
            f"ddprun.report has no argument {unknown[0]}; it has step, total_steps, checkpoint, {', '.join(_NAMES)}"
        )
    shown: dict[str, Any] = {_NAMES[name]: value for name, value in values.items() if value is not None}
    if total_steps is not None:
        shown["totalSteps"] = total_steps
    if checkpoint is not None:
        base = os.environ.get("DDPJOB_CHECKPOINT_DIR") or os.curdir
        shown["checkpoint"] = {"step": step, "path": os.path.relpath(checkpoint, base)}
        _state.saved = _state.stop_agreed
    _state.reports = True
    _completed(step, shown)


def _completed(step: int, values: dict[str, Any]) -> None:
    if _state.progress is not None:
        _state.heartbeat.mark("train", step)
        _state.progress.update(phase="train", step=step, **values)


def should_stop() -> bool:
    """Return whether all ranks should save and end, because one of them was told to by SIGTERM or Ctrl-C.

    Every rank calls it after the same steps: the ranks agree by an all-reduce of one number, so that none of them waits
    for a peer that has left. The first call installs the handlers; before it, the signals end the process.
    """
    if _state.flag is None and threading.current_thread() is threading.main_thread():
        _state.flag = StopFlag.installed()
    asked = _state.flag is not None and _state.flag.requested
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        import torch

        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        number = torch.tensor([int(asked)], device=device)
        with _state.heartbeat.waiting_in("all_reduce of should_stop") if _state.progress else contextlib.nullcontext():
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
        asked = bool(number.item())
    _state.stop_agreed = _state.stop_agreed or asked
    return _state.stop_agreed
