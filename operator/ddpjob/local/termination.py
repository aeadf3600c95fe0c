"""What a container leaves to say: its termination message, as the kubelet picks it up.

https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/
"""

import os
from pathlib import Path

MAX_MESSAGE_BYTES = 4096
MAX_LOG_BYTES = 2048
MAX_LOG_LINES = 80


def message(file: Path, log: Path, *, falls_back: bool) -> str:
    """The end of the message file, or of the log where that is empty and ``falls_back``."""
    said = _end(file, MAX_MESSAGE_BYTES)
    if said or not falls_back:
        return said
    return "".join(_end(log, MAX_LOG_BYTES).splitlines(keepends=True)[-MAX_LOG_LINES:])


def _end(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(-min(size, os.fstat(file.fileno()).st_size), os.SEEK_END)
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""
