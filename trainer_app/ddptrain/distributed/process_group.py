"""One rank's membership among all: the process group, rank 0 going first, and all agreeing before they go on.

``worker`` joins, ``train`` and what it calls use it. Ranks reach each other by ``store`` and meet by ``rendezvous``.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ddptrain.distributed.rendezvous import LEFT, connect, job_key, meet, wait_for_key
from ddptrain.distributed.topology import Ranks, route_interface
from ddptrain.errors import Hang, PeerLost, RendezvousError
from ddptrain.heartbeat import Heartbeat
from ddptrain.signals import StopFlag

T = TypeVar("T")
_LAST_WORDS = 0.3  # seconds that a failing rank 0 keeps the store up, for the others to read why
_ANNOUNCING = 2.0  # seconds
_PAUSE_HEARTBEAT = 0.1  # seconds


class Group:
    """One rank's membership. Alone (world size 1) it needs no network and every exchange is the identity."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        store: Store | None,
        stop: StopFlag,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.ranks, self.device, self._store, self._stop = ranks, device, store, stop
        self.heartbeat = heartbeat or Heartbeat()
        self.rank, self.world_size = ranks.rank, ranks.world_size

    def run_on_all_ranks(self, name: str, work: Callable[[], T], timeout: float) -> T:
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
            verdict = json.loads(self._wait(f"{name}/{rank}", timeout, f"{name} on rank {rank}", self._stop))
            if "error" in verdict:
                raise PeerLost(f"rank {rank} failed in phase {name}: {verdict['error']}")
        return result

    def run_on_rank_zero(self, name: str, work: Callable[[], T], timeout: float, *, ending: bool = False) -> T:
        """Rank 0 does ``work``; every rank gets its JSON-able result, or learns that rank 0 failed.

        Args:
            ending: the ranks are about to leave together, so a signal changes nothing any more.

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
        verdict = json.loads(self._wait(name, timeout, f"rank 0's {name}", None if ending else self._stop))
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
        with self.heartbeat.waiting_in("broadcast"):
            dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Element-wise sum over the ranks, in place."""
        if self.world_size > 1:
            with self.heartbeat.waiting_in("all_reduce"):
                dist.all_reduce(values)
        return values

    def pause(self, seconds: float) -> None:
        """Sleep for ``seconds`` with a heartbeat throughout and one at the end, so that no pause counts as a hang."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(_PAUSE_HEARTBEAT, left))
            self.heartbeat.touch()

    def announce_exit(self, reason: str) -> None:
        """Tell ranks that may be waiting in the store that this one is not coming. Never raises."""
        if self._store is not None:
            teller = threading.Thread(target=self._announce, args=(self._store, reason), daemon=True)
            teller.start()
            teller.join(_ANNOUNCING)  # the store's host may be stopped, and would never answer

    def _announce(self, store: Store, reason: str) -> None:
        # A store that died with rank 0 needs no telling: the others notice that themselves.
        with contextlib.suppress(RuntimeError):
            store.set(LEFT, json.dumps({"rank": self.rank, "reason": reason[:500]}))
            if self.rank == 0:
                time.sleep(_LAST_WORDS)

    def close(self) -> None:
        """Destroy the process group on all ranks together: rank 0 hosts the store and must not exit before the others.

        Each part has its own heartbeat: none of them is training, and all are slow on a busy machine.
        """
        self.heartbeat.mark("close")
        if self._store is not None:
            with self.heartbeat.waiting_in("barrier"):
                dist.barrier()
            with self.heartbeat.waiting_in("destroy_process_group"):
                dist.destroy_process_group()
            self._store = None

    def _wait(self, key: str, timeout: float, what: str, stop: StopFlag | None) -> bytes:
        assert self._store is not None
        try:
            with self.heartbeat.waiting_in(f"store: {key}", counted=False):
                return wait_for_key(
                    self._store, key, time.monotonic() + timeout, what, stop=stop, heartbeat=self.heartbeat
                )
        except RendezvousError as error:  # all had met; that one of them does not go on is a hang, and not ours
            hang = Hang(str(error), hint="that rank is stopped, or its volume does not answer")
            hang.cause = "peer"
            raise hang from error


def join_group(
    ranks: Ranks,
    device: torch.device,
    backend: str,
    *,
    rendezvous_timeout: float,
    collective_timeout: float,
    stop: StopFlag,
    heartbeat: Heartbeat,
    env: Mapping[str, str] = os.environ,
) -> Group:
    """Meet the other ranks and form the process group.

    Raises:
        RendezvousError: not everybody came within ``rendezvous_timeout`` seconds; the message names who is missing.
        RanksError: two processes claim one rank, or ranks disagree about the world size.
    """
    if ranks.world_size == 1:
        return Group(ranks, device, None, stop, heartbeat)
    deadline = time.monotonic() + rendezvous_timeout
    store = PrefixStore(job_key(env), connect(ranks, deadline, stop, heartbeat, env))
    meet(store, ranks, deadline, stop, heartbeat)
    interface = None if ranks.init_file else route_interface(ranks.master_addr)
    if interface and "GLOO_SOCKET_IFNAME" not in env:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    if interface and ranks.nnodes > 1 and "NCCL_SOCKET_IFNAME" not in env:
        os.environ["NCCL_SOCKET_IFNAME"] = interface
    with heartbeat.waiting_in("init_process_group"):
        _init(ranks, device, backend, store, collective_timeout)
    return Group(ranks, device, store, stop, heartbeat)


def _init(ranks: Ranks, device: torch.device, backend: str, store: Store, collective_timeout: float) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
        store=PrefixStore("group", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=collective_timeout),
        device_id=device if backend == "nccl" else None,
    )
