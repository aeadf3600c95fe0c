"""Which GPUs the pods of one attempt get: what a device plugin decides in a cluster.

Written from the CUDA documentation of CUDA_VISIBLE_DEVICES; not yet run on a machine with several GPUs.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpjob.cluster.base import Json

RESOURCE = "nvidia.com/gpu"
VARIABLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")


def available(environment: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = environment.get(VARIABLE)
    if given is not None:
        return [word.strip() for word in given.split(",") if word.strip() not in ("", "-1")]
    return [str(index) for index, _ in enumerate(driver.glob("*"))]


def share(devices: Sequence[str], rank: int, wanted: int) -> list[str]:
    """The GPUs of node ``rank``, each of which wants so many; with too few of them nodes take turns."""
    if not devices:
        return []
    return [devices[(rank * wanted + n) % len(devices)] for n in range(min(wanted, len(devices)))]


def wanted(container: Json) -> int:
    """GPUs in a container's limits."""
    limit = str((container.get("resources") or {}).get("limits", {}).get(RESOURCE, 0))
    return int(limit) if limit.isdecimal() else 0
