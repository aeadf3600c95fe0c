"""Show a job's progress until it finishes: a table that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from ddpjob.api.objects import Json
from tests.e2e.jobs import JOB_KIND
from tests.e2e.kubectl import Kubectl, condition_of
from tests.kind.command import CommandError

INTERVAL = 1.0
BAR = 30
_COLUMNS = "  {:<26} {:<14} {:<22} {}"


class Follower:
    """Reads the job and its pods once a second."""

    def __init__(self, kubectl: Kubectl, name: str, output: TextIO) -> None:
        self._kubectl = kubectl
        self._name = name
        self._output = output
        self._redraws = output.isatty()
        self._drawn = 0
        self._last_line = ""
        self._begin = time.monotonic()

    def follow(self, seconds: float) -> Json:
        """Return the finished job. Raises ``AssertionError`` if it has not finished after ``seconds``."""
        while True:
            job = self._kubectl.object(JOB_KIND, self._name)
            self._show(job)
            if condition_of(job, "Finished").get("status") == "True":
                return job
            if time.monotonic() - self._begin > seconds:
                raise AssertionError(
                    f"timed out after {seconds:g} s waiting for {self._name}. Next: kubectl describe ddp {self._name}"
                )
            time.sleep(INTERVAL)

    def _show(self, job: Json) -> None:
        if not self._redraws:
            line = plain_line(job)
            if line != self._last_line:
                print(line, file=self._output, flush=True)
            self._last_line = line
            return
        try:
            pods = self._kubectl.objects("pods", "--selector", f"ddpjob.dev/job-name={self._name}")
        except CommandError:
            pods = []
        lines = table(job, pods, time.monotonic() - self._begin)
        # Move to the start of the last table, overwrite each line, and clear the rest of a longer table.
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        print(up + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J", end="", file=self._output, flush=True)
        self._drawn = len(lines)


def plain_line(job: Json) -> str:
    """Return the job's state as one line."""
    status, progress = job.get("status", {}), job.get("status", {}).get("progress", {})
    parts = [
        f"{status.get('state', 'New')}",
        f"nodes {status.get('nodesReady', '0/?')}",
        progress.get("display", ""),
        f"loss {progress['loss']}" if "loss" in progress else "",
        f"accuracy {progress['accuracy']}" if "accuracy" in progress else "",
        f"restarts {status['restarts']}" if status.get("restarts") else "",
        "" if _runs(job) else condition_of(job, "Running").get("message", ""),
    ]
    return f"{job['metadata']['name']}: " + ", ".join(part for part in parts if part)


def table(job: Json, pods: list[Json], seconds: float) -> list[str]:
    """Return the lines of the table: the job, then its pods."""
    status = job.get("status", {})
    progress, world = status.get("progress", {}), status.get("world", {})
    percent = int(progress.get("percent") or 0)
    bar = "█" * (BAR * percent // 100) + "░" * (BAR - BAR * percent // 100)
    facts = [
        f"epoch {progress.get('epoch', 0)}/{progress.get('totalEpochs', '?')}",
        f"step {progress.get('step', 0)}/{progress.get('totalSteps', '?')}",
        f"loss {progress.get('loss', '–')}",
        f"accuracy {progress.get('accuracy', '–')}",
        f"{progress.get('samplesPerSecond', '–')} samples/s",
    ]
    lines = [
        "",
        f"  {job['metadata']['name']}: {status.get('state', 'New')}, nodes {status.get('nodesReady', '0/?')}, "
        f"world size {world.get('worldSize', '?')}, restarts {status.get('restarts', 0)}, {seconds:.0f} s",
        f"  {bar} {percent:3d} %",
        "  " + "   ".join(facts),
        "",
        _COLUMNS.format("POD", "PHASE", "NODE", "ADDRESS"),
    ]
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        about, where = pod["status"], pod["spec"].get("nodeName", "–")
        row = _COLUMNS.format(pod["metadata"]["name"], about.get("phase", "–"), where, about.get("podIP", "–"))
        lines.append(row.rstrip())
    if not _runs(job) and (message := condition_of(job, "Running").get("message")):
        lines.append(f"  {message[:110]}")
    return lines


def _runs(job: Json) -> bool:
    return condition_of(job, "Running").get("status") == "True"
