"""How the ranks find each other and talk: the store, who is missing, the process group, and rank 0 going first.

``worker`` joins; ``sync``, ``evaluate`` and ``train`` use the group. Rendezvous is static: rank 0 hosts a TCP store at
MASTER_ADDR:MASTER_PORT. Whatever may wait long waits here by polling, so that SIGTERM and a peer's death are noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddptrain.errors import PeerLost, RanksError, RendezvousError, TrainerError, classify
from ddptrain.network import route_interface
from ddptrain.ranks import Ranks
from ddptrain.stop import StopFlag

T = TypeVar("T")
_LEFT = "left"
_LAST_WORDS = 0.3  # seconds that a failing rank 0 keeps the store up, for the others to read why


class Group:
    """One rank's membership. Alone (world size 1) it needs no network and every exchange is the identity."""

    def __init__(self, ranks: Ranks, device: torch.device, store: dist.Store | None, stop: StopFlag) -> None:
        self.ranks, self.device, self._store, self._stop = ranks, device, store, stop
        self.rank, self.world_size = ranks.rank, ranks.world_size

    def together(self, name: str, work: Callable[[], T], timeout: float) -> T:
        """Every rank does ``work`` of its own; if it fails on one, all leave, the others saying whose fault it was.

        Raises:
            PeerLost: another rank's work failed; its message is quoted.
        """
        if self._store is None:
            return work()
        try:
            result = work()
        except BaseException as error:
            self._store.set(f"{name}/{self.rank}", json.dumps({"error": str(error)}))
            raise
        self._store.set(f"{name}/{self.rank}", "{}")
        for rank in range(self.world_size):
            verdict = json.loads(self._wait(f"{name}/{rank}", timeout, f"{name} on rank {rank}"))
            if "error" in verdict:
                raise PeerLost(f"rank {rank} failed in phase {name}: {verdict['error']}")
        return result

    def from_rank_zero(self, name: str, work: Callable[[], T], timeout: float) -> T:
        """Rank 0 does ``work``; every rank gets its JSON-able result, or learns that rank 0 failed.

        Raises:
            PeerLost: on the other ranks, when rank 0's work failed.
        """
        if self._store is None:
            return work()
        if self.rank == 0:
            try:
                result = work()
            except BaseException as error:
                self._store.set(name, json.dumps({"error": str(error)}))
                raise
            self._store.set(name, json.dumps({"result": result}))
            return result
        verdict = json.loads(self._wait(name, timeout, f"rank 0's {name}"))
        if "error" in verdict:
            raise PeerLost(f"rank 0 failed in phase {name}: {verdict['error']}")
        return verdict["result"]  # type: ignore[no-any-return]

    def broadcast_bytes(self, data: bytes, size: int) -> bytes:
        """Rank 0's ``data`` of ``size`` bytes on every rank: the others need not see the volume."""
        if self.world_size == 1:
            return data
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def announce_leaving(self, reason: str) -> None:
        """Tell ranks that may be waiting in the store that this one is not coming. Never raises."""
        if self._store is not None:
            # A store that died with rank 0 needs no telling: the others notice that themselves.
            with contextlib.suppress(RuntimeError):
                self._store.set(_LEFT, json.dumps({"rank": self.rank, "reason": reason[:500]}))
                if self.rank == 0:
                    time.sleep(_LAST_WORDS)

    def close(self) -> None:
        """Leave together: rank 0 hosts the store, so it must not go before the others have read their last word."""
        if self._store is not None:
            dist.barrier()
            dist.destroy_process_group()

    def _wait(self, key: str, timeout: float, what: str) -> bytes:
        assert self._store is not None
        return wait_for_key(self._store, key, time.monotonic() + timeout, what, self._stop)


def join(
    ranks: Ranks,
    device: torch.device,
    backend: str,
    *,
    rendezvous_timeout: float,
    collective_timeout: float,
    stop: StopFlag,
    env: Mapping[str, str] = os.environ,
) -> Group:
    """Meet the other ranks and form the process group.

    Raises:
        RendezvousError: not everybody came within ``rendezvous_timeout`` seconds; the message names who is missing.
        RanksError: two processes claim one rank, or ranks disagree about the world size.
    """
    if ranks.world_size == 1:
        return Group(ranks, device, None, stop)
    deadline = time.monotonic() + rendezvous_timeout
    store = dist.PrefixStore(_job_key(env), _connect(ranks, deadline, stop, env))
    _meet(store, ranks, deadline, stop)
    if ranks.nnodes > 1 or backend == "gloo":
        interface = route_interface(ranks.master_addr)
        for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if interface and key not in env:
                os.environ[key] = interface
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=dist.PrefixStore("group", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=collective_timeout),
        device_id=device if backend == "nccl" else None,
    )
    return Group(ranks, device, store, stop)


