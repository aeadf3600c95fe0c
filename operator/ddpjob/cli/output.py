"""How a run is shown: plain lines for a pipe, a file or a CI log, and JSON for programs; ``live`` has the table."""

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Self, TextIO, cast

from ddpjob.api.objects import Json
from ddpjob.cli.snapshot import NodeState, Snapshot
from ddpjob.cli.summary import RunResult, summary_lines
from ddpjob.cli.text import accuracy_text, duration, one_line, ranks_text, sanitize_line, speed_text
from ddpjob.local import LocalError

INTERVAL = 2.0
"""Seconds between lines that report only training progress."""
_STARTING = ("Pending", "ContainerCreating", "PodInitializing")


class Display(ABC):
    """One way of showing a run; used as a context manager around it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:  # noqa: B027 - optional to override
        """Stop drawing; only the live table does."""

    @abstractmethod
    def show(self, snapshot: Snapshot) -> None:
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


class PlainDisplay(Display):
    """Writes a line for every change."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._begin = clock()
        self._snapshot: Snapshot | None = None
        self._last_line = ""
        self._last_time = -INTERVAL
        self._nodes: dict[int, NodeState] = {}

    def show(self, snapshot: Snapshot) -> None:
        """Write changes of state at once, and progress every few seconds."""
        line, urgent = _status_line(snapshot), _urgent_part(snapshot)
        before, now = self._snapshot, self._clock()
        self._snapshot = snapshot
        is_due = line != self._last_line and now - self._last_time >= INTERVAL
        if before is None or urgent != _urgent_part(before) or is_due:
            self._print(line)
            self._last_line, self._last_time = line, now
        self._show_nodes(snapshot)

    def note(self, line: str, *, loud: bool = False) -> None:
        self._print(f"{'!!!' if loud else '·'} {one_line(line)}")

    def output(self, line: str) -> None:
        print(f"n0 | {sanitize_line(line)}", file=self._stream, flush=True)

    def end(self, result: RunResult) -> None:
        """Write the last state, then the summary."""
        if self._snapshot and _status_line(self._snapshot) != self._last_line:
            self._print(_status_line(self._snapshot))
        print("\n".join(summary_lines(result, width=80)), file=self._stream, flush=True)

    def _show_nodes(self, snapshot: Snapshot) -> None:
        for node in snapshot.nodes:
            known = self._nodes.get(node.rank)
            if node.state in _STARTING and not node.detail:
                continue
            if known is None or (known.pod, known.state, known.detail) != (node.pod, node.state, node.detail):
                self._print(f"  n{node.rank} {node.pod}: {', '.join(filter(None, (node.state, node.detail)))}")
            self._nodes[node.rank] = node

    def _print(self, line: str) -> None:
        print(f"{duration(self._clock() - self._begin):>6}  {line}", file=self._stream, flush=True)


def _status_line(snapshot: Snapshot) -> str:
    """Return what the head of the live table shows, as one line."""
    parts = [
        snapshot.state,
        f"nodes {snapshot.nodes_ready}",
        ranks_text(snapshot.world_size) if snapshot.world_size else "",
        f"attempt {snapshot.attempt}" if snapshot.attempt > 1 else "",
        f"restarts {snapshot.restarts} of at most {snapshot.max_restarts}" if snapshot.restarts else "",
        *_progress_parts(snapshot),
        snapshot.message,
    ]
    return ", ".join(part for part in parts if part)


def _progress_parts(snapshot: Snapshot) -> list[str]:
    """Return the progress of the training, one fact per entry; empty if the program reports none."""
    s = snapshot
    if s.step is None or not s.total_steps:
        return [f"step {s.step}" if s.step else s.phase or ""]
    return [
        f"epoch {s.epoch}/{s.total_epochs or '?'}" if s.epoch is not None else "",
        f"step {s.step}/{s.total_steps}" + (f" ({s.percent} %)" if s.percent else ""),
        f"loss {s.loss}" if s.loss else "",
        f"accuracy {accuracy_text(s.accuracy)}" if s.accuracy else "",
        speed_text(s.samples_per_second) if s.samples_per_second else "",
        f"{duration(s.eta_seconds)} left" if s.eta_seconds else "",
        f"checkpoint of step {s.checkpoint_step}" if s.checkpoint_step is not None else "",
        f"resumed from step {s.resumed_from_step}" if s.resumed_from_step is not None else "",
    ]


def _urgent_part(snapshot: Snapshot) -> tuple[object, ...]:
    """Return the part of a snapshot that is written as soon as it changes."""
    training = (snapshot.epoch, snapshot.accuracy, snapshot.resumed_from_step, snapshot.step is None)
    job = (snapshot.state, snapshot.attempt, snapshot.restarts, snapshot.nodes_ready, snapshot.message)
    return (*job, *training)


class JsonDisplay(Display):
    """Writes one JSON object per line. JSON escapes everything that is not ASCII, control characters included."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: Json = {}

    def show(self, snapshot: Snapshot) -> None:
        """Write a ``status`` if something changed."""
        wire = snapshot.wire()
        if wire != self._last:
            _write_object(self._stream, "status", wire)
            self._last = wire

    def note(self, line: str, *, loud: bool = False) -> None:
        _write_object(self._stream, "warning" if loud else "note", {"message": line})

    def output(self, line: str) -> None:
        _write_object(self._stream, "output", {"node": 0, "line": line.rstrip("\r\n")})

    def end(self, result: RunResult) -> None:
        _write_object(self._stream, "result", result.wire())


def write_refusal(stream: TextIO, error: LocalError, code: int) -> None:
    """Write the ``result`` of a run that was refused."""
    _write_object(
        stream, "result", {"exitCode": code, "error": error.error, "hint": error.hint, "next": error.next_step}
    )


def _write_object(stream: TextIO, kind: str, content: Json) -> None:
    moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    print(json.dumps({"type": kind, "time": moment, **content}), file=stream, flush=True)


class PipeSafeStream:
    """A text stream that discards its output once the reader is gone: a pager that quit, a terminal that closed.

    on_broken_pipe: called once then; the run suspends its job as for Ctrl-C.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_broken = False
        self.on_broken_pipe: Callable[[], None] = lambda: None

    def write(self, text: str) -> int:
        if not self._is_broken:
            try:
                return self._stream.write(text)
            except (BrokenPipeError, OSError):
                self._discard()
        return len(text)

    def flush(self) -> None:
        if not self._is_broken:
            try:
                self._stream.flush()
            except (BrokenPipeError, OSError):
                self._discard()

    @property
    def stream(self) -> TextIO:
        """Return self as TextIO; other attributes delegate to the wrapped stream."""
        return cast(TextIO, self)

    def is_terminal(self) -> bool:
        """Return whether a live table can be drawn."""
        return self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def _discard(self) -> None:
        self._is_broken = True
        # Otherwise Python fails again when it flushes the buffer at exit.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self._stream.fileno())
        os.close(devnull)
        self.on_broken_pipe()
