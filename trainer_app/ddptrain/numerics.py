"""What decides the last bits of a sum besides the program, as manifests record it.

``recorder`` compares it on resume: where it changed, a run goes on equal up to rounding, and ``--sync bitwise`` not at
all.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddptrain.errors import Mismatch


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


def changes(manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """What of it differs from the manifest's; a manifest older than one of the facts says nothing about it."""
    return [
        f"{key} was {manifest[key]}, is {facts[key]}"
        for key in numerics()
        if key in manifest and manifest[key] != facts[key]
    ]


def not_the_same_bits(changed: list[str]) -> Mismatch:
    """The refusal to go on with ``--sync bitwise`` where its promise would not hold."""
    return Mismatch(
        f"--sync bitwise cannot go on here with the same bits: {', '.join(changed)}",
        hint="the last bits of a sum depend on the number of threads, the kind of processor and the version of torch",
        next_step="go on where it began, give the --threads of before, or begin anew in another --checkpoint-dir",
    )
