"""An executable in place of a Python program: the rank's process becomes it, so the launcher knows only how it ends."""

import contextlib
import errno
import os
import platform
import shutil
from pathlib import Path
from typing import NoReturn

from ddprun.errors import UsageError


def become(command: list[str]) -> NoReturn:
    """Run the command in place of this process.

    Raises:
        UsageError: it cannot be started.
    """
    try:
        os.execvp(command[0], command)  # noqa: S606 - what the user asks for
    except OSError as error:
        hint, next_step = _advice(command[0], error.errno)
        raise UsageError(f"cannot start {command[0]}: {error.strerror}", hint=hint, next_step=next_step) from None


def _advice(program: str, number: int | None) -> tuple[str, str]:
    """Return why the kernel does not start the program, and what to do; the first is empty if it is not known."""
    path, head = Path(shutil.which(program, mode=os.F_OK) or program), b""
    with contextlib.suppress(OSError), path.open("rb") as file:
        head = file.read(4096).partition(b"\n")[0]
    if number == errno.ENOEXEC and head.startswith(b"\x7fELF"):
        here = platform.machine()
        return f"it is built for another processor than {here}", f"use a build for {here}"
    if number == errno.ENOEXEC:
        return (
            "its first line names no interpreter",
            f"begin it with #!/bin/sh, or start it by --no-python sh {program}",
        )
    if number == errno.ENOENT and head.startswith(b"#!"):
        interpreter = head[2:].decode(errors="replace")
        return f"its first line names an interpreter that does not exist: {interpreter!r}", "correct the first line"
    if number == errno.EACCES and head:
        return "it is not executable", f"chmod +x {path}"
    return "", "name a file or a program on PATH"
