"""The Docker engine of the test cluster: one that runs already, else one started here (dockerd.py).

The engine started here has its own socket and state, separate from an installed Docker. It is started only by root on
Linux, outlives the command that started it, and is stopped only by `python -m tests.kind docker --stop`.
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
    """Return the engine that the client is configured for, else the one started here earlier, else None."""
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
        pass  # the client hung on a remote engine that does not answer
    return _our_engine()


def _our_engine() -> Engine | None:
    api_version = _api_version(dockerd.SOCKET)
    if api_version is None:
        return None
    return Engine(
        {
            "DOCKER_HOST": _OUR_HOST,
            # A newer client assumes a newer engine in requests where it does not negotiate.
            "DOCKER_API_VERSION": api_version,
            # Debian's engine has no buildx, which BuildKit builds need.
            "DOCKER_BUILDKIT": "0",
            "DOCKER_CONTEXT": "",
        },
        started_by_us=True,
    )


def ensure_engine(*, install: bool | None = None) -> Engine:
    """Return an engine that answers; start one if there is none.

    ``install`` allows installing missing packages with apt-get; the default is CI=true. Raises DockerUnavailableError.
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
            engine = running_engine()  # the package may have started the system's engine
            if engine is not None:
                return engine
            dockerd.start(answers=lambda: _our_engine() is not None)
        except CommandError as error:
            raise DockerUnavailableError(f"No Docker engine answers. {error}") from error
        engine = _our_engine()
        if engine is None:
            raise DockerUnavailableError(f"The Docker engine stopped answering. Its log is {dockerd.log_file()}")
        _remove_dead_clusters(engine)
        return engine


def _remove_dead_clusters(engine: Engine) -> None:
    # An engine that has just started has no live cluster: its containers are left from a killed run, and it may be
    # restarting them.
    listed = docker("ps", "-aq", "--filter", "label=io.x-k8s.kind.cluster", engine=engine).stdout.split()
    if listed:
        docker("rm", "--force", "--volumes", *listed, engine=engine, timeout=120)


def docker(
    *args: str | Path, engine: Engine | None = None, timeout: float = 60, stdin: str | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run the Docker client on ``engine`` (default: that of ``ensure_engine``); ``timeout`` in seconds."""
    chosen = engine or ensure_engine()
    return run(["docker", *args], env=chosen.environment, timeout=timeout, stdin=stdin, check=check)


def image_id(tag: str, *, engine: Engine | None = None) -> str | None:
    """Return the id of a local image, or None if the engine does not have it."""
    done = docker("image", "inspect", "--format", "{{.Id}}", tag, engine=engine, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def shell_exports(engine: Engine) -> Sequence[str]:
    """Return shell lines that point `docker` at the engine."""
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
    """Return the API version from the engine's ping, or None if nothing answers on the socket."""
    connection = _UnixConnection(path, _ANSWER_SECONDS)
    try:
        connection.request("GET", "/_ping")
        answer = connection.getresponse()
        return answer.headers.get("Api-Version") if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
