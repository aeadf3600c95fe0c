"""One container as a process: started and stopped through the shim, with the exit codes and errors of containerd."""

import asyncio
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddpjob.api.exit_codes import SIGNAL_BASE

_SHIM = Path(__file__).with_name("shim.py")
_RUNTIME = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: "
    "runc create failed: unable to start container process: "
)
_KILLED = SIGNAL_BASE + signal.SIGKILL


@dataclass(frozen=True)
class Program:
    """What one container runs.

    command: with its arguments. cpus: where its threads may run; empty for all. log: the file for stdout and stderr.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    directory: Path
    cpus: Sequence[int]
    log: Path


@dataclass(frozen=True)
class Exit:
    """How a container ended. code: 128 + n for signal n, as with containerd."""

    code: int
    at: datetime


class StartError(Exception):
    """The program could not be started. ``str()`` is the message of containerd and runc."""


class Container:
    """A running container; created by ``start``."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, program: Program) -> "Container":
        """Start the program. Raises ``StartError``."""
        ours, theirs = socket.socketpair()
        with program.log.open("ab") as log, theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_SHIM), str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # so that Ctrl-C at the terminal reaches only the run
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        container = cls(process, reader, writer)
        try:
            container._send(
                {
                    "command": list(program.command),
                    "environment": dict(program.environment),
                    "directory": str(program.directory),
                    "cpus": list(program.cpus),
                }
            )
            answer = await container._receive()
        except BaseException:
            await container._close()  # the shim kills its processes when the socket closes
            raise
        if "started" not in answer:
            await container._close()
            raise StartError(_start_error(answer.get("refused") or {}, program))
        return container

    def signal(self, number: int) -> None:
        """Send a signal to the main process if it still runs."""
        self._send({"signal": number})

    def kill(self) -> None:
        """Kill every process of the container."""
        self._send({"kill": True})

    async def wait(self) -> Exit:
        """Wait until the container has no process. Return how its main process ended."""
        answer = await self._receive()
        await self._close()
        if "status" not in answer:
            return Exit(_KILLED, datetime.now(UTC))  # the shim was killed, and with it its child
        code = os.waitstatus_to_exitcode(answer["status"])
        return Exit(code if code >= 0 else SIGNAL_BASE - code, datetime.fromtimestamp(answer["ended"], UTC))

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

    async def _close(self) -> None:
        self._writer.close()
        await self._process.wait()


def _start_error(refusal: Mapping[str, Any], program: Program) -> str:
    name, code, text = program.command[0], refusal.get("errno"), str(refusal.get("error", "the shim was killed"))
    if refusal.get("step") == "chdir":
        return f'{_RUNTIME}chdir to cwd ("{program.directory}") set in config.json failed: {text.lower()}: unknown'
    if code == errno.ENOENT and "/" not in name:
        return f'{_RUNTIME}exec: "{name}": executable file not found in $PATH: unknown'
    if code == errno.ENOENT:
        return f'{_RUNTIME}exec: "{name}": stat {name}: no such file or directory: unknown'
    if code == errno.ENOEXEC:
        return f"{_RUNTIME}exec {name}: exec format error: unknown"
    return f'{_RUNTIME}exec: "{name}": {text.lower()}: unknown'
