"""The end of a run: accuracy, loss curve and file locations, or the error and the end of the failed node's log."""

import json
import math
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpjob.api import exit_codes
from ddpjob.api.objects import Json, condition
from ddpjob.cli.logs import last_lines
from ddpjob.cli.text import accuracy_text, duration, error_lines, one_line, ranks_text, sanitize_line
from ddpjob.local import LocalError
from ddpjob.local.state import HostPaths

_METRICS = ("metrics", "metrics.jsonl")
"""The trainer writes one of them into the checkpoint directory: a folder with a file for each run, or an older one the
file of all runs."""
_LARGEST_STEP = 10**12  # that a drawing shows
_LOG_LINES = 15  # of the node that failed
_LONGEST_ERROR = 400  # characters
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class RunResult:
    """The result of one run.

    seconds: duration of this run. again: the command that resumes the job. stopped_by: the signal that stopped it.
    """

    job: Json
    paths: HostPaths
    seconds: float
    again: str
    stopped_by: int | None = None

    @property
    def name(self) -> str:
        return self.paths.job.name

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
        """0: succeeded, or suspended by its own spec. 1: failed. 128 + n: stopped by signal n."""
        if self.state in ("Succeeded", "Failed"):
            return int(self.failed)
        return exit_codes.SIGNAL_BASE + self.stopped_by if self.stopped_by else 0

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the last evaluation, from 0 to 1; None if the trainer reported no finite number."""
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
        """The folder or file with the loss of every step, if the trainer wrote one."""
        directory = self.paths.checkpoints()
        paths = [directory / name for name in _METRICS] if directory else []
        return next((path for path in paths if path.exists()), None)

    @property
    def failure(self) -> Json:
        """The last entry of status.failures, {} if nothing failed."""
        return dict((self.status.get("failures") or [{}])[-1])

    def wire(self) -> Json:
        """Return the result as JSON; unknown fields are absent."""
        finished = condition(self.status, "Finished")
        is_finished = finished.get("status") == "True"
        values: Json = {
            "exitCode": self.exit_code,
            "name": self.name,
            "namespace": self.paths.job.namespace,
            "state": self.state,
            "reason": finished.get("reason") if is_finished else None,
            "message": finished.get("message") if is_finished else None,
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
    """Return the lines that end a run on a terminal or in a log."""
    if result.state == "Succeeded":
        return ["", *_succeeded(result, width)]
    return ["", *(_failed(result) if result.failed else _suspended(result))]


def _succeeded(result: RunResult, width: int) -> list[str]:
    world = (result.status.get("world") or {}).get("worldSize")
    ranks = f" on {ranks_text(world)}" if world else ""
    headline = f"{result.name} succeeded in {duration(result.seconds)}{ranks}"
    if result.accuracy is not None:
        headline += f": accuracy {accuracy_text(result.accuracy)} on the test set"
    drawn = drawing(losses(result.metrics.parent), width) if result.metrics else []
    return [headline, "", *drawn, *([""] if drawn else []), *_locations(result)]


def _locations(result: RunResult) -> list[str]:
    found: list[tuple[str, object]] = []
    if result.checkpoint:
        found.append(("checkpoint", result.checkpoint))
    elif directory := result.paths.checkpoints():
        found.append(("volume", directory))
    if result.metrics:
        found.append(("metrics", result.metrics))
    found.append(("logs", f"ddpjob logs {result.name} --all   ({result.paths.record.path / 'pods'})"))
    if restarts := result.status.get("restarts"):
        why = "; ".join(one_line(f.get("message", ""))[:160] for f in result.status.get("failures") or ())
        found.append(("restarts", f"{restarts}: {why}"))
    return [f"  {label:<11} {one_line(value)}" for label, value in found]


def _suspended(result: RunResult) -> list[str]:
    if result.stopped_by is None:
        return [f"{result.name} is suspended by its own spec (spec.suspend)", f"  resume      {result.again}"]
    name = signal.Signals(result.stopped_by).name
    step = (result.status.get("checkpoint") or {}).get("step")
    saved = f"the checkpoint of step {step} is saved" if step is not None else "no checkpoint was reported"
    headline = f"{result.name} was stopped by {name} after {duration(result.seconds)}: {saved}"
    return [headline, f"  resume      {result.again}", *_locations(result)]


def _failed(result: RunResult) -> list[str]:
    finished = condition(result.status, "Finished")
    # A deadline fails the job without a failed pod; if the restarts are used up, the last failure says more.
    failure = result.failure if result.failure.get("action") == "Fail" else {}
    message = str(failure.get("message") or finished.get("message") or "no reason was reported")
    restarts = result.status.get("restarts") or 0
    after = f" after {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
    node = f" --node {failure['nodeRank']}" if failure.get("nodeRank") is not None else " --all"
    attempt = f" --attempt {failure['attempt']}" if failure.get("attempt") else ""
    logs_command = f"ddpjob logs {result.name}{node}{attempt}"
    log = _end_of_log(result, failure)
    hint, next_step = _local_hint(failure, finished), ""
    if not hint:
        hint, next_step = str(failure.get("hint") or ""), str(failure.get("next") or "")
    error = LocalError(
        f"{result.name} failed{after}: {_first_line(message)}",
        hint or ("its last lines are below" if log else "the logs may say more"),
        next_step or logs_command,
    )
    return [*error_lines(error), *([] if next_step in ("", logs_command) else [f"logs:  {logs_command}"]), *log]


def _first_line(message: str) -> str:
    """Return the message without the end of the log that it may contain; that is printed below."""
    first = message.strip().splitlines()[0] if message.strip() else ""
    return first if len(first) <= _LONGEST_ERROR else f"{first[:_LONGEST_ERROR]} …"


def _local_hint(failure: Json, finished: Json) -> str:
    """Return the usual cause in local mode, or what to do about it there; empty if there is none."""
    reason, number = failure.get("reason"), failure.get("signal")
    if reason in ("StartError", "ContainerCannotRun"):
        return "local mode does not use images: the program must be installed here and on PATH"
    if reason in ("ConfigMismatch", "DataMismatch") or failure.get("exitCode") == exit_codes.MISMATCH:
        return "--fresh removes the existing checkpoints, another --name keeps them"
    if reason == "DownloadFailed":
        return "--data-dir DIR trains with files you have, --digits-if-offline on scikit-learn's digits"
    if number == signal.SIGKILL:
        return "SIGKILL often comes from the kernel's out-of-memory killer: try fewer processes or a smaller batch"
    if number == signal.SIGBUS:
        return "a bus error often means that /dev/shm is full"
    if finished.get("reason") == "DeadlineExceeded":
        return "checkpoints are kept; --set activeDeadlineSeconds=… gives the job more time"
    return ""


def _end_of_log(result: RunResult, failure: Json) -> Sequence[str]:
    pod = failure.get("pod")
    if not pod:
        return []
    log = result.paths.record.log(str(pod))
    last = [sanitize_line(line) for line in last_lines(log, _LOG_LINES)]
    return ["", f"last lines of {one_line(log)}:", *(f"  {line}" for line in last)] if last else []


@dataclass(frozen=True)
class Point:
    """Mean training loss of one optimizer step."""

    step: int
    loss: float


def losses(directory: Path) -> list[Point]:
    """Return the loss of every step in a checkpoint directory, without steps that a resumed run repeated.

    The newest run counts in full, the run that it resumed from up to the step of that checkpoint, and so on back.
    Incomplete lines are skipped; a file that cannot be read has no points.
    """
    folder, older = (directory / name for name in _METRICS)
    origins: dict[int, tuple[int, int] | None] = {}
    found: list[tuple[int, Point]] = []
    for row in (row for path in (older, *sorted(folder.glob("run-*.jsonl"))) for row in _metrics_rows(path)):
        try:
            if row["event"] == "start":
                run, origin = int(row["run"]), row.get("resumedFrom")
                origins[run] = None  # also if the row does not say from where it resumed
                if origin is not None:
                    origins[run] = int(origin["run"]), int(origin["step"])
            elif row["event"] == "train" and row["loss"] is not None:
                found.append((int(row["run"]), Point(int(row["step"]), float(row["loss"]))))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    last = _last_steps(origins)
    kept = {point.step: point for run, point in found if point.step <= last.get(run, -1)}
    return [kept[step] for step in sorted(kept)]


def drawing(points: Sequence[Point], width: int, height: int = 13) -> list[str]:
    """Return the loss curve as lines of at most ``width`` characters; none for fewer than three points."""
    points = [point for point in points if math.isfinite(point.loss) and abs(point.step) <= _LARGEST_STEP]
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
    """Return means of neighbouring points: the drawing shows at most ``most`` of them."""
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
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _last_steps(origins: dict[int, tuple[int, int] | None]) -> dict[int, float]:
    """Return run to its last step that counts, for the newest run and those that it descends from."""
    last: dict[int, float] = {}
    run, step = max(origins, default=0), math.inf
    while run in origins and run not in last:
        last[run] = step
        origin = origins[run]
        if origin is None:
            break
        run, step = origin[0], min(step, origin[1])
    return last
