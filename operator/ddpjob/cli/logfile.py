"""Log files that grow while they are read."""

import os
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 65_536
_LONGEST = 1_048_576  # bytes of a line without an end, after which it is shown as it is


class LogFile:
    """Complete lines of a file, each once. The file may appear later."""

    def __init__(self, path: Path, last: int | None = None) -> None:
        """``last``: begin with that many lines before the end, None for all."""
        self._path = path
        self._position = 0 if last is None else _start_of_last(path, last)
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """What came since the last call; a line that has no end yet waits for it."""
        try:
            stream = self._path.open("rb")
        except OSError:
            return
        with stream:
            stream.seek(self._position)
            while block := stream.read(_BLOCK):
                self._position += len(block)
                *complete, self._rest = (self._rest + block).split(b"\n")
                yield from (line.decode(errors="replace") for line in complete)
                if len(self._rest) > _LONGEST:
                    yield self.remainder()

    def remainder(self) -> str:
        """The line that never ended, once nothing more will come; empty where there is none."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a file, however large it is; none where there is no file."""
    log = LogFile(path, last=count)
    found = list(log.lines())
    if rest := log.remainder():
        found.append(rest)
    return found[-count:] if count else []


def _start_of_last(path: Path, count: int) -> int:
    """Where the last lines begin, found from the end; a line without an end counts."""
    try:
        stream = path.open("rb")
    except OSError:
        return 0
    with stream:
        position = end = stream.seek(0, os.SEEK_END)
        if count == 0:
            return end
        wanted = count
        while position > 0:
            size = min(_BLOCK, position)
            position -= size
            stream.seek(position)
            block = stream.read(size)
            found = len(block)
            while (found := block.rfind(b"\n", 0, found)) >= 0:
                if position + found == end - 1:
                    continue  # the end of the last line begins no other
                wanted -= 1
                if wanted == 0:
                    return position + found + 1
    return 0
