"""A run for programs: one JSON object a line, ``status`` for every change, ``note``, and in the end ``result``."""

import json
from datetime import UTC, datetime
from typing import Any, Self, TextIO

from ddpjob.cli.ending import Outcome
from ddpjob.cli.facts import Facts
from ddpjob.local.errors import LocalError


class JsonDisplay:
    """Writes NDJSON. Everything that is not ASCII, control characters included, is escaped by JSON itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stream.flush()

    def show(self, facts: Facts) -> None:
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

    def end(self, outcome: Outcome) -> None:
        """The ``result``."""
        self._write("result", outcome.wire())

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        write(self._stream, kind, content)


def refused(stream: TextIO, error: LocalError, code: int) -> None:
    """The ``result`` of a run that never was."""
    write(stream, "result", {"exitCode": code, "error": error.error, "hint": error.hint, "next": error.next_step})


def write(stream: TextIO, kind: str, content: dict[str, Any]) -> None:
    """One object, with its kind and the time."""
    moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    print(json.dumps({"type": kind, "time": moment, **content}), file=stream, flush=True)
