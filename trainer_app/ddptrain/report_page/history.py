"""The history of a training with the failures of its runs, which the launchers reported. No torch."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpplot import recorded
from ddpplot.history import Failure, History, Run
from ddprun.launcher import node_reports
from ddprun.reporting.metrics import whole


def read_history(root: Path) -> History:
    """Return the history of the training in ``root``, which is a checkpoint directory or one run's metrics file.

    Raises:
        DataMissing: there are no metrics, or they cannot be read.
    """
    history = recorded.read_history(root)
    return replace(history, runs=_with_causes(history.runs, root))


def _with_causes(runs: list[Run], root: Path) -> list[Run]:
    """Return the runs with what the launchers reported between the start of each and that of the next.

    If several attempts failed in that time, the first one was the run; the others never opened their metrics. A rank
    that is killed leaves no row of its last second, so the report's step counts as reached, too.
    """
    base = root / node_reports.FOLDER
    attempts = [nodes for path in base.iterdir() if (nodes := node_reports.read(path))] if base.is_dir() else []
    ended = [(max(float(node["time"]) for node in nodes), node_reports.merge_reports(nodes)[0]) for nodes in attempts]
    ended = sorted((pair for pair in ended if pair[1].get("phase") != "preflight"), key=lambda pair: pair[0])
    completed = []
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        end = following.began if following and following.began else math.inf
        time, report = next(((t, r) for t, r in ended if run.began and run.began <= t <= end), (None, None))
        if report and not run.cause:  # else it was stopped
            step = max(0, (whole(report.get("step")) or 0) - bool(report.get("signal")))
            reached = max(run.reached, step)
            repeated = max(run.repeated, reached - following.resumed) if following else 0
            failure = Failure(
                _cause(report), reason=str(report.get("kind") or ""), step=step, time=time,
                hint=str(report.get("hint") or ""), next_step=str(report.get("next") or ""),
            )  # fmt: skip
            run = replace(run, cause=failure.message, failure=failure, reached=reached, repeated=repeated)  # noqa: PLW2901
        completed.append(run)
    return completed


def _cause(report: Mapping[str, Any]) -> str:
    """Return rank, exception or signal, and step of a failure as text."""
    rank, step, exception = (report.get(name) for name in ("rank", "step", "exception"))
    message = str(report.get("message") or report.get("kind") or report.get("code"))
    if not message.startswith(f"rank {rank} "):
        if report.get("traceback") and exception and message != exception:  # not an error of the trainer's own
            message = f"{exception}: {message}"
        message = message if rank is None else f"rank {rank}: {message}"
    if not step or f"step {step}" in message:
        return message
    # The step of a killed rank is the one that had begun; the step of an exception is the last one that was completed.
    return f"{message}, {'in' if report.get('signal') else 'after'} step {step}"
