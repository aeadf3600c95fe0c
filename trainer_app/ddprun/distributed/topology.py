"""The place of a process among all ranks, read from flags and environment, and the network that leads to its peers.

``cli`` reads it before anything slow is imported, to choose between training alone, as one rank of a group, and
launching a node's ranks. The terms are those of torchrun: node_rank * nproc_per_node + local_rank = rank.
"""

import contextlib
import errno
import fcntl
import ipaddress
import secrets
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ddprun.errors import UsageError

DEFAULT_PORT = 29500
MAX_NODES = 4096
MAX_RANKS = MAX_NODES * 64
_USUAL_EPHEMERAL_START = 32768
_PORT_TRIES = 1000
# What torchrun sets for every worker; docs/concepts/torch-distributed/glossary.md explains them.
WORKER_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


@dataclass(frozen=True)
class Ranks:
    """One process's place among all ranks. ``local_rank`` is None for the launcher, and if LOCAL_RANK is not set."""

    nnodes: int = 1
    node_rank: int = 0
    nproc_per_node: int = 1
    local_rank: int | None = None
    rank: int = 0
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT  # 0 for any free port, of a node that trains alone
    init_file: str = ""  # the file of --init file:///PATH

    @property
    def is_zero(self) -> bool:
        """Rank 0 hosts the store, writes checkpoints and serves progress."""
        return self.rank == 0

    def node_of(self, rank: int) -> int:
        """Return the node of ``rank``; ranks are numbered node by node."""
        return rank // self.nproc_per_node

    @property
    def local_ranks(self) -> range:
        """Return the ranks of this node."""
        first = self.node_rank * self.nproc_per_node
        return range(first, first + self.nproc_per_node)

    def of_local_rank(self, local_rank: int) -> "Ranks":
        """Return the place of this node's process ``local_rank``."""
        return replace(self, local_rank=local_rank, rank=self.node_rank * self.nproc_per_node + local_rank)

    def environment(self) -> dict[str, str]:
        """Return the variables by which a launcher gives a rank its place."""
        values = {
            "RANK": self.rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.nproc_per_node, "GROUP_RANK": self.node_rank, "GROUP_WORLD_SIZE": self.nnodes,
            "MASTER_ADDR": self.master_addr, "MASTER_PORT": self.master_port,
        }  # fmt: skip
        return {name: str(value) for name, value in values.items()}


