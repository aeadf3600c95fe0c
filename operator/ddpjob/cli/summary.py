"""How a run ended: accuracy, loss curve and checkpoint, or what went wrong and the culprit's last words."""

import json
import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpjob.cli.host_paths import HostPaths
from ddpjob.cli.logs import last_lines
from ddpjob.cli.snapshot import condition
from ddpjob.cli.text import duration, error_lines, one_line, ranks_text, sanitize_line
from ddpjob.local.errors import LocalError

Json = dict[str, Any]
_TAIL = 15  # lines of the culprit's log
_MISMATCH = 78  # the trainer's exit code for checkpoints of another run, docs/trainer.md
_NO_DATA = 66  # the trainer's exit code for data that cannot be had or read
_LONGEST_ERROR = 400  # characters


@dataclass(frozen=True)
class RunResult:
    """The end of one run. seconds: of this run. stopped_by: the signal that ended it. again: the command to resume."""

    job: Json
    paths: HostPaths
    seconds: float
    again: str
    stopped_by: int | None = None

    @property
    def status(self) -> Json:
        return dict(self.job.get("status") or {})

    @property
    def state(self) -> str:
        return str(self.status.get("state") or "Pending")

    @property
    def failed(self) -> bool:
        return self.state == "Failed"

    @property
    def exit_code(self) -> int:
        """0 succeeded (or suspended by its own spec), 1 failed, 128 + n stopped by signal n."""
        if self.state in ("Succeeded", "Failed"):
            return int(self.failed)
        return 128 + self.stopped_by if self.stopped_by else 0

    @property
    def accuracy(self) -> float | None:
        """Of the last evaluation, from 0 to 1."""
        try:
            accuracy = float((self.status.get("progress") or {})["accuracy"])
        except (KeyError, ValueError):
            return None
        return accuracy if math.isfinite(accuracy) else None

    @property
    def checkpoint(self) -> Path | None:
        """The file of the last checkpoint that the trainer reported."""
        path, directory = (self.status.get("checkpoint") or {}).get("path"), self.paths.checkpoints()
        return directory / path if path and directory else None

    @property
    def metrics(self) -> Path | None:
        """The loss of every step, where the trainer wrote it down."""
        directory = self.paths.checkpoints()
        path = directory / FILE_NAME if directory else None
        return path if path and path.is_file() else None

    @property
    def failure(self) -> Json:
        """The last entry of status.failures, {} where nothing failed."""
        return dict((self.status.get("failures") or [{}])[-1])

    def wire(self) -> Json:
        """For programs."""
        finished = condition(self.status, "Finished")
        values: Json = {
            "exitCode": self.exit_code,
            "name": self.paths.name,
            "namespace": self.paths.namespace,
            "state": self.state,
            "reason": finished.get("reason") if finished.get("status") == "True" else None,
            "message": finished.get("message") if finished.get("status") == "True" else None,
            "accuracy": self.accuracy,
            "loss": (self.status.get("progress") or {}).get("loss"),
            "restarts": self.status.get("restarts", 0),
            "failures": self.status.get("failures"),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "metrics": str(self.metrics) if self.metrics else None,
            "logs": str(self.paths.record.path / "pods"),
            "seconds": round(self.seconds, 2),
            "resume": self.again if self.state == "Suspended" else None,
        }
        return {key: value for key, value in values.items() if value is not None}


def summary_lines(result: RunResult, width: int) -> list[str]:
    """The ending for a person."""
    if result.state == "Succeeded":
        return ["", *_succeeded(result, width)]
    return ["", *(_failed(result) if result.failed else _suspended(result))]


def _succeeded(result: RunResult, width: int) -> list[str]:
    world = (result.status.get("world") or {}).get("worldSize")
    ranks = f" on {ranks_text(world)}" if world else ""
    headline = f"{result.paths.name} succeeded in {duration(result.seconds)}{ranks}"
    if result.accuracy is not None:
        headline += f": accuracy {100 * result.accuracy:.2f} % on the test set"
    drawn = drawing(losses(result.metrics), width) if result.metrics else []
    return [headline, "", *drawn, *([""] if drawn else []), *_where(result)]


def _where(result: RunResult) -> list[str]:
    found: list[tuple[str, object]] = []
    if result.checkpoint:
        found.append(("checkpoint", result.checkpoint))
    elif directory := result.paths.checkpoints():
        found.append(("volume", directory))
    if result.metrics:
        found.append(("metrics", result.metrics))
    found.append(("logs", f"ddpjob logs {result.paths.name} --all   ({result.paths.record.path / 'pods'})"))
    if restarts := result.status.get("restarts"):
        why = "; ".join(one_line(f.get("message", ""))[:160] for f in result.status.get("failures") or ())
        found.append(("restarts", f"{restarts}: {why}"))
    return [f"  {label:<11} {one_line(value)}" for label, value in found]


def _suspended(result: RunResult) -> list[str]:
    if result.stopped_by is None:
        return [f"{result.paths.name} is suspended: its spec says so", f"  resume      {result.again}"]
    name = signal.Signals(result.stopped_by).name
    step = (result.status.get("checkpoint") or {}).get("step")
    saved = f"the checkpoint of step {step} is saved" if step is not None else "no checkpoint was reported"
    head = f"{result.paths.name} was stopped by {name} after {duration(result.seconds)}: {saved}"
    return [head, f"  resume      {result.again}", *_where(result)]


