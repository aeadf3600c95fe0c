"""Metrics of trainings as their files have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEGAN = 1_000_000.0


def write_run(
    root: Path,
    run: int,
    steps: range,
    *,
    origin: int | None = None,
    rows: tuple[dict[str, Any], ...] = (),
    **start: Any,
) -> None:
    """Write the metrics of a run that takes a step a second, and begins 100 s after the run before it.

    Args:
        origin: the step of the run before it from which it resumed.
        rows: further rows, without their run.
        start: fields of the start row.
    """
    began = BEGAN + 100 * run
    resumed = None if origin is None else {"run": run - 1, "step": origin}
    written = [{"event": "start", "run": run, "resumedFrom": resumed, "time": began, **start}]
    for number, step in enumerate(steps, 1):
        written.append({"event": "train", "run": run, "step": step, "loss": 1 / step, "time": began + number})
    folder = root / "metrics"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in (*written, *({"run": run, **row} for row in rows))]
    (folder / f"run-{run:06d}.jsonl").write_text("".join(lines))


def restarted(root: Path) -> None:
    """Write a training with a restart in place after step 25, and a second attempt after step 45."""
    save = {"event": "save", "step": 20, "seconds": 0.25}
    write_run(root, 1, range(1, 26), rows=(save,), attempt=1, life=1, totalSteps=60)
    write_run(root, 2, range(21, 46), origin=20, rows=({"event": "save", "step": 40},), attempt=1, life=2)
    write_run(root, 3, range(41, 61), origin=40, attempt=2, life=1, totalSteps=60)
