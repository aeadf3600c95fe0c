"""CPUs, GPUs and TCP ports of this machine, shared among the pods of a job."""

import errno
import os
import random
import socket
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

from ddpjob.api.devices import count_devices
from ddpjob.api.objects import Json
from ddpjob.api.quantities import amount
from ddpjob.local import LocalError


def cpu_share(available: Sequence[int], rank: int, nodes: int, limit: int | None = None) -> list[int]:
    """Return the CPUs of node ``rank``: an equal share, at least one and at most ``limit``.

    Programs size their thread pools by it. With more nodes than CPUs, nodes share CPUs.
    """
    cpus = sorted(available)
    if nodes >= len(cpus):
        return [cpus[rank % len(cpus)]]
    begin, end = rank * len(cpus) // nodes, (rank + 1) * len(cpus) // nodes
    return cpus[begin:end][:limit]


def cpu_limit(pod: Json) -> int | None:
    """Return the sum of the containers' CPU limits, rounded up; None if a container has no limit."""
    limits = [
        (container.get("resources") or {}).get("limits", {}).get("cpu") for container in pod["spec"]["containers"]
    ]
    stated = [amount(limit) for limit in limits if limit is not None]
    return max(ceil(sum(stated)), 1) if len(stated) == len(limits) else None


CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_GPU_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = _GPU_DRIVER) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Written from the CUDA documentation; not yet run on a machine with several GPUs.
    """
    given = environment.get(CUDA_VISIBLE_DEVICES)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    return [str(index) for index, _ in enumerate(driver.glob("*"))]


def gpu_share(devices: Sequence[str], rank: int, wanted: int) -> list[str]:
    """Return the GPUs of node ``rank`` if each node requests ``wanted``; with too few GPUs, nodes share them."""
    if not devices:
        return []
    return [devices[(rank * wanted + n) % len(devices)] for n in range(min(wanted, len(devices)))]


def gpu_limit(container: Json) -> int:
    """Return the number of GPUs and MIG devices in a container's resources."""
    resources = container.get("resources") or {}
    try:
        return count_devices(resources.get("limits") or {}, resources.get("requests") or {})
    except ValueError:
        return 0  # a fraction of a device, which a real API server refuses


_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL = (32768, 60999)
_SPAN = 12_000
_TRIES = 1000


def free_port(taken: set[int]) -> int:
    """Return a port without a listener that is not in ``taken``. Raises ``LocalError`` if it finds none.

    The port is outside the ephemeral range: an outgoing connection could take an ephemeral port before its owner
    listens on it, and a connection to an ephemeral port without a listener can connect to itself.
    """
    first, last = _candidates()
    for _ in range(_TRIES):
        port = random.randint(first, last)  # noqa: S311 - so that two runs at once try different ports
        if port not in taken and _is_free(port):
            return port
    raise LocalError(
        f"no TCP port between {first} and {last} is free",
        "every node of a job needs one, and every attempt needs new ones",
        "stop programs that listen there: `ss -ltnp` lists them",
    )


def _candidates() -> tuple[int, int]:
    try:
        low, high = (int(text) for text in _RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        low, high = _USUAL_EPHEMERAL
    if low > 2048:
        return max(1024, low - _SPAN), low - 1
    return (high + 1, 65535) if high < 65000 else (1024, 65535)


def _is_free(port: int) -> bool:
    """Return whether the port is free on all addresses: torch's store listens on all of them."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104
        try:
            with socket.socket(family) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET6 and error.errno != errno.EADDRINUSE:
                continue  # no IPv6 on this machine
            return False
    return True


class Ports:
    """The local ports that replace the fixed ports of the pods, for one run of a job.

    rendezvous: the pods' port for it; replaced by one local port per attempt, on which rank 0 listens.
    progress: the pods' port for it; replaced by one local port per pod.
    """

    def __init__(self, *, rendezvous: int, progress: int) -> None:
        self._fixed = (rendezvous, progress)
        self._given: dict[tuple[str, int], int] = {}

    def of(self, pod: str, port: int) -> int:
        """Return the local port for ``port`` of ``pod``; other ports are returned unchanged."""
        rendezvous, _ = self._fixed
        if port not in self._fixed:
            return port
        attempt = pod.rpartition("-")[0]  # <job>-<uid>-<attempt>-<rank>
        key = (attempt if port == rendezvous else pod, port)
        if key not in self._given:
            self._given[key] = free_port(set(self._given.values()))
        return self._given[key]
