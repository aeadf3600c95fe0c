"""Verdicts on this machine: pure functions of what was found."""

from collections.abc import Mapping
from dataclasses import dataclass

from ddpjob.client.checkup.check import Check, machine

_MIN_PYTHON = (3, 11)
_MIN_TORCH = (2, 10)
_GIB = 2**30
_MIN_FREE = _GIB
_MIN_SHARED = 64 * 2**20
_INSTALL = "pip install torch"


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


def python(version: tuple[int, int, int], system: str) -> Check:
    """Judge the Python that runs this command."""
    text = ".".join(map(str, version))
    if version[:2] < _MIN_PYTHON:
        needed = ".".join(map(str, _MIN_PYTHON))
        return machine("python", "error", f"Python {text}", f"ddpjob needs Python {needed}", "install a later Python")
    if system != "Linux":
        return machine(
            "python",
            "warning",
            f"Python {text} on {system}",
            "jobs of this machine run on Linux only; commands about a cluster work here",
            "run jobs in a Linux virtual machine or container",
        )
    return machine("python", "ok", f"Python {text} on {system}")


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


def launcher(programs: Mapping[str, str | None]) -> Check:
    """Judge the programs that start the ranks of a node. programs: name to path; None if it is not on PATH."""
    found = {name: path for name, path in programs.items() if path}
    if "ddprun" not in found:
        hint = "scripts run under it, and the virtual environment that has it is not active"
        return machine("launcher", "warning", "ddprun is not on PATH", hint, "activate it, or pip install ddprun")
    return machine("launcher", "ok", ", ".join(f"{name}: {path}" for name, path in found.items()))


def cpus(usable: int, quota: float | None) -> Check:
    """Judge the CPUs. quota: how many of them the control group of this process may use; None without a limit."""
    text = f"{usable} CPU{'' if usable == 1 else 's'}"
    if quota is not None and quota < usable:
        return machine("cpus", "ok", f"{text}, limited to {quota:g}", "ranks beyond the limit wait for each other")
    hint = "all ranks of a job share it, so a job with several is slow" if usable == 1 else ""
    return machine("cpus", "warning" if usable == 1 else "ok", text, hint)


def gpus(devices: int) -> Check:
    """Judge the GPUs that the driver shows."""
    if not devices:
        return machine("gpus", "ok", "no GPU: jobs train on the CPUs, with gloo")
    return machine("gpus", "ok", f"{devices} GPU{'' if devices == 1 else 's'}")


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


def loopback(port: int | None, error: str) -> Check:
    """Judge TCP on the loopback interface, on a port of local jobs. error: why a connection failed."""
    if error:
        return machine(
            "loopback",
            "error",
            f"no TCP connection on loopback: {error}",
            "the ranks of a local job connect to each other there; a firewall, a sandbox or a full table of ports",
            "ip address show lo; ss -ltn",
        )
    return machine("loopback", "ok", f"TCP on loopback works (port {port})")


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


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+", maxsplit=1)[0].split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 2**20:.0f} MiB"
