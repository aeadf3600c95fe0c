"""Which CPUs the pods of one attempt get, so that their programs, which count CPUs, do not fight for the same ones."""

from collections.abc import Sequence
from math import ceil

from ddpjob.cluster.base import Json
from ddpjob.cluster.memory.quantities import amount


def share(available: Sequence[int], rank: int, nodes: int, limit: int | None = None) -> list[int]:
    """The CPUs of node ``rank``: an even slice, at least one and at most ``limit``.

    With more nodes than CPUs they take turns.
    """
    cpus = sorted(available)
    if nodes >= len(cpus):
        return [cpus[rank % len(cpus)]]
    begin, end = rank * len(cpus) // nodes, (rank + 1) * len(cpus) // nodes
    return cpus[begin:end][:limit]


def limit_of(pod: Json) -> int | None:
    """CPUs that the limits of the pod's containers add up to, rounded up; None if one of them has no limit."""
    limits = [
        (container.get("resources") or {}).get("limits", {}).get("cpu") for container in pod["spec"]["containers"]
    ]
    stated = [amount(limit) for limit in limits if limit is not None]
    return max(ceil(sum(stated)), 1) if len(stated) == len(limits) else None
