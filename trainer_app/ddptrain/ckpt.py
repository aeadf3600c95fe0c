"""The verbs ``ckpt ls``, ``verify`` and ``rollback``: checkpoints as a person sees and mends them. No torch.

They read what ``checkpoint_writer`` writes; only ``rollback`` changes anything, and it deletes nothing.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from ddptrain.checkpoint import fault, manifests, newest_valid, reading, run_numbers, set_aside
from ddptrain.errors import DataError, UsageError, volume_error
from ddptrain.finite import dumps


def listing(root: Path, *, verify: bool) -> list[dict[str, Any]]:
    """One row per checkpoint, newest first: run, step, what its manifest says, and the verdict.

    Args:
        verify: read the contents and compare the digests; otherwise ``verdict`` is ``not verified``.
    Raises:
        DataError: the directory is absent, or holds no checkpoint.
    """
    rows: list[dict[str, Any]] = []
    with reading(root):
        for run in run_numbers(root) if root.is_dir() else []:
            for step, path in manifests(root, run):
                try:
                    verdict = (fault(path)[0] or "ok") if verify else "not verified"
                except FileNotFoundError:
                    continue  # retired by a training that runs
                rows.append({"run": run, "step": step, **_told(path), "verdict": verdict})
    if not rows:
        raise DataError(
            f"no checkpoint in {root}",
            hint="runs are folders run-000001, run-000002 … in there",
            next_step="name the --checkpoint-dir of a training",
        )
    return rows


def _told(manifest_path: Path) -> dict[str, Any]:
    """What a manifest says that is worth a column; None for what it does not say, or not as a manifest would."""
    manifest: Any = None
    with contextlib.suppress(OSError, ValueError):
        manifest = json.loads(manifest_path.read_bytes())
    manifest = manifest if isinstance(manifest, dict) else {}
    evaluation = manifest.get("evaluation")
    values = manifest | {"accuracy": evaluation.get("accuracy") if isinstance(evaluation, dict) else None}
    numbers = {name: values.get(name) for name in ("bytes", "time", "accuracy", "complete", "worldSize")}
    return {name: value if isinstance(value, int | float) else None for name, value in numbers.items()}


def show(root: Path, *, verify: bool, as_json: bool) -> int:
    """Print the listing. Returns 0, or 66 if a verified checkpoint is damaged."""
    rows = listing(root, verify=verify)
    if as_json:
        print(dumps(rows))
    else:
        print(f"{'run':>4} {'step':>9} {'accuracy':>9} {'size':>10} {'saved':<19}  {'':<8} verdict")
        for row in rows:
            accuracy = f"{row['accuracy']:.4f}" if row["accuracy"] is not None else "-"
            size = f"{row['bytes'] / 1e6:.2f} MB" if row["bytes"] else "-"
            saved = "-"
            with contextlib.suppress(ValueError, OverflowError, OSError):  # a damaged one may name any moment
                saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) if row["time"] else "-"
            end = "finished" if row["complete"] else ""
            print(f"{row['run']:>4} {row['step']:>9} {accuracy:>9} {size:>10} {saved:<19}  {end:<8} {row['verdict']}")
    bad = [row for row in rows if row["verdict"] not in ("ok", "not verified")]
    return DataError.code if bad else 0


def rollback(root: Path, *, run: int | None, step: int | None) -> int:
    """Set aside every checkpoint newer than the one named, so that the next start resumes from that. Returns 0.

    Raises:
        UsageError: no step was named. DataError: that checkpoint is absent or damaged. VolumeError: cannot rename.
    """
    if step is None:
        raise UsageError("rollback needs --step", next_step=f"ddptrain ckpt ls --checkpoint-dir {root}")
    with reading(root):
        found = newest_valid(root, lambda path, reason: print(f"{path}: {reason}"), run=run, step=step)
    if found is None:
        where = f"run {run}, step {step}" if run is not None else f"step {step}"
        raise DataError(
            f"no valid checkpoint of {where} in {root}", next_step=f"ddptrain ckpt verify --checkpoint-dir {root}"
        )
    target = (found[0].run, found[0].step)
    newer = [(r, s, path) for r in run_numbers(root) for s, path in manifests(root, r) if (r, s) > target]
    for number, at, path in newer:
        try:
            set_aside(path, "rolled-back")
        except OSError as error:
            raise volume_error(error, path) from error
        print(f"run {number}, step {at}: set aside as *.rolled-back")
    print(f"the next start resumes from run {target[0]}, step {target[1]}")
    return 0
