"""A text in memory that one process writes and another reads at any time, also after the writer was killed.

There are two places, which take turns. A write that was not finished damages one of them, and its checksum shows that;
the other has the text before. Writer and reader need no lock, so a writer that hangs does not stop the reader.
"""

import struct
import zlib

_HEAD = struct.Struct("<qII")  # number, length, checksum
_PLACE = 16384
SIZE = 2 * _PLACE
LONGEST = _PLACE - _HEAD.size  # bytes


class SharedText:
    """The writer's side.

    Args:
        memory: SIZE bytes; other writers may use them, but not at the same time.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._number = 0  # of the text that was written here last

    def write(self, text: str) -> bool:
        """Replace the text; return False, and keep the earlier text, if it is longer than LONGEST."""
        content = text.encode()
        if len(content) > LONGEST:
            return False
        if self.is_of_another():
            self._number = _newest(self._memory)[0]
        self._number += 1
        begin = self._number % 2 * _PLACE
        head = begin + _HEAD.size
        self._memory[head : head + len(content)] = content
        _HEAD.pack_into(self._memory, begin, self._number, len(content), _checksum(self._number, content))
        return True

    def is_of_another(self) -> bool:
        """Return whether another writer has written, or has begun to, since the last ``write``."""
        newest: int = max(_HEAD.unpack_from(self._memory)[0], _HEAD.unpack_from(self._memory, _PLACE)[0])
        return newest != self._number

    def newest(self) -> str:
        """Return the newest text, of any writer."""
        return read(self._memory)


def read(memory: bytes | memoryview) -> str:
    """Return the newest text that is whole; empty if there is none."""
    return _newest(memory)[1].decode()


def _newest(memory: bytes | memoryview) -> tuple[int, bytes]:
    found = [(0, b"")]
    for begin in (0, _PLACE):
        number, length, checksum = _HEAD.unpack_from(memory, begin)
        content = bytes(memory[begin + _HEAD.size : begin + _HEAD.size + min(length, LONGEST)])
        if number > 0 and checksum == _checksum(number, content):
            found.append((number, content))
    return max(found)


def _checksum(number: int, content: bytes) -> int:
    return zlib.crc32(content, number & 0xFFFFFFFF)