def without_operator_rank(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without the rank that the operator set for a program that no launcher starts.

    With one process per node the operator sets RANK, WORLD_SIZE and their local forms in the pod. This program launches
    its rank itself, which adds the monitoring of the launcher. A rank from torchrun stays.
    """
    is_of_pod = "DDPJOB_UID" in env and "TORCHELASTIC_RUN_ID" not in env and env.get("NPROC_PER_NODE") == "1"
    place = (env.get("RANK"), env.get("WORLD_SIZE"))
    if not is_of_pod or place != (env.get("NODE_RANK"), env.get("NNODES")):
        return env
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {name: value for name, value in env.items() if name not in own}


def needs_launch(env: Mapping[str, str]) -> bool:
    """Return True if the environment describes a node of several ranks that have not been started yet."""
    return "RANK" not in env and "WORLD_SIZE" not in env and from_node_environment(env).world_size > 1


def from_node_environment(env: Mapping[str, str], **given: int | str | None) -> Ranks:
    """Return the node's place from NNODES, NODE_RANK, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT.

    Args:
        given: values from flags, named like the fields; None means not given.
    Raises:
        UsageError: a value is impossible; the message names the variable or flag.
    """
    nnodes = number_of(env, "NNODES", 1, 1, MAX_NODES, flag=given.get("nnodes"))
    nproc = number_of(env, "NPROC_PER_NODE", 1, 1, 1024, flag=given.get("nproc_per_node"))
    node_rank = number_of(env, "NODE_RANK", 0, 0, MAX_RANKS, flag=given.get("node_rank"))
    if node_rank >= nnodes:
        raise UsageError(
            f"node rank {node_rank} does not exist among {nnodes} node(s)",
            hint="node ranks count from 0, so the last one is the number of nodes minus 1",
            next_step=f"set NODE_RANK to a value from 0 to {nnodes - 1}, or NNODES higher",
        )
    addr = str(given.get("master_addr") or env.get("MASTER_ADDR") or "").strip("[]")  # as in a URL: [::1]
    if nnodes > 1 and not addr:
        raise UsageError(
            f"{nnodes} nodes, but no MASTER_ADDR",
            hint="it is the name or address of the node with NODE_RANK 0, where the ranks meet",
            next_step="set MASTER_ADDR (and MASTER_PORT) on every node",
        )
    default = DEFAULT_PORT if nnodes > 1 else 0
    port = number_of(env, "MASTER_PORT", default, 1, 65535, flag=given.get("master_port"))
    return Ranks(nnodes, node_rank, nproc, None, 0, nnodes * nproc, addr or "127.0.0.1", port)


def from_flags(env: Mapping[str, str], *, init: str | None = None, **given: str | None) -> Ranks:
    """Return the place of a rank started by hand: ``--init``, ``--rank`` and ``--world-size`` before the environment.

    Args:
        init: the rendezvous: ``env``, ``tcp://HOST:PORT`` or ``file:///PATH``.
        given: rank, world_size and local_rank from flags.
    Raises:
        UsageError: a value is impossible, or there is a rank without a world size.
    """
    merged = {**env, **{name.upper(): value for name, value in given.items() if value is not None}}
    kind, _, place = (init or "env").partition("://")
    if init and not merged.get("RANK"):
        raise UsageError(
            f"--init {init} without --rank and --world-size",
            hint="each process needs its rank and the number of ranks",
            next_step="add --rank N --world-size M, N from 0 to M-1",
        )
    host, _, port = place.rpartition(":")
    if kind == "tcp" and host and port:
        merged |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    elif kind == "file" and place.startswith("/"):
        return replace(from_rank_environment(merged), init_file=place)
    elif init not in (None, "env"):
        raise UsageError(
            f"--init {init} is none of env, tcp://HOST:PORT, file:///PATH",
            hint="a file's path is absolute, so file: has three slashes",
            next_step="for example --init tcp://127.0.0.1:29500",
        )
    return from_rank_environment(merged)


def from_rank_environment(env: Mapping[str, str]) -> Ranks:
    """Return one rank's place from RANK and WORLD_SIZE, as torchrun sets them; the only rank without them.

    Raises:
        UsageError: only one of the two is set, or a value is impossible.
    """
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return Ranks(local_rank=0)
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        missing = "WORLD_SIZE" if "RANK" in env else "RANK"
        raise UsageError(
            f"{missing} is not set, but {'RANK' if missing == 'WORLD_SIZE' else 'WORLD_SIZE'} is",
            hint="a rank needs both: its own number and the number of ranks",
            next_step=f"set {missing}, or unset both and let a launcher set them",
        )
    world = number_of(env, "WORLD_SIZE", 1, 1, MAX_RANKS)
    rank = number_of(env, "RANK", 0, 0, MAX_RANKS)
    if rank >= world:
        raise UsageError(
            f"RANK={rank} does not exist among WORLD_SIZE={world}",
            hint="ranks count from 0",
            next_step=f"use ranks 0 to {world - 1}",
        )
    local_world = number_of(env, "LOCAL_WORLD_SIZE", 1, 1, world)
    return Ranks(
        nnodes=max(1, world // local_world),
        node_rank=rank // local_world,
        nproc_per_node=local_world,
        local_rank=number_of(env, "LOCAL_RANK", 0, 0, MAX_RANKS) if env.get("LOCAL_RANK") or world == 1 else None,
        rank=rank,
        world_size=world,
        master_addr=(env.get("MASTER_ADDR") or "127.0.0.1").strip("[]"),
        master_port=number_of(env, "MASTER_PORT", DEFAULT_PORT, 1, 65535),
    )


def number_of(
    env: Mapping[str, str], variable: str, default: int, low: int, high: int, *, flag: int | str | None = None
) -> int:
    """Return the value of the flag, else of the variable, else the default.

    Raises:
        UsageError: it is not a whole number within the bounds.
    """
    name, value = (variable, env.get(variable)) if flag is None else (f"--{variable.lower().replace('_', '-')}", flag)
    if value is None or value == "":
        return default
    try:
        number = int(value)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise UsageError(
            f"{name}={value} is not a whole number from {low} to {high}",
            hint=f"{name} was read from a flag or the environment",
            next_step=f"give {name} a value in that range",
        )
    return number


_SIOCGIFADDR = 0x8915


def route_interface(host: str) -> str | None:
    """Return the name of the network interface that routes to ``host``; None if it is unknown.

    gloo would otherwise choose the interface by the hostname, which is wrong on many machines.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; it only looks up the route
            local = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
    except OSError:
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if local.version == 6:
            lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
            return next((fields[5] for fields in lines if int(fields[0], 16) == int(local)), None)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                if answer[20:24] == local.packed:
                    return name
    return "lo" if local.is_loopback else None


def loopback_of(host: str) -> str | None:
    """Return the address at which only programs of this machine reach ``host``; None if others may need to reach it."""
    if host == "localhost":
        return "127.0.0.1"
    with contextlib.suppress(ValueError):
        return host if ipaddress.ip_address(host).is_loopback else None
    return None


def bind(port: int, host: str = "", *, again: bool = False) -> socket.socket:
    """Return a socket bound to a port of an address, by default of all addresses of IPv4 and IPv6.

    Args:
        again: also to a port that another program has just closed, or has bound and does not listen on.
    Raises:
        OSError, OverflowError: the port cannot be bound.
    """
    dual = not host and socket.has_dualstack_ipv6()
    bound = socket.socket(socket.AF_INET6 if dual or ":" in host else socket.AF_INET)
    try:
        if dual:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, again)
        bound.bind((host, port))
    except BaseException:
        bound.close()
        raise
    return bound


def free_port(ephemeral_range: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> int:
    """Return a TCP port that is free at this moment.

    It is below the ephemeral range: an outgoing connection could take an ephemeral port before rank 0 listens on it,
    and a rank that tries to connect to one before that can connect to itself. A machine whose ephemeral range begins
    too low for that gets any free port.

    Raises:
        OSError: no port is free.
    """
    try:
        low = int(ephemeral_range.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        low = _USUAL_EPHEMERAL_START
    first, end = (max(1024, low - 12_000), low) if low > 2048 else (1024, 65536)
    for _ in range(_PORT_TRIES):
        port = first + secrets.randbelow(end - first)  # not ``random``: forked processes share its state
        with contextlib.suppress(OSError):
            bind(port).close()
            return port
    raise OSError(errno.EADDRINUSE, f"no TCP port from {first} to {end - 1} is free")
