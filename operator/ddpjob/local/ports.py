"""Free TCP ports in place of the fixed ones that every pod has for itself in a cluster."""

import errno
import random
import socket
from pathlib import Path

from ddpjob.local.errors import LocalError

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL = (32768, 60999)
_SPAN = 12_000
_TRIES = 1000


def free_port(taken: set[int]) -> int:
    """A port that nobody listens on and that is not in ``taken``. Raises ``LocalError`` when there seems to be none.

    Outside the range that the kernel gives to outgoing connections: of those there are many here, any of them could
    take the port before its owner has loaded its libraries, and a connection to an ephemeral port that has no
    listener yet may even meet itself.
    """
    first, last = _candidates()
    for _ in range(_TRIES):
        port = random.randint(first, last)  # noqa: S311 - two runs at once shall not try the same ones in turn
        if port not in taken and _is_free(port):
            return port
    raise LocalError(
        f"no TCP port between {first} and {last} is free",
        "every node of a job needs one, and each attempt another",
        "end what listens there: `ss -ltnp` tells who does",
    )


def _candidates() -> tuple[int, int]:
    try:
        low, high = (int(word) for word in _RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        low, high = _USUAL_EPHEMERAL
    if low > 2048:
        return max(1024, low - _SPAN), low - 1
    return (high + 1, 65535) if high < 65000 else (1024, 65535)


def _is_free(port: int) -> bool:
    """On all addresses: torch's store listens on every one."""
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
    """Which port stands for which, for one run of a job.

    rendezvous: the pods' fixed port for it, which stands for one port per attempt, that of the pod with rank 0.
    progress: the pods' fixed port for it, which stands for one port per pod.
    """

    def __init__(self, *, rendezvous: int, progress: int) -> None:
        self._fixed = (rendezvous, progress)
        self._given: dict[tuple[str, int], int] = {}

    def of(self, pod: str, port: int) -> int:
        """The port of this machine that stands for ``port`` of ``pod``, or ``port`` itself."""
        rendezvous, _ = self._fixed
        if port not in self._fixed:
            return port
        attempt = pod.rpartition("-")[0]  # <job>-<uid>-<attempt>-<rank>
        key = (attempt if port == rendezvous else pod, port)
        if key not in self._given:
            self._given[key] = free_port(set(self._given.values()))
        return self._given[key]
