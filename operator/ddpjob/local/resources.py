"""CPUs, GPUs and TCP ports of this machine, shared among the pods of a job."""

import itertools
import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

from ddpjob.api.quantities import amount
from ddpjob.local import LocalError


def cpu_share(available: Sequence[int], rank: int, nodes: int, limit: int | str | None = None) -> list[int]:
    """Return the CPUs of node ``rank``: an equal share, at least one and at most ``limit``, a quantity, rounded up.

    Programs size their thread pools by it. With more nodes than CPUs, nodes share CPUs.
    """
    cpus = sorted(available)
    if nodes >= len(cpus):
        return [cpus[rank % len(cpus)]]
    begin, end = rank * len(cpus) // nodes, (rank + 1) * len(cpus) // nodes
    return cpus[begin:end][: None if limit is None else max(ceil(amount(limit)), 1)]


CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_GPU_DRIVER = Path("/proc/driver/nvidia/gpus")


def available_cpus() -> list[int]:
    """Return the CPUs that this process may use. Raises ``LocalError`` on a system that is not Linux."""
    if sys.platform != "linux":
        raise LocalError(
            f"local mode runs on Linux only, this is {sys.platform}",
            "it needs features of the Linux kernel to stop every process of a job",
            "run it in a Linux virtual machine or container, or use a cluster",
        )
    return sorted(os.sched_getaffinity(0))


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = _GPU_DRIVER) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Not yet run on a machine with several GPUs.
    """
    given = environment.get(CUDA_VISIBLE_DEVICES)
    if given is not None:
        names = itertools.takewhile(lambda name: name != "-1", (name.strip() for name in given.split(",")))
        return [name for name in names if name]
    return [str(index) for index, _ in enumerate(driver.glob("*"))]


def gpu_variables(devices: Sequence[str], rank: int, nodes: int, *, requested: int, processes: int) -> dict[str, str]:
    """Return the variables for the GPUs of node ``rank``.

    NCCL refuses two ranks on one GPU if they are on one machine. Nodes that share a GPU, perhaps as MIG devices of it,
    get different values of NCCL_HOSTID, so NCCL takes them for different machines.

    Args:
        requested: GPUs of each node. If it is 0, several nodes get an equal share, but at least one for each of their
            ``processes``, and a single node sees all.
    """
    wanted = requested or (max(processes, len(devices) // nodes) if nodes > 1 else 0)
    if not (devices and wanted):
        return {}
    mine = [devices[(rank * wanted + n) % len(devices)] for n in range(min(wanted, len(devices)))]
    variables = {CUDA_VISIBLE_DEVICES: ",".join(mine)}
    is_shared = nodes > 1 and (nodes * wanted > len(devices) or any(name.startswith("MIG-") for name in devices))
    return variables | ({"NCCL_HOSTID": f"node-{rank}"} if is_shared else {})


_PORTS = (20_000, 32_000)
"""Below the ephemeral ports of Linux (32768 to 60999): an outgoing connection could take an ephemeral port before its
owner listens on it, and a connection to an ephemeral port without a listener can connect to itself."""
_TRIES = 1000


class Ports:
    """A local port for each name that asks: an attempt for its rendezvous, and a pod for its progress."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}

    def of(self, name: str) -> int:
        """Return the port of a name, free when the name first asked. Raises ``LocalError`` if no port is free."""
        if name not in self._given:
            self._given[name] = _free_port(set(self._given.values()))
        return self._given[name]


def _free_port(taken: set[int]) -> int:
    first, last = _PORTS
    for _ in range(_TRIES):
        port = random.randint(first, last)  # noqa: S311 - so that two runs at once try different ports
        if port not in taken and _is_free(port):
            return port
    raise LocalError(
        f"no TCP port between {first} and {last} is free",
        "every node of a job needs one, and every attempt needs new ones",
        "stop programs that listen there: `ss -ltnp` lists them",
    )


def _is_free(port: int) -> bool:
    """Return whether the port is free on all addresses: torch's store listens on all of them."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError:
        return False
    return True
