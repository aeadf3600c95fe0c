"""What a run is shown through: a live table, plain lines, or JSON. All are told the same facts and the same end."""

import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol, Self, TextIO, cast

from ddpjob.cli.snapshot import NodeState, Snapshot
from ddpjob.cli.summary import RunResult, summary_lines
from ddpjob.cli.text import accuracy_text, duration, one_line, ranks_text, sanitize_line, speed_text
from ddpjob.local.errors import LocalError


class Display(Protocol):
    """One way of showing a run; used as a context manager around it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *reason: object) -> None: ...

    def show(self, facts: Snapshot) -> None:
        """The job as it is now."""

    def note(self, line: str, *, loud: bool = False) -> None:
        """One line from local mode to its user. loud: it must not be overlooked."""

    def output(self, line: str) -> None:
        """One line that node 0 printed, of a program that reports no progress."""

    def end(self, result: RunResult) -> None:
        """How it ended; the last that is called."""


def size_text(facts: Snapshot) -> str:
    """``2 nodes × 2 processes``."""
    nodes = f"{facts.num_nodes} node" + ("s" if facts.num_nodes != 1 else "")
    nproc = facts.nproc_per_node
    return nodes if nproc is None else f"{nodes} × {nproc} process" + ("es" if nproc != 1 else "")


_ON_THE_WAY = ("Pending", "ContainerCreating", "PodInitializing")  # nothing that a line would help with
INTERVAL = 2.0  # seconds between lines that say only how far the training is


class PlainDisplay:
    """Writes lines."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._begin = clock()
        self._facts: Snapshot | None = None
        self._last_line = ""
        self._said = -INTERVAL
        self._nodes: dict[int, NodeState] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stream.flush()

    def show(self, facts: Snapshot) -> None:
        """Changes of state at once, mere progress every few seconds."""
        line, news = course(facts), _news(facts)
        before, now = self._facts, self._clock()
        self._facts = facts
        if before is None or news != _news(before) or (line != self._last_line and now - self._said >= INTERVAL):
            self._say(line)
            self._last_line, self._said = line, now
        self._show_nodes(facts)

    def note(self, line: str, *, loud: bool = False) -> None:
        """One line, marked as ours."""
        self._say(f"{'!!!' if loud else '·'} {one_line(line)}")

    def output(self, line: str) -> None:
        """One line of the program's."""
        print(f"n0 | {sanitize_line(line)}", file=self._stream, flush=True)

    def end(self, result: RunResult) -> None:
        """The last facts, then the ending."""
        if self._facts and course(self._facts) != self._last_line:
            self._say(course(self._facts))
        print("\n".join(summary_lines(result, width=80)), file=self._stream, flush=True)

    def _show_nodes(self, facts: Snapshot) -> None:
        for node in facts.nodes:
            known = self._nodes.get(node.rank)
            if node.state in _ON_THE_WAY and not node.detail:
                continue
            if known is None or (known.pod, known.state, known.detail) != (node.pod, node.state, node.detail):
                self._say(f"  n{node.rank} {node.pod}: {', '.join(filter(None, (node.state, node.detail)))}")
            self._nodes[node.rank] = node

    def _say(self, line: str) -> None:
        print(f"{duration(self._clock() - self._begin):>6}  {line}", file=self._stream, flush=True)


def course(facts: Snapshot) -> str:
    """Everything that the table's head says, in one line."""
    parts = [
        facts.state,
        f"nodes {facts.nodes_ready}",
        ranks_text(facts.num_nodes * facts.nproc_per_node) if facts.nproc_per_node else "",
        f"attempt {facts.attempt}" if facts.attempt > 1 else "",
        f"restarts {facts.restarts} of at most {facts.max_restarts}" if facts.restarts else "",
        *progress_parts(facts),
        facts.message,
    ]
    return ", ".join(part for part in parts if part)


def progress_parts(facts: Snapshot) -> list[str]:
    """How far the training is, fact by fact; empty for a program that does not say."""
    if facts.step is None or not facts.total_steps:
        return [f"step {facts.step}" if facts.step else facts.phase or ""]
    parts = [f"epoch {facts.epoch}/{facts.total_epochs or '?'}" if facts.epoch is not None else ""]
    parts.append(f"step {facts.step}/{facts.total_steps}" + (f" ({facts.percent} %)" if facts.percent else ""))
    parts.append(f"loss {facts.loss}" if facts.loss else "")
    parts.append(f"accuracy {accuracy_text(facts.accuracy)}" if facts.accuracy else "")
    parts.append(speed_text(facts.samples_per_second) if facts.samples_per_second else "")
    parts.append(f"{duration(facts.eta_seconds)} left" if facts.eta_seconds else "")
    parts.append(f"checkpoint of step {facts.checkpoint_step}" if facts.checkpoint_step is not None else "")
    parts.append(f"resumed from step {facts.resumed_from_step}" if facts.resumed_from_step is not None else "")
    return [part for part in parts if part]


def _news(facts: Snapshot) -> tuple[object, ...]:
    """What is worth a line at once."""
    training = (facts.epoch, facts.accuracy, facts.resumed_from_step, facts.step is None)
    return (facts.state, facts.attempt, facts.restarts, facts.nodes_ready, facts.message, *training)


class JsonDisplay:
    """Writes NDJSON. Everything that is not ASCII, control characters included, is escaped by JSON itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stream.flush()

    def show(self, facts: Snapshot) -> None:
        """A ``status``, unless nothing changed."""
        wire = facts.wire()
        if wire != self._last:
            self._write("status", wire)
            self._last = wire

    def note(self, line: str, *, loud: bool = False) -> None:
        """A ``note``, or where it is loud a ``warning``."""
        self._write("warning" if loud else "note", {"message": line})

    def output(self, line: str) -> None:
        """An ``output`` of node 0's."""
        self._write("output", {"node": 0, "line": line.rstrip("\r\n")})

    def end(self, result: RunResult) -> None:
        """The ``result``."""
        self._write("result", result.wire())

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        write_object(self._stream, kind, content)


def write_refusal(stream: TextIO, error: LocalError, code: int) -> None:
    """The ``result`` of a run that never was."""
    write_object(
        stream, "result", {"exitCode": code, "error": error.error, "hint": error.hint, "next": error.next_step}
    )


def write_object(stream: TextIO, kind: str, content: dict[str, Any]) -> None:
    """One object, with its kind and the time."""
    moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    print(json.dumps({"type": kind, "time": moment, **content}), file=stream, flush=True)


class PipeSafeStream:
    """A text stream that writes as long as somebody reads, then falls silent and says so once.

    Training goes on for a moment then: the trainer is asked to save and leave, as for Ctrl-C.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._left = False
        self.on_leave: Callable[[], None] = lambda: None

    def write(self, text: str) -> int:
        """As a stream's."""
        if not self._left:
            try:
                return self._stream.write(text)
            except (BrokenPipeError, OSError):
                self._leave()
        return len(text)

    def flush(self) -> None:
        """As a stream's."""
        if not self._left:
            try:
                self._stream.flush()
            except (BrokenPipeError, OSError):
                self._leave()

    @property
    def stream(self) -> TextIO:
        """Itself, to whoever asks for a stream; all else that a stream can do, the stream below does."""
        return cast(TextIO, self)

    def is_terminal(self) -> bool:
        """Whether a table can stay in place there."""
        return self._stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def _leave(self) -> None:
        self._left = True
        # What is still buffered would fail again when Python ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self.on_leave()
