"""The device that a rank computes on, the backend of its collectives, and the facts that decide its last bits."""

import contextlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddprun.distributed.topology import Ranks
from ddprun.errors import RanksError
from ddptrain.config import Config


def resolve_device(config: Config, ranks: Ranks) -> torch.device:
    """Return the rank's device: one GPU per local rank, or the CPU.

    With ``auto`` all ranks of a node take the CPU if it has fewer GPUs than ranks.

    Raises:
        RanksError: CUDA is requested and absent, there are fewer GPUs than local ranks, or LOCAL_RANK is not set.
    """
    if config.device == "cpu" or (config.device == "auto" and config.backend == "gloo"):
        return torch.device("cpu")
    has_cuda = torch.cuda.is_available()
    if not has_cuda and (config.device == "cuda" or config.backend == "nccl"):
        raise RanksError(
            "CUDA was requested, but PyTorch finds no GPU",
            hint="this PyTorch build is for CPU, the driver is absent, or the job requests no nvidia.com/gpu",
            next_step="use --device cpu, or run on a GPU node",
        )
    if not has_cuda or too_few_gpus(config, ranks):
        return torch.device("cpu")
    if ranks.local_rank is None:
        raise RanksError(
            f"rank {ranks.rank} of {ranks.world_size} has no GPU assigned: LOCAL_RANK is not set",
            hint="without it all ranks of one node would take its first GPU",
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


def too_few_gpus(config: Config, ranks: Ranks) -> str:
    """Return why ``--device auto`` takes the CPU although the node has a GPU; empty if it does not."""
    gpus = torch.cuda.device_count()
    if (config.device, config.backend) != ("auto", "auto") or not 0 < gpus < ranks.nproc_per_node:
        return ""
    return f"--device auto: {ranks.nproc_per_node} ranks on this node, but {gpus} GPU(s): all ranks use the CPU"


def set_numerics(config: Config) -> None:
    """Set what decides the last bits on a GPU: TF32, which cuDNN uses by default, and deterministic algorithms.

    TF32 rounds the inputs of float32 convolutions and products to 10 bits of mantissa.
    """
    precision = "tf32" if config.tf32 else "ieee"
    operations: list[Any] = [torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul]  # type: ignore[attr-defined]
    for operation in operations:
        operation.fp32_precision = precision
    if config.deterministic or config.sync == "bitwise":  # CPU kernels always return the same result
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        # Warnings only: PyTorch lists the backward pass of max pooling, which is unsafe only for overlapping windows.
        torch.use_deterministic_algorithms(True, warn_only=config.sync == "bitwise")
        torch.backends.cudnn.benchmark = False


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Return the version of NVIDIA's driver; empty if it is unknown."""
    text = path.read_text(errors="replace") if path.exists() else ""
    found = re.search(r"Kernel Module.*?(\d+\.\d+[\d.]*)", text)
    return found[1] if found else ""


def resolve_backend(backend: str, device: torch.device) -> str:
    """Return the backend, with ``auto`` resolved to nccl on CUDA devices and gloo on others.

    Raises:
        RanksError: this build of PyTorch lacks the backend, or it does not support the device.
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
    """Return what decides the last bits: threads, instruction set, processor and torch; on a GPU also its software."""
    facts = {
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cpu": processor(),
        "torch": torch.__version__,
    }
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return facts
    return facts | {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "tf32": torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def has_bf16() -> bool:
    """Return whether this processor multiplies matrices in bfloat16; without such instructions it would be slower."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    hardware = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return hardware and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def uses_bf16(config: Config, device: torch.device) -> bool:
    """Return whether the passes run in bfloat16: on a CPU with instructions for it, on CUDA only on request.

    Raises:
        RanksError: it is requested on a CPU without such instructions, or for float64.
    """
    wanted = config.bf16
    if wanted == "off" or (wanted == "auto" and (config.dtype == "float64" or device.type == "cuda")):
        return False
    if wanted == "on" and config.dtype == "float64":
        raise RanksError("--bf16 on cannot be combined with --dtype float64", next_step="leave one of them out")
    if device.type == "cuda" or has_bf16():
        return True
    if wanted == "auto":
        return False
    raise RanksError(
        "--bf16 on needs a CPU with AVX512_BF16 or AMX, or CUDA",
        hint="on other processors bfloat16 is emulated, and slower than float32",
        next_step="leave --bf16 out",
    )


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return vendor, family and model: MKL chooses its kernels by them, not by the instruction set alone."""
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    return " ".join(facts[key] for key in ("vendor_id", "cpu family", "model") if key in facts) or platform.machine()
