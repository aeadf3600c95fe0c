"""Whether this node has a GPU for each of its ranks, told without torch and before anything slow is imported.

``cli`` asks before it launches, or becomes, a rank. Which of the GPUs a rank takes is for ``device`` to say, later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ddptrain.errors import RanksError


def check_gpus(backend: str, device: str, nproc_per_node: int, env: Mapping[str, str] = os.environ) -> None:
    """Refuse NCCL with more local ranks than GPUs, by counting device files: no CUDA context, no torch.

    Raises:
        RanksError: NCCL or CUDA was asked for by name and the GPUs seen are too few.
    """
    if backend != "nccl" and device != "cuda":
        return
    if Path("/dev/dxg").exists():  # WSL shows no per-card files; torch will count
        return
    present = len([p for p in Path("/dev").iterdir() if re.fullmatch(r"nvidia\d+", p.name)])
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        present = min(present, len([v for v in visible.split(",") if v.strip() and v.strip() != "-1"]))
    if nproc_per_node > present:
        raise RanksError(
            f"{nproc_per_node} rank(s) on this node want a GPU each, but {present} GPU(s) are here",
            hint="NCCL allows one rank per GPU",
            next_step="lower NPROC_PER_NODE, request more GPUs, or use --device cpu --backend gloo",
        )
