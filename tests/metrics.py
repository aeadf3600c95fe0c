"""The rows of a training as if it had never been interrupted."""

from __future__ import annotations

from pathlib import Path

from ddprun.files import Json
from ddprun.reporting.metrics import read_metrics


def effective_rows(path: Path | str, event: str | None = None) -> list[Json]:
    """Return the train and eval rows that count, in order of step: those of the newest run and of its ancestors.

    Rows that a killed run wrote after its last checkpoint, and rows that an older attempt still appends, are dropped.

    Args:
        path: a checkpoint directory, or the file of one run.
        event: ``train`` or ``eval`` to return only those rows.
    """
    found, events = read_metrics(path), (event,) if event else ("train", "eval")
    kept = [row for row in found.rows if row["event"] in events and found.counts(row)]
    return sorted(kept, key=lambda row: (row["step"], row["event"] == "eval"))
