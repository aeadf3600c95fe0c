"""What is read of this machine for its checks."""

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from ddpjob.client.checkup import machine
from ddpjob.client.checkup.check import Check
from ddpjob.client.checkup.machine import Folder, Torch
from ddpjob.client.checkup.probes import Probe, UnreadableError, run
from ddpjob.local.environment import inherited
from ddpjob.local.resources import Ports, visible_gpus

_TORCH_SECONDS = 60.0
_SECONDS = 5.0
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_SHARED_MEMORY = Path("/dev/shm")
_PROGRAMS = ("torchrun", "ddprun")
_COUNT_DEVICES = "import torch; print(torch.cuda.device_count())"


def check_machine(state: Path) -> list[Check]:
    """Return the checks of this machine. state: the directory of jobs and volumes."""
    devices = visible_gpus()
    return run(
        [
            Probe("machine", "python", "Python", _python, lambda found: machine.python(*found)),
            Probe("machine", "torch", "torch", _torch, partial(machine.torch, gpus=len(devices)), _TORCH_SECONDS + 1),
            Probe("machine", "launcher", "PATH", _programs, machine.launcher),
            Probe("machine", "cpus", "the number of CPUs", _cpus, lambda found: machine.cpus(*found)),
            Probe("machine", "gpus", "the GPUs", lambda: len(devices), machine.gpus),
            Probe("machine", "shared-memory", "/dev/shm", partial(_folder, _SHARED_MEMORY), machine.shared_memory),
            Probe("machine", "loopback", "the loopback interface", _loopback, lambda found: machine.loopback(*found)),
            Probe("machine", "state-folder", str(state), partial(_folder, state), machine.state_folder),
        ]
    )


def _python() -> tuple[tuple[int, int, int], str]:
    return sys.version_info[:3], platform.system()


def _torch() -> Torch:
    """Import torch in another process: it takes seconds and much memory, and may end the process."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Torch(None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT_DEVICES],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TORCH_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise UnreadableError(f"its import takes longer than {_TORCH_SECONDS:g} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Torch(version, last)
    return Torch(version, devices=int(done.stdout.split()[-1]))


def _programs() -> dict[str, str | None]:
    return {name: shutil.which(name, path=inherited()["PATH"]) for name in _PROGRAMS}


def _cpus() -> tuple[int, float | None]:
    quota = None
    try:
        most, period = _QUOTA.read_text().split()
        quota = int(most) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
        pass
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return usable, quota


def _loopback() -> tuple[int | None, str]:
    """Send a byte through a port of the kind that local jobs use."""
    try:
        port = Ports().of("doctor")
        with (
            socket.create_server(("127.0.0.1", port)) as server,
            socket.create_connection(("127.0.0.1", port), _SECONDS) as client,
        ):
            server.settimeout(_SECONDS)
            accepted, _ = server.accept()
            with accepted:
                accepted.settimeout(_SECONDS)
                client.sendall(b"x")
                return port, "" if accepted.recv(1) == b"x" else "what was sent did not arrive"
    except Exception as error:  # also LocalError: no port is free
        return None, str(error)


def _folder(path: Path) -> Folder:
    """Write a file below the directory, or below the nearest one that exists; nothing stays."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".ddpjob-doctor-") as file:
            file.write(b"x")
            file.flush()
        return Folder(str(path), free=shutil.disk_usage(place).free)
    except OSError as error:
        return Folder(str(path), error=error.strerror or str(error))