def wait_for_key(store: dist.Store, key: str, deadline: float, what: str, stop: StopFlag) -> bytes:
    """The key's value as soon as it is set.

    Raises:
        PeerLost: a rank announced that it leaves, or the store's host is gone.
        RendezvousError: ``deadline`` (of time.monotonic) passed.
        Stopped: a signal came.
    """
    pause = 0.002
    while not store.check([key]):
        if store.check([_LEFT]):
            left = json.loads(store.get(_LEFT))
            raise PeerLost(f"rank {left['rank']} left: {left['reason']}")
        if time.monotonic() > deadline:
            raise RendezvousError(f"waited in vain for {what}", hint="that rank is stopped, slow or gone")
        stop.leave_if_requested("rendezvous")
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    return store.get(key)


def _job_key(env: Mapping[str, str]) -> str:
    """Keeps two jobs that meet at one port, or two lives of one job, from reading each other's keys."""
    parts = (
        env.get(k, "") for k in ("DDPJOB_UID", "DDPJOB_ATTEMPT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    )
    return "ddptrain/" + "/".join(parts)


def _connect(ranks: Ranks, deadline: float, stop: StopFlag, env: Mapping[str, str]) -> dist.Store:
    """The store: hosted by rank 0 (by torchrun's agent under torchrun), joined by the others."""
    hosts = ranks.is_zero and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _await_port(ranks, deadline, stop)
    try:
        return dist.TCPStore(
            ranks.master_addr,
            ranks.master_port,
            is_master=hosts,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
        )
    except RuntimeError as error:
        reason = str(error).partition("\n")[0][:300]
        if hosts:
            raise RendezvousError(
                f"rank 0 cannot listen on port {ranks.master_port}: {reason}",
                hint="another process has the port, perhaps an earlier run that still ends",
                next_step="choose another MASTER_PORT",
            ) from error
        raise RendezvousError(f"cannot join the store at {ranks.master_addr}:{ranks.master_port}: {reason}") from error


def _await_port(ranks: Ranks, deadline: float, stop: StopFlag) -> None:
    """Until the store's host accepts connections. Its DNS name may not resolve yet: a pod's appears with its address."""
    pause, last = 0.05, "nothing tried"
    while True:
        stop.leave_if_requested("rendezvous")
        try:
            with socket.create_connection((ranks.master_addr, ranks.master_port), timeout=3):
                return
        except OSError as error:
            last = str(error)
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"rank 0 (node 0) is missing: {ranks.master_addr}:{ranks.master_port} does not answer ({last})",
                hint="the node of rank 0 has not started, or a network policy or firewall is between",
                next_step="look at rank 0's log; check MASTER_ADDR and MASTER_PORT",
            )
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)


def _meet(store: dist.Store, ranks: Ranks, deadline: float, stop: StopFlag) -> None:
    """Each rank signs in; rank 0 waits for all and tells the verdict to everybody."""
    presence = json.dumps({"world": ranks.world_size, "host": socket.gethostname()})
    if store.add(f"claims/{ranks.rank}", 1) > 1:
        raise RanksError(
            f"two processes claim rank {ranks.rank}",
            hint="two nodes have the same NODE_RANK, or an earlier run still holds the port",
            next_step="give every node its own NODE_RANK",
        )
    store.set(f"present/{ranks.rank}", presence)
    if ranks.is_zero:
        try:
            _await_all(store, ranks, deadline, stop)
        except TrainerError as error:
            store.set("verdict", str(error))
            raise
        store.set("verdict", "")
        return
    # Rank 0 decides at its own deadline; a little patience lets its verdict, with the names, arrive.
    try:
        verdict = wait_for_key(store, "verdict", deadline + 15, "rank 0's verdict on who is here", stop).decode()
    except RuntimeError as error:
        raise classify(error) from error
    if verdict:
        raise RendezvousError(verdict, hint="rank 0 gave up waiting")


def _await_all(store: dist.Store, ranks: Ranks, deadline: float, stop: StopFlag) -> None:
    waiting = set(range(ranks.world_size))
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"present/{rank}"]):
                waiting.discard(rank)
                theirs = json.loads(store.get(f"present/{rank}"))
                if theirs["world"] != ranks.world_size:
                    raise RanksError(
                        f"rank {rank} on {theirs['host']} believes in {theirs['world']} ranks, rank 0 in {ranks.world_size}",
                        next_step="give every node the same NNODES and NPROC_PER_NODE",
                    )
        if waiting and time.monotonic() > deadline:
            raise RendezvousError(
                f"missing {_named(sorted(waiting), ranks)} of {ranks.world_size} ranks",
                hint="their pods have not started, cannot reach rank 0, or failed before they could sign in",
                next_step="look at the log of the first missing node",
            )
        if waiting:
            stop.leave_if_requested("rendezvous")
            time.sleep(0.02)


def _named(missing: Iterable[int], ranks: Ranks) -> str:
    """``rank 2 (node 1), rank 3 (node 1)``, cut after eight."""
    missing = list(missing)
    names = [f"rank {r} (node {ranks.node_of(r)})" for r in missing[:8]]
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return ", ".join(names) + more


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
        raise RanksError(f"this PyTorch build has no {chosen}", next_step="use --backend gloo")
    return str(chosen)
