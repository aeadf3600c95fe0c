"""How a run ended: accuracy, loss curve and checkpoint, or what went wrong and the culprit's last words."""

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpjob.cli import curve, errors
from ddpjob.cli.facts import condition
from ddpjob.cli.logfile import last_lines
from ddpjob.cli.places import Places
from ddpjob.cli.printable import one_line, printable_line, ranks_text
from ddpjob.cli.times import short
from ddpjob.local.errors import LocalError

Json = dict[str, Any]
_TAIL = 15  # lines of the culprit's log
_MISMATCH = 78  # the trainer's exit code for checkpoints of another run, docs/trainer.md
_NO_DATA = 66  # the trainer's exit code for data that cannot be had or read
_LONGEST_ERROR = 400  # characters


@dataclass(frozen=True)
class Outcome:
    """The end of one run. seconds: of this run. stopped_by: the signal that ended it. again: the command to resume."""

    job: Json
    places: Places
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
        path, directory = (self.status.get("checkpoint") or {}).get("path"), self.places.checkpoints()
        return directory / path if path and directory else None

    @property
    def metrics(self) -> Path | None:
        """The loss of every step, where the trainer wrote it down."""
        directory = self.places.checkpoints()
        path = directory / curve.FILE_NAME if directory else None
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
            "name": self.places.name,
            "namespace": self.places.namespace,
            "state": self.state,
            "reason": finished.get("reason") if finished.get("status") == "True" else None,
            "message": finished.get("message") if finished.get("status") == "True" else None,
            "accuracy": self.accuracy,
            "loss": (self.status.get("progress") or {}).get("loss"),
            "restarts": self.status.get("restarts", 0),
            "failures": self.status.get("failures"),
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "metrics": str(self.metrics) if self.metrics else None,
            "logs": str(self.places.record.path / "pods"),
            "seconds": round(self.seconds, 2),
            "resume": self.again if self.state == "Suspended" else None,
        }
        return {key: value for key, value in values.items() if value is not None}


def lines(outcome: Outcome, width: int) -> list[str]:
    """The ending for a person."""
    if outcome.state == "Succeeded":
        return ["", *_succeeded(outcome, width)]
    return ["", *(_failed(outcome) if outcome.failed else _suspended(outcome))]


def _succeeded(outcome: Outcome, width: int) -> list[str]:
    world = (outcome.status.get("world") or {}).get("worldSize")
    ranks = f" on {ranks_text(world)}" if world else ""
    result = f"{outcome.places.name} succeeded in {short(outcome.seconds)}{ranks}"
    if outcome.accuracy is not None:
        result += f": accuracy {100 * outcome.accuracy:.2f} % on the test set"
    drawn = curve.drawing(curve.losses(outcome.metrics), width) if outcome.metrics else []
    return [result, "", *drawn, *([""] if drawn else []), *_where(outcome)]


def _where(outcome: Outcome) -> list[str]:
    found: list[tuple[str, object]] = []
    if outcome.checkpoint:
        found.append(("checkpoint", outcome.checkpoint))
    elif directory := outcome.places.checkpoints():
        found.append(("volume", directory))
    if outcome.metrics:
        found.append(("metrics", outcome.metrics))
    found.append(("logs", f"ddpjob logs {outcome.places.name} --all   ({outcome.places.record.path / 'pods'})"))
    if restarts := outcome.status.get("restarts"):
        why = "; ".join(one_line(f.get("message", ""))[:160] for f in outcome.status.get("failures") or ())
        found.append(("restarts", f"{restarts}: {why}"))
    return [f"  {label:<11} {one_line(value)}" for label, value in found]


def _suspended(outcome: Outcome) -> list[str]:
    if outcome.stopped_by is None:
        return [f"{outcome.places.name} is suspended: its spec says so", f"  resume      {outcome.again}"]
    name = signal.Signals(outcome.stopped_by).name
    step = (outcome.status.get("checkpoint") or {}).get("step")
    saved = f"the checkpoint of step {step} is saved" if step is not None else "no checkpoint was reported"
    head = f"{outcome.places.name} was stopped by {name} after {short(outcome.seconds)}: {saved}"
    return [head, f"  resume      {outcome.again}", *_where(outcome)]


def _failed(outcome: Outcome) -> list[str]:
    failure, name = outcome.failure, outcome.places.name
    finished = condition(outcome.status, "Finished")
    # Deadlines end a job without a culprit; restarts that are spent have one, and its words say more.
    culprit = failure if failure.get("action") == "Fail" else {}
    message = str(culprit.get("message") or finished.get("message") or "it does not say why")
    # ddptrain's messages end with what to do.
    message, _, advice = message.rpartition("; next: ") if "; next: " in message else (message, "", "")
    restarts = outcome.status.get("restarts") or 0
    after = f" after {restarts} restart{'s' if restarts != 1 else ''}" if restarts else ""
    which = f" --node {culprit['rank']}" if culprit.get("rank") is not None else " --all"
    attempt = f" --attempt {culprit['attempt']}" if culprit.get("attempt") else ""
    log = _tail(outcome, culprit)
    error = LocalError(
        f"{name} failed{after}: {_head(message)}",
        _hint(culprit, finished, message) or advice or ("its last lines are below" if log else "the logs may say more"),
        f"ddpjob logs {name}{which}{attempt}",
    )
    return [*errors.lines(error), *log]


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


def _tail(outcome: Outcome, failure: Json) -> Sequence[str]:
    pod = failure.get("pod")
    if not pod:
        return []
    log = outcome.places.record.log(str(pod))
    last = [printable_line(line) for line in last_lines(log, _TAIL)]
    return ["", f"last lines of {one_line(log)}:", *(f"  {line}" for line in last)] if last else []
