"""The end of a run: accuracy, loss curve and file locations, or why it failed and the end of the failed node's log."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ddpjob.api import exit_codes
from ddpjob.api.text import clean_line
from ddpjob.cli.card import attempts, time_spent
from ddpjob.cli.text import accuracy_text, duration, number_of, one_line
from ddpjob.cli.why import verdict_lines
from ddpjob.client.job import DDPJob
from ddpjob.client.local import explained
from ddpjob.client.local_logs import last_lines
from ddpjob.local.state import HostPaths

_LOG_LINES = 15  # of the node that failed


@dataclass(frozen=True)
class RunResult:
    """The result of one run.

    seconds: duration of this run. again: the command that resumes the job. stopped_by: the signal that stopped it.
    has_output: the lines of node 0 were shown.
    """

    job: DDPJob
    paths: HostPaths
    seconds: float
    again: str
    stopped_by: int | None = None
    has_output: bool = False

    @property
    def failed(self) -> bool:
        return self.job.state == "Failed"

    @property
    def exit_code(self) -> int:
        """0: succeeded, or suspended by its own spec. 1: failed. 128 + n: stopped by signal n."""
        if self.job.state in ("Succeeded", "Failed"):
            return int(self.failed)
        return exit_codes.SIGNAL_BASE + self.stopped_by if self.stopped_by else 0

    @property
    def checkpoint(self) -> Path | None:
        """The file of the last checkpoint that the trainer reported."""
        saved, directory = self.job.status.checkpoint, self.paths.checkpoints()
        return directory / saved.path if saved and directory else None

    @property
    def metrics(self) -> Path | None:
        """The folder or file with the loss of every step, if the trainer wrote one."""
        return self.paths.metrics()

    @property
    def logs(self) -> Path:
        """The folder with the log of every pod."""
        return self.paths.record.path / "pods"


def summary_lines(result: RunResult, width: int) -> list[str]:
    """Return the lines that end a run on a terminal or in a log; the first is empty."""
    if result.job.state == "Succeeded":
        return ["", *_succeeded(result, width)]
    return ["", *(_failed(result) if result.failed else _suspended(result))]


def _succeeded(result: RunResult, width: int) -> list[str]:
    world, progress = result.job.status.world, result.job.status.progress
    headline = f"{result.job.name} succeeded in {duration(result.seconds)}"
    headline += f" on {number_of(world.world_size, 'rank')}" if world else ""
    if progress and progress.accuracy:
        headline += f": accuracy {accuracy_text(progress.accuracy)} on the test set"
    drawn = _loss_curve(result.metrics, width) if result.metrics else []
    return [headline, "", *drawn, *([""] if drawn else []), *_locations(result)]


def _loss_curve(metrics: Path, width: int) -> list[str]:
    from ddpjob.cli.plot import history_in

    if (history := history_in(metrics)) is None:
        return []
    from ddpplot import terminal

    return terminal.loss_drawing(history, width)


def _suspended(result: RunResult) -> list[str]:
    resume = f"  resume      {result.again}"
    if result.stopped_by is None:
        return [f"{result.job.name} is suspended by its own spec (spec.suspend)", resume]
    name = signal.Signals(result.stopped_by).name
    last = result.job.status.checkpoint
    saved = f"the checkpoint of step {last.step} is saved" if last else "no checkpoint was reported"
    headline = f"{result.job.name} was stopped by {name} after {duration(result.seconds)}: {saved}"
    return [headline, resume, *_locations(result)]


def _locations(result: RunResult) -> list[str]:
    found: list[tuple[str, object]] = []
    if result.checkpoint:
        found.append(("checkpoint", result.checkpoint))
    elif directory := result.paths.checkpoints():
        found.append(("volume", directory))
    if result.metrics:
        found.append(("metrics", result.metrics))
    found.append(("logs", f"ddpjob logs {result.job.name} --all   ({result.logs})"))
    now = datetime.now(UTC)
    if spent := time_spent(result.job, now):
        found.append(("time", spent))
    if result.job.status.restarts:
        found += [(fact.label, fact.text) for fact in attempts(result.job, now)]
    return [f"  {label:<11} {one_line(value)}" for label, value in found]


def _failed(result: RunResult) -> list[str]:
    """Return what ``ddpjob why`` prints, and the end of the log of the node that failed."""
    found = explained(result.paths.record, result.job.manifest, is_run=True)
    failed = found.node_rank is not None
    node = f" --node {found.node_rank}" if failed else " --all"
    attempt = f" --attempt {found.attempt}" if failed and found.attempt else ""
    logs_command = f"ddpjob logs {result.job.name}{node}{attempt}"
    lines = list(verdict_lines(found, "this machine", coloured=False))
    logs = [] if logs_command in (found.next or "") else [f"logs:  {logs_command}"]
    return [*lines, *logs, *([] if found.node_rank == 0 and result.has_output else _end_of_log(result, found.pod))]


def _end_of_log(result: RunResult, pod: str | None) -> Sequence[str]:
    if not pod:
        return []
    log = result.paths.record.log(pod)
    last = [clean_line(line) for line in last_lines(log, _LOG_LINES)]
    return ["", f"last lines of {one_line(log)}:", *(f"  {line}" for line in last)] if last else []
