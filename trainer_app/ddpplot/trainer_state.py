"""The history that ``Trainer`` of transformers keeps in its checkpoints: ``checkpoint-N/trainer_state.json``.

Each has the log of all steps up to it, of the attempts before, too. It names no attempt and has no times.
"""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

from ddpplot.history import EvaluationRow, History, Run, SaveRow, StepRow, drawable, loss_of

_FILE, _FOLDER = "trainer_state.json", re.compile(r"checkpoint-(\d+)$")
_LARGEST = 10**12  # step


def read_trainer_state(root: Path) -> History | None:
    """Return the history of the newest state in ``root``, an output directory or the directory above; None for none.

    Raises:
        OSError: the directory cannot be read.
    """
    paths = [path for depth in ("", "*/", "*/*/") for path in sorted(root.glob(f"{depth}{_FILE}"))]
    states = [(path, state) for path in paths if (state := _state(path)) is not None]
    if not states:
        return None
    newest, state = max(states, key=lambda found: _step(found[1].get("global_step")) or 0)
    output = newest.parent.parent if _FOLDER.match(newest.parent.name) else newest.parent
    rows = [(step, row) for row in state["log_history"] if isinstance(row, dict) and (step := _step(row.get("step")))]
    steps = {step: StepRow(1, step, loss_of(row["loss"]), None, None) for step, row in rows if "loss" in row}
    evaluations = {
        step: EvaluationRow(1, step, accuracy, drawable(row.get("eval_loss")))
        for step, row in rows
        if (accuracy := drawable(row.get("eval_accuracy"))) is not None
    }
    saves = [SaveRow(1, int(found[1]), None) for path in output.iterdir() if (found := _FOLDER.match(path.name))]
    last = max([*steps, *evaluations, 0])
    return History(
        [Run(1, "", "", None, 0, None, None, last)],
        [steps[step] for step in sorted(steps)],
        [],
        [evaluations[step] for step in sorted(evaluations)],
        _step(state.get("max_steps")),
        "",
        sorted(saves, key=lambda save: save.step),
    )


def _state(path: Path) -> dict[str, Any] | None:
    """Return what is in the file; None if it is being written, or another program's."""
    with contextlib.suppress(ValueError, RecursionError):
        state = json.loads(path.read_bytes())
        if isinstance(state, dict) and isinstance(state.get("log_history"), list):
            return state
    return None


def _step(value: Any) -> int | None:
    return value if type(value) is int and 0 < value <= _LARGEST else None
