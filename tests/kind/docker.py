"""The Docker engine that the test cluster runs on: the one that runs already, otherwise one started here.

Our own engine keeps to itself: its socket and state are not those of an installed Docker, so neither can disturb the
other. It is started only by root on Linux, survives the command that started it, and is ended by `python -m
tests.kind docker --stop` alone.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kind import dockerd, packages
from tests.kind.cache import locked
from tests.kind.command import CommandError, run

_ANSWER_SECONDS = 20.0
_OUR_HOST = f"unix://{dockerd.SOCKET}"


class DockerUnavailableError(RuntimeError):
    """No engine answers and none can be started here. The message says what to install or start."""


@dataclass(frozen=True)
class Engine:
    """A Docker engine that answers, and what a client must have in its environment to reach it."""

    environment: dict[str, str]
    started_by_us: bool


def running_engine() -> Engine | None:
    """The engine that the client reaches as configured, else the one that was started here earlier, else None."""
    if shutil.which("docker") is None:
        return None
    if os.environ.get("DOCKER_HOST") == _OUR_HOST:  # a shell that evaluated shell_exports()
        return _our_engine()
    try:
        if (
            run(
                ["docker", "version", "--format", "{{.Server.Version}}"], timeout=_ANSWER_SECONDS, check=False
            ).returncode
            == 0
        ):
            return Engine({}, started_by_us=False)
    except CommandError:
        pass  # a client that hangs on a dead remote engine is no engine
    return _our_engine()


def _our_engine() -> Engine | None:
    api_version = _api_version(dockerd.SOCKET)
    if api_version is None:
        return None
    return Engine(
        {
            "DOCKER_HOST": _OUR_HOST,
            # A newer client assumes a newer engine wherever it does not ask first.
            "DOCKER_API_VERSION": api_version,
            # Debian's engine comes without buildx, which BuildKit builds need.
            "DOCKER_BUILDKIT": "0",
            "DOCKER_CONTEXT": "",
        },
        started_by_us=True,
    )


def ensure_engine(*, install: bool | None = None) -> Engine:
    """An engine that answers, started now if need be.

    ``install`` allows to apt-get what is missing; by default only where CI=true. Raises DockerUnavailableError.
    """
    engine = running_engine()
    if engine is not None:
        return engine
    with locked("docker-engine"):
        engine = running_engine()
        if engine is not None:
            return engine
        if not hasattr(os, "geteuid") or os.geteuid() != 0 or not Path("/proc/self/status").exists():
            raise DockerUnavailableError(
                "No Docker engine answers. Start Docker (https://docs.docker.com/engine/install/), "
                "or run this as root on Linux."
            )
        try:
            packages.require("docker", "dockerd", "iptables", "ip", install=install)
            engine = running_engine()  # installing may have started the system's own
            if engine is not None:
                return engine
            dockerd.start(answers=lambda: _our_engine() is not None)
        except CommandError as error:
            raise DockerUnavailableError(f"No Docker engine answers. {error}") from error
        engine = _our_engine()
        if engine is None:
            raise DockerUnavailableError(f"the Docker engine stopped answering; its log is {dockerd.log_file()}")
        _remove_dead_clusters(engine)
        return engine


def _remove_dead_clusters(engine: Engine) -> None:
    # An engine that has only just started holds no live cluster: what it lists are remains of a killed run, and it
    # may even be restarting them.
    listed = docker("ps", "-aq", "--filter", "label=io.x-k8s.kind.cluster", engine=engine).stdout.split()
    if listed:
        docker("rm", "--force", "--volumes", *listed, engine=engine, timeout=120)


def docker(
    *args: str | Path, engine: Engine | None = None, timeout: float = 60, stdin: str | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run the Docker client against ``engine``, by default ensure_engine()'s; ``timeout`` in seconds."""
    chosen = engine or ensure_engine()
    return run(["docker", *args], env=chosen.environment, timeout=timeout, stdin=stdin, check=check)


def image_id(tag: str, *, engine: Engine | None = None) -> str | None:
    """The id of a local image, or None where the engine has none of that name."""
    done = docker("image", "inspect", "--format", "{{.Id}}", tag, engine=engine, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def shell_exports(engine: Engine) -> Sequence[str]:
    """Lines that, evaluated by a shell, point its `docker` at the engine."""
    return [f"export {name}={value}" for name, value in engine.environment.items() if value]


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _api_version(path: Path) -> str | None:
    """The API version of the engine behind a socket (its ping says it in a header), or None when nothing answers."""
    connection = _UnixConnection(path, _ANSWER_SECONDS)
    try:
        connection.request("GET", "/_ping")
        answer = connection.getresponse()
        return answer.headers.get("Api-Version") if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
