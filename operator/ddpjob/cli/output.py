"""How a run is shown: plain lines for a pipe, a file or a CI log, and JSON for programs; ``live`` has the card."""

import io
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, Self, TextIO

from pydantic import RootModel

from ddpjob.api.model import WireModel
from ddpjob.api.text import clean_line
from ddpjob.cli.card import Moment, pod_state, pod_text
from ddpjob.cli.summary import RunResult, summary_lines
from ddpjob.cli.text import duration, one_line
from ddpjob.client.log_lines import RANK_PREFIX
from ddpjob.client.timeline import JobPod

INTERVAL = 2.0
"""Seconds between lines that report only training progress."""
_STARTING = (None, "ContainerCreating", "PodInitializing")


class Display(ABC):
    """One way of showing a run; used as a context manager around it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:  # noqa: B027 - optional to override
        """Stop drawing; only the live card does."""

    @abstractmethod
    def show(self, moment: Moment) -> None:
        """Show the job as it is now."""

    @abstractmethod
    def note(self, line: str, *, loud: bool = False) -> None:
        """Show one line from local mode to the user. loud: it is a warning."""

    @abstractmethod
    def output(self, line: str) -> None:
        """Show one line that node 0 of a program without progress reports printed."""

    @abstractmethod
    def end(self, result: RunResult) -> None:
        """Show how the run ended; the last call."""


def of_process(line: str) -> tuple[str, str]:
    """Return who printed a line, node 0 or a rank of it, and the line without ddprun's prefix, safe for a terminal."""
    prefix = RANK_PREFIX.match(line)
    return (prefix[0][1:-2], clean_line(line[prefix.end() :])) if prefix else ("n0", clean_line(line))


class PlainDisplay(Display):
    """Writes a line for every change."""

    def __init__(
        self, stream: TextIO, clock: Callable[[], float] = time.monotonic, *, interval: float = INTERVAL
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._interval = interval
        self._begin = clock()
        self._line = ""
        self._written = ""
        self._written_at = -interval
        self._urgent: tuple[object, ...] = ()
        self._pods: dict[int, str] = {}
        self._said = ""

    def show(self, moment: Moment) -> None:
        """Write changes of state at once, and progress every few seconds."""
        facts = [moment.state, *moment.job_facts()]
        self._line, news = ", ".join([*facts, *moment.training_facts()]), moment.news
        progress, saved = moment.job.status.progress, moment.job.status.checkpoint
        training = (progress.epoch, progress.accuracy, progress.step is None) if progress else None
        urgent = (*facts, training, saved.resumed_from_step if saved else None)
        if urgent != self._urgent or self._clock() - self._written_at >= self._interval:
            self._write_status()
        self._urgent = urgent
        if not news or news not in self._said:  # no line before had it
            if news:
                self._print(f"  {news}")
            self._said = news
        for pod in moment.pods:
            self._show_pod(pod)

    def note(self, line: str, *, loud: bool = False) -> None:
        self._print(f"{'!!!' if loud else '·'} {one_line(line)}")

    def output(self, line: str) -> None:
        print(" | ".join(of_process(line)), file=self._stream, flush=True)

    def end(self, result: RunResult) -> None:
        """Write the last state, then the summary."""
        self._write_status()
        print("\n".join(summary_lines(result, width=80)), file=self._stream, flush=True)

    def _write_status(self) -> None:
        if self._line != self._written:
            self._print(self._line)
            self._written, self._written_at = self._line, self._clock()

    def _show_pod(self, pod: JobPod) -> None:
        if pod.state == "pending" and pod.reason in _STARTING:
            return
        facts = ", ".join(filter(None, (pod_state(pod), pod_text(pod, with_end=False))))
        line = f"  n{pod.node_rank} {one_line(pod.name)}: {facts}"
        if self._pods.get(pod.node_rank) != line:
            self._print(line)
        self._pods[pod.node_rank] = line

    def _print(self, line: str) -> None:
        print(f"{duration(self._clock() - self._begin):>6}  {line}", file=self._stream, flush=True)


class StatusLine(WireModel):
    """The job after a change."""

    type: Literal["status"]
    time: str
    name: str
    namespace: str
    status: dict[str, Any]
    """As `status` of the DDPJob."""
    pods: list[JobPod]
    """The pods of the current attempt."""


class MessageLine(WireModel):
    """A line for the user."""

    type: Literal["note", "warning"]
    time: str
    message: str


class OutputLine(WireModel):
    """A line that a node printed, of programs that report no progress."""

    type: Literal["output"]
    time: str
    node: int
    line: str


class ResultLine(WireModel):
    """The last line."""

    type: Literal["result"]
    time: str
    exit_code: int
    name: str
    namespace: str
    status: dict[str, Any]
    """As `status` of the DDPJob."""
    checkpoint: str | None = None
    """Path of the last checkpoint on this machine."""
    metrics: str | None = None
    logs: str
    """Directory with the log of each pod."""
    seconds: float
    resume: str | None = None
    """The command that resumes a suspended job."""


class RunLine(RootModel[StatusLine | MessageLine | OutputLine | ResultLine]):
    """One line of `ddpjob run -o json`."""


class JsonDisplay(Display):
    """Writes one ``RunLine`` per line. JSON escapes everything that is not ASCII, control characters included."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: object = None

    def show(self, moment: Moment) -> None:
        """Write a ``status`` if something changed."""
        job = moment.job
        if (now := (job.manifest, moment.pods)) != self._last:
            status = job.manifest.get("status") or {}
            where = {"name": job.name, "namespace": str(job.namespace)}
            self._write(StatusLine(type="status", time=_now(), status=status, pods=moment.pods, **where))
            self._last = now

    def note(self, line: str, *, loud: bool = False) -> None:
        self._write(MessageLine(type="warning" if loud else "note", time=_now(), message=line))

    def output(self, line: str) -> None:
        self._write(OutputLine(type="output", time=_now(), node=0, line=line.rstrip("\r\n")))

    def end(self, result: RunResult) -> None:
        job = result.job
        self._write(
            ResultLine(
                type="result",
                time=_now(),
                exit_code=result.exit_code,
                name=job.name,
                namespace=str(job.namespace),
                status=job.manifest.get("status") or {},
                checkpoint=str(result.checkpoint) if result.checkpoint else None,
                metrics=str(result.metrics) if result.metrics else None,
                logs=str(result.logs),
                seconds=round(result.seconds, 2),
                resume=result.again if job.state == "Suspended" else None,
            )
        )

    def _write(self, line: WireModel) -> None:
        print(json.dumps(line.wire()), file=self._stream, flush=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def discard(descriptor: int) -> None:
    """Discard what is written to a file from now on; Python also flushes its buffers at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)


class _Guarded(io.FileIO):
    """A file that is discarded, instead of an error, once its reader is gone: a pager that quit, a closed terminal."""

    def __init__(self, descriptor: int, on_broken_pipe: Callable[[], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._on_broken_pipe = on_broken_pipe

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            discard(self.fileno())
            self._on_broken_pipe()
            return len(data)


def guarded(stream: TextIO, on_broken_pipe: Callable[[], None] = lambda: None) -> TextIO:
    """Return a stream to the same file; ``on_broken_pipe`` is called when its reader is gone."""
    file = io.BufferedWriter(_Guarded(stream.fileno(), on_broken_pipe))
    return io.TextIOWrapper(file, stream.encoding, errors="backslashreplace", line_buffering=True)
