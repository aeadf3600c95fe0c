"""Which device a rank computes on, its own GPU where there are any; and which backend its collectives go through.

``worker`` asks before the ranks meet, ``inspect_checkpoint`` for a process alone.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddptrain.config import Config
from ddptrain.distributed.topology import Ranks
from ddptrain.errors import ConfigMismatch, RanksError


def resolve_device(config: Config, ranks: Ranks) -> torch.device:
    """The rank's device; one GPU per local rank.

    Raises:
        RanksError: CUDA asked for and absent, fewer GPUs than local ranks, or nobody said which of them is this rank's.
    """
    if config.device == "cpu" or (config.device == "auto" and config.backend == "gloo"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if config.device == "cuda" or config.backend == "nccl":
            raise RanksError(
                "CUDA was asked for, but PyTorch sees no GPU",
                hint="the build is for CPU, the driver is absent, or the pod requests no nvidia.com/gpu",
                next_step="use --device cpu, or run on a GPU node",
            )
        return torch.device("cpu")
    if ranks.local_rank is None:
        raise RanksError(
            f"rank {ranks.rank} of {ranks.world_size} cannot tell which GPU is its own: LOCAL_RANK is not set",
            hint="ranks of one node would all take its first GPU",
            next_step="set LOCAL_RANK, counting from 0 on each node, or use torchrun or `ddptrain launch`",
        )
    local_rank, gpus = ranks.local_rank, torch.cuda.device_count()
    if local_rank >= gpus:
        raise RanksError(
            f"local rank {local_rank} has no GPU: this node has {gpus}",
            hint="NCCL allows one rank per GPU",
            next_step="lower NPROC_PER_NODE, or use --device cpu",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def resolve_backend(backend: str, device: torch.device) -> str:
    """``auto`` made concrete, and an honest refusal of what this build or machine lacks.

    Raises:
        RanksError: the backend is missing, or does not fit the device.
    """
    chosen: Any = backend if backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    if chosen == "nccl" and device.type != "cuda":
        raise RanksError(
            "backend nccl needs CUDA devices", next_step="use --backend gloo, or --device cuda on a GPU node"
        )
    if not getattr(dist, f"is_{chosen}_available")():
        hint = "MPI is only in builds of PyTorch from source, on a machine with MPI" if chosen == "mpi" else ""
        raise RanksError(f"this PyTorch build has no {chosen}", hint=hint, next_step="use --backend gloo")
    return str(chosen)


def numerics() -> dict[str, Any]:
    """Threads, instruction set, processor and torch of this process, and its GPU where it uses one."""
    facts = {
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cpu": processor(),
        "torch": torch.__version__,
    }
    return facts | {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_initialized() else facts  # type: ignore[no-untyped-call]


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Vendor, family and model: MKL chooses its kernels by them, not by the instruction set alone."""
    facts: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text(errors="replace").split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    except OSError:
        pass
    known = [facts[key] for key in ("vendor_id", "cpu family", "model") if key in facts]
    return " ".join(known) or platform.machine()


def numerics_changes(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """What of it differs from the manifest's; a manifest older than one of the facts says nothing about it."""
    return [
        f"{key} was {manifest[key]}, is {facts[key]}"
        for key in numerics()
        if key in manifest and manifest[key] != facts[key]
    ]


def bitwise_mismatch(changed: list[str]) -> ConfigMismatch:
    """The refusal to go on with ``--sync bitwise`` where its promise would not hold."""
    return ConfigMismatch(
        f"--sync bitwise cannot go on here with the same bits: {', '.join(changed)}",
        hint="the last bits of a sum depend on the number of threads, the kind of processor and the version of torch",
        next_step="go on where it began, give the --threads of before, or begin anew in another --checkpoint-dir",
    )
