"""One container as a process: started through the shim, ended through it, and judged as Kubernetes judges it."""

import asyncio
import errno
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_SHIM = Path(__file__).with_name("shim.py")
_RUNTIME = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: "
    "runc create failed: unable to start container process: "
)
_KILLED = 137


@dataclass(frozen=True)
class Program:
    """What one container runs.

    words: command and arguments. cpus: that its threads may run on; empty for all. log: of stdout and stderr.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    cpus: Sequence[int]
    log: Path


@dataclass(frozen=True)
class Exit:
    """How a container ended. code: 128 + n for signal n, as containerd gives it."""

    code: int
    at: datetime


class StartError(Exception):
    """The program could not be started; ``str()`` is what containerd and runc say to that."""


class Container:
    """A running container. Use ``start``."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, program: Program) -> "Container":
        """Returns when the program runs. Raises ``StartError``."""
        ours, theirs = socket.socketpair()
        with program.log.open("ab") as log, theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_SHIM), str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C at the terminal is the run's to handle
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        container = cls(process, reader, writer)
        try:
            container._send(
                {
                    "words": list(program.words),
                    "environment": dict(program.environment),
                    "directory": str(program.directory),
                    "cpus": list(program.cpus),
                }
            )
            answer = await container._receive()
        except BaseException:
            await container._bury()  # without its socket the shim ends what it may have started
            raise
        if "started" not in answer:
            await container._bury()
            raise StartError(_words(answer.get("refused") or {}, program))
        return container

    def signal(self, number: int) -> None:
        """Send a signal to the main process, if it still runs."""
        self._send({"signal": number})

    def kill(self) -> None:
        """End every process of the container, now."""
        self._send({"kill": True})

    async def wait(self) -> Exit:
        """Until no process of it is left."""
        answer = await self._receive()
        await self._bury()
        if "status" not in answer:
            return Exit(_KILLED, datetime.now(UTC))  # somebody killed the shim, and the kernel its child
        code = os.waitstatus_to_exitcode(answer["status"])
        return Exit(code if code >= 0 else 128 - code, datetime.fromtimestamp(answer["ended"], UTC))

    def _send(self, what: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(json.dumps(what).encode() + b"\n")

    async def _receive(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
        except ConnectionError:
            line = b""
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer

    async def _bury(self) -> None:
        self._writer.close()
        await self._process.wait()


def _words(refusal: Mapping[str, Any], program: Program) -> str:
    name, code, said = program.words[0], refusal.get("errno"), str(refusal.get("error", "the shim was killed"))
    if refusal.get("step") == "chdir":
        return f'{_RUNTIME}chdir to cwd ("{program.directory}") set in config.json failed: {said.lower()}: unknown'
    if code == errno.ENOENT and "/" not in name:
        return f'{_RUNTIME}exec: "{name}": executable file not found in $PATH: unknown'
    if code == errno.ENOENT:
        return f'{_RUNTIME}exec: "{name}": stat {name}: no such file or directory: unknown'
    if code == errno.ENOEXEC:
        return f"{_RUNTIME}exec {name}: exec format error: unknown"
    return f'{_RUNTIME}exec: "{name}": {said.lower()}: unknown'
