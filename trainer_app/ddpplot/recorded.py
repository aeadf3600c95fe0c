"""Reads the history of a training from its directory: metrics, the owners of its runs, and its checkpoints' names.

Of a directory without metrics, the state in the checkpoints of transformers is read (``trainer_state``).
"""

import contextlib
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

from ddpplot.history import EvaluationRow, History, Run, SaveRow, StepRow, drawable, loss_of
from ddpplot.trainer_state import read_trainer_state
from ddprun.checkpoint_files import all_manifests, reading, run_folder
from ddprun.errors import DataMissing
from ddprun.reporting.metrics import FOLDER, RecordedMetrics, read_metrics, whole

__all__ = ["DataMissing", "read_history"]


def read_history(root: Path) -> History:
    """Return the history of the training in ``root``: a checkpoint directory, its folder ``metrics``, or a file of it.

    Why runs failed is not among the metrics.

    Raises:
        DataMissing: there are no metrics, or they cannot be read.
    """
    if root.name == FOLDER and root.is_dir():
        root = root.parent
    with reading(root):
        found = read_metrics(root)
        saved = {(run, step): None for run, step, _ in all_manifests(root)}
        state = None if found.starts else read_trainer_state(root)
    if state is not None:
        return state
    if not found.starts:
        raise DataMissing(
            f"no metrics of a training in {root}",
            hint="ddptrain, scripts that call ddprun.report, and Trainer of transformers write them beside checkpoints",
            next_step="name the directory of the checkpoints",
        )
    steps, lost, evaluations = list[StepRow](), list[StepRow](), list[EvaluationRow]()
    # The names of the newest checkpoints say what the rows of a killed run do not.
    stops, saves = dict[int, str](), dict[tuple[int, int], float | None](saved)
    for row in found.rows:
        run, step, event = row["run"], row["step"], row["event"]
        if event == "stopped":
            stops[run] = str(row.get("message") or "stopped")
        elif event == "save":
            saves[run, step] = drawable(row.get("seconds"))
        elif event == "train" and step:
            numbers = (drawable(row.get(name)) for name in ("samplesPerSecond", "time"))
            (steps if found.counts(row) else lost).append(StepRow(run, step, loss_of(row.get("loss")), *numbers))
        elif event == "eval" and found.counts(row) and (accuracy := drawable(row.get("accuracy"))) is not None:
            evaluations.append(EvaluationRow(run, step, accuracy, drawable(row.get("loss"))))
    for counted in (steps, evaluations):
        counted.sort(key=lambda row: row.step)
    kept = [SaveRow(*at, seconds) for at, seconds in saves.items() if found.counts({"run": at[0], "step": at[1]})]
    newest = found.starts[max(found.starts)]
    own, repeated = defaultdict[int, list[StepRow]](list), Counter(step.run for step in lost)
    for taken in (*steps, *lost):
        own[taken.run].append(taken)
    runs = [_run(root, number, found, own[number], repeated[number]) for number in sorted(found.starts)]
    return History(
        [replace(run, cause=stops.get(run.number, "")) for run in _with_restarts_in_place(runs)],
        steps,
        lost,
        evaluations,
        whole(newest.get("totalSteps")) or None,
        str(newest.get("data", "")),
        sorted(kept, key=lambda save: save.step),
    )


def _run(root: Path, number: int, found: RecordedMetrics, own: list[StepRow], lost: int) -> Run:
    start, origin = found.starts[number], found.origins[number]
    times = [time for time in (drawable(start.get("time")), *(step.time for step in own)) if time is not None]
    host, attempt, resumed = "", start.get("attempt"), origin[1] if origin else 0
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the folder of an old run may be gone
        owner = json.loads((run_folder(root, number) / "owner.json").read_bytes())
        host = str(owner.get("host") or "")
    return Run(
        number,
        "" if attempt is None else str(attempt),
        host,
        whole(start.get("worldSize")) or None,
        resumed,
        min(times, default=None),
        max(times, default=None),
        max((step.step for step in own), default=resumed),
        lost,
        life=whole(start.get("life")) or None,
    )


def _with_restarts_in_place(runs: list[Run]) -> list[Run]:
    pairs = zip([None, *runs], runs, strict=False)
    return [
        replace(run, is_in_place=before is not None and before.attempt == run.attempt and (run.life or 1) > 1)
        for before, run in pairs
    ]