def _failed(result: RunResult) -> list[str]:
    failure, name = result.failure, result.paths.name
    finished = condition(result.status, "Finished")
    # Deadlines end a job without a culprit; restarts that are spent have one, and its words say more.
    culprit = failure if failure.get("action") == "Fail" else {}
    message = str(culprit.get("message") or finished.get("message") or "it does not say why")
    # ddptrain's messages end with what to do.
    message, _, advice = message.rpartition("; next: ") if "; next: " in message else (message, "", "")
    restarts = result.status.get("restarts") or 0
    after = f" after {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
    which = f" --node {culprit['rank']}" if culprit.get("rank") is not None else " --all"
    attempt = f" --attempt {culprit['attempt']}" if culprit.get("attempt") else ""
    log = _tail(result, culprit)
    error = LocalError(
        f"{name} failed{after}: {_head(message)}",
        _hint(culprit, finished, message) or advice or ("its last lines are below" if log else "the logs may say more"),
        f"ddpjob logs {name}{which}{attempt}",
    )
    return [*error_lines(error), *log]


def _head(message: str) -> str:
    """Without the tail of the log that a message may carry: the tail itself follows."""
    first = message.strip().splitlines()[0] if message.strip() else ""
    return first if len(first) <= _LONGEST_ERROR else f"{first[:_LONGEST_ERROR]} …"


def _hint(culprit: Json, finished: Json, message: str) -> str:
    """What usually causes it, on one machine; empty where nobody knows."""
    if culprit.get("reason") in ("StartError", "ContainerCannotRun"):
        return "images are not used in local mode: the program must be installed here and on PATH"
    if culprit.get("exitCode") == _MISMATCH or "belong to another configuration" in message:
        return "--fresh begins without the checkpoints of before, another --name beside them"
    if culprit.get("exitCode") == _NO_DATA and "no mirror delivered" in message:
        return "--data-dir DIR trains with files you have, --digits-if-offline on scikit-learn's digits"
    if culprit.get("signal") == signal.SIGKILL:
        return "SIGKILL is often the kernel's out-of-memory killer: try fewer processes, or a smaller batch"
    if culprit.get("signal") == signal.SIGBUS:
        return "a bus error is often a full /dev/shm"
    if finished.get("reason") == "DeadlineExceeded":
        return "what was saved stays; --set activeDeadlineSeconds=… gives it more time"
    return ""


def _tail(result: RunResult, failure: Json) -> Sequence[str]:
    pod = failure.get("pod")
    if not pod:
        return []
    log = result.paths.record.log(str(pod))
    last = [sanitize_line(line) for line in last_lines(log, _TAIL)]
    return ["", f"last lines of {one_line(log)}:", *(f"  {line}" for line in last)] if last else []


FILE_NAME = "metrics.jsonl"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Point:
    """Mean training loss of one optimizer step."""

    step: int
    loss: float


def losses(path: Path) -> list[Point]:
    """The steps that count, in order: what an interrupted run did beyond the checkpoint that was resumed is dropped.

    The newest run counts whole, the run that it resumed from up to the step of that checkpoint, and so on back. Torn
    lines are skipped; a file that cannot be read has no points.
    """
    origins: dict[int, tuple[int, int] | None] = {}
    found: list[tuple[int, Point]] = []
    for row in _metrics_rows(path):
        try:
            if row["event"] == "start":
                origin = row["resumedFrom"]
                origins[int(row["run"])] = (int(origin["run"]), int(origin["step"])) if origin else None
            elif row["event"] == "train" and row["loss"] is not None:
                found.append((int(row["run"]), Point(int(row["step"]), float(row["loss"]))))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    last = _last_steps(origins)
    kept = {point.step: point for run, point in found if point.step <= last.get(run, -1)}
    return [kept[step] for step in sorted(kept)]


def drawing(points: Sequence[Point], width: int, height: int = 13) -> list[str]:
    """Lines of text, at most ``width`` wide; none where there are too few points for a curve."""
    points = [point for point in points if math.isfinite(point.loss)]
    if len(points) < 3:
        return []
    import plotext  # type: ignore[import-untyped]

    shown = _thinned(points, 4 * width)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.plot([p.step for p in shown], [p.loss for p in shown], marker="braille")
    plotext.title("training loss by step")
    steps = [points[0].step, points[len(points) // 2].step, points[-1].step]
    plotext.xticks(steps, [f"{step:,}" for step in steps])
    return [line.rstrip() for line in _COLOUR.sub("", plotext.build()).splitlines()]


def _thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """Means of neighbours: a dot has four columns, and more points than that are noise."""
    bundle = math.ceil(len(points) / most)
    groups = [points[i : i + bundle] for i in range(0, len(points), bundle)]
    return [Point(group[len(group) // 2].step, sum(p.loss for p in group) / len(group)) for group in groups]


def _metrics_rows(path: Path) -> list[Json]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _last_steps(origins: dict[int, tuple[int, int] | None]) -> dict[int, float]:
    """Run to the last of its steps that counts, for the newest run and all that it descends from."""
    last: dict[int, float] = {}
    run, step = max(origins, default=0), math.inf
    while run in origins and run not in last:
        last[run] = step
        origin = origins[run]
        if origin is None:
            break
        run, step = origin[0], min(step, origin[1])
    return last
