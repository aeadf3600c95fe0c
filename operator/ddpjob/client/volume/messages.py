"""The output of ``reader`` as JSON objects and parts of files, also while it arrives in pieces."""

import contextlib
import json
from collections.abc import Generator, Iterable, Iterator
from typing import Protocol

from ddpjob.api.objects import Json
from ddpjob.errors import UnavailableError

_LONGEST_LINE = 1024 * 1024


class CutError(Exception):
    """The output ended before its end: the connection was cut, or the pod is gone. Asking again may succeed."""


class VolumeReader(Protocol):
    """Runs ``reader`` beside a volume."""

    def output(self, command: str, *arguments: str) -> Generator[bytes, None, None]:
        """Yield the output of ``list`` or ``send`` on the volume. Raises ``CutError``."""
        ...


def messages(output: Generator[bytes, None, None]) -> Iterator[Json | bytes]:
    """Yield the objects, and the bytes of files as they arrive, up to ``end``.

    Raises:
        CutError: the output ended before.
        UnavailableError: it is not that of ``reader``.
    """
    with contextlib.closing(output):
        yield from _parsed(output)


def _parsed(output: Iterable[bytes]) -> Iterator[Json | bytes]:
    line, left = b"", 0
    for piece in output:
        at = 0
        while at < len(piece):
            if left:
                part = piece[at : at + left]
                at, left = at + len(part), left - len(part)
                yield part
                continue
            end = piece.find(b"\n", at) + 1
            line += piece[at : end or len(piece)]
            at = end or len(piece)
            if len(line) > _LONGEST_LINE:
                raise not_of_reader(line)
            if end:
                message, line = _object(line), b""
                yield message
                left = message.get("data") or 0
                if "end" in message:
                    return
    raise CutError("the output ended early")


def _object(line: bytes) -> Json:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if isinstance(message, dict):
        count = message.get("data", 0)
        if isinstance(count, int) and count >= 0:
            return message
    raise not_of_reader(line)


def not_of_reader(output: object) -> UnavailableError:
    """Return the error about output that arrived whole and is wrong: asking again would bring the same."""
    return UnavailableError(
        f"this is not the output of the reader: {output!r:.100}",
        "python3 of the job's image prints something else, or the volume holds names or times that are not valid",
        "check the image of the job and the files on its volume",
    )
