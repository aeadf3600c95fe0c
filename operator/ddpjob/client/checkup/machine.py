"""The checks of this machine: pure verdicts, and what is read for them."""

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ddpjob.client.checkup.check import Check, machine
from ddpjob.client.checkup.probes import Probe, UnreadableError, run
from ddpjob.local.resources import visible_gpus

_MIN_TORCH = (2, 10)
_GIB = 2**30
_MIN_FREE = _GIB
_MIN_SHARED = 64 * 2**20
_INSTALL = "pip install torch"
_TORCH_SECONDS = 60.0
_SHARED_MEMORY = Path("/dev/shm")
_COUNT_DEVICES = "import torch; print(torch.cuda.device_count())"


@dataclass(frozen=True)
class Torch:
    """torch as a program of this Python sees it.

    version: None if it is not installed. error: why it cannot be imported. devices: GPUs that it can use.
    """

    version: str | None
    error: str = ""
    devices: int = 0


@dataclass(frozen=True)
class Folder:
    """A directory that jobs write to. error: why it cannot be written; free: bytes."""

    path: str
    error: str = ""
    free: int = 0


def torch(found: Torch, gpus: int) -> Check:
    """Judge torch. gpus: what the driver shows."""
    if found.version is None:
        hint = "jobs of this machine that train need it; jobs on a cluster do not"
        return machine("torch", "warning", "torch is not installed in this Python", hint, _INSTALL)
    if found.error:
        hint = "a library that torch needs is missing, or does not fit this machine"
        return machine("torch", "error", f"torch {found.version} cannot be imported: {found.error}", hint, _INSTALL)
    text = f"torch {found.version}, {found.devices} GPU{'' if found.devices == 1 else 's'}"
    if _numbers(found.version) < _MIN_TORCH:
        needed = ".".join(map(str, _MIN_TORCH))
        return machine(
            "torch", "warning", text, f"ddprun and ddptrain are tested with torch {needed} or later", _INSTALL
        )
    if gpus and not found.devices:
        return machine(
            "torch",
            "warning",
            f"{text}, but the driver shows {gpus}",
            "this torch is built for CPUs only, or for a later driver",
            'python -c "import torch; print(torch.version.cuda); torch.cuda.init()" says why',
        )
    return machine("torch", "ok", text)


def shared_memory(folder: Folder) -> Check:
    """Judge /dev/shm, by which data loaders give batches to ranks."""
    text = f"{folder.path}: {_size(folder.free)} free"
    if folder.error or folder.free < _MIN_SHARED:
        hint = "data loaders with worker processes end with SIGBUS when it is full; a container has 64 MiB by default"
        todo = "docker run --shm-size 1g, or num_workers=0"
        return machine(
            "shared-memory", "warning", (folder.error and f"{folder.path}: {folder.error}") or text, hint, todo
        )
    return machine("shared-memory", "ok", text)


def state_folder(folder: Folder) -> Check:
    """Judge the directory of jobs and volumes."""
    if folder.error:
        return machine(
            "state-folder",
            "error",
            f"{folder.path}: {folder.error}",
            "jobs of this machine keep their state, logs and checkpoints there",
            f"ls -ld {folder.path}; or set DDPJOB_STATE_DIR to another directory",
        )
    text = f"{folder.path}: {_size(folder.free)} free"
    if folder.free < _MIN_FREE:
        hint = "checkpoints are written there"
        return machine("state-folder", "warning", text, hint, "free space, or set DDPJOB_STATE_DIR")
    return machine("state-folder", "ok", text)


def check_machine(state: Path) -> list[Check]:
    """Return the checks of this machine. state: the directory of jobs and volumes."""
    devices = len(visible_gpus())
    return run(
        [
            Probe("machine", "torch", "torch", _torch, partial(torch, gpus=devices), _TORCH_SECONDS + 1),
            Probe("machine", "shared-memory", "/dev/shm", partial(_folder, _SHARED_MEMORY), shared_memory),
            Probe("machine", "state-folder", str(state), partial(_folder, state), state_folder),
        ]
    )


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


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+", maxsplit=1)[0].split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 2**20:.0f} MiB"
