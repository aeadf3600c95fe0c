"""One rank's membership in the process group: joining it, agreement between the ranks, and leaving it together.

``worker`` joins; the training exchanges data through ``Group``. The store through which the ranks
find each other is in ``rendezvous``.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from ddprun.distributed.default_group import from_rank_zero
from ddprun.distributed.rendezvous import EXIT_KEY, RankRendezvous, key_prefix, wait_for_key
from ddprun.distributed.topology import Ranks, route_interface
from ddprun.errors import Hang, PeerLost, RendezvousError
from ddprun.heartbeat import Heartbeat
from ddprun.signals import StopFlag

T = TypeVar("T")
# Renamed in newer versions of PyTorch, which warn of the older names.
all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_STORE_LINGER = 1.0  # seconds that a failing rank 0 keeps the store up, so that the others can read why
_ANNOUNCE_TIMEOUT = 2.0  # seconds
_PAUSE_HEARTBEAT = 0.1  # seconds


@dataclass
class Group:
    """One rank's membership. Without a process group (one rank) every exchange returns its input.

    Attributes:
        has_process_group: also True for one rank whose backend was given by name.
    """

    ranks: Ranks
    device: torch.device
    store: Store | None
    stop: StopFlag
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    def __post_init__(self) -> None:
        self.rank, self.world_size = self.ranks.rank, self.ranks.world_size
        self.has_process_group = self.store is not None or self.world_size > 1

    def run_on_all_ranks(self, name: str, work: Callable[[], T], timeout: float) -> T:
        """Run ``work`` on every rank and return this rank's result once all have succeeded.

        Raises:
            PeerLost: another rank's work failed; the message quotes its error.
        """
        if self.store is None:
            return work()
        try:
            result = work()
        except BaseException as error:
            self.store.set(f"{name}/{self.rank}", json.dumps({"error": str(error)}))
            raise
        self.store.set(f"{name}/{self.rank}", "{}")
        for rank in range(self.world_size):
            key, what, failure = f"{name}/{rank}", f"{name} on rank {rank}", f"rank {rank} failed in phase {name}"
            self._outcome(key, timeout, what, failure, self.stop)
        return result

    def run_on_rank_zero(self, name: str, work: Callable[[], T], timeout: float, *, ending: bool = False) -> T:
        """Run ``work`` on rank 0 and return its JSON-able result on every rank.

        Args:
            ending: the ranks are about to exit together, so a stop signal changes nothing any more.

        Raises:
            PeerLost: on the other ranks, if rank 0's work failed.
        """
        if self.store is None:
            return work()
        if self.rank == 0:
            try:
                result = work()
            except BaseException as error:
                self.store.set(name, json.dumps({"error": str(error)}))
                raise
            self.store.set(name, json.dumps({"result": result}))
            return result
        stop = None if ending else self.stop
        outcome = self._outcome(name, timeout, f"rank 0's {name}", f"rank 0 failed in phase {name}", stop)
        return outcome["result"]  # type: ignore[no-any-return]

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's ``data`` on every rank, so that the others need not see the volume."""
        with self.heartbeat.waiting_in("broadcast"):
            return bytes(from_rank_zero(data))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``values`` over the ranks in place, element by element, and return them."""
        if self.has_process_group:
            with self.heartbeat.waiting_in("all_reduce"):
                dist.all_reduce(values)
        return values

    def gather(self, value: T, waiting_in: str) -> list[T]:
        """Return the ranks' JSON-able values, in order of rank, on every rank.

        JSON and not PyTorch's object collectives: these unpickle what a peer sends, and so execute its code.
        """
        if not self.has_process_group:
            return [value]
        content = json.dumps(value).encode()
        sizes = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(content)
        with self.heartbeat.waiting_in(waiting_in):
            dist.all_reduce(sizes)
            padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=self.device)
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            received = [torch.empty_like(padded) for _ in range(self.world_size)]
            dist.all_gather(received, padded)
        texts = [part[:size].cpu().numpy().tobytes() for part, size in zip(received, sizes.tolist(), strict=True)]
        return [json.loads(text) for text in texts]

    def pause(self, seconds: float) -> None:
        """Sleep for ``seconds`` with a heartbeat throughout and one at the end, so that no pause counts as a hang."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(_PAUSE_HEARTBEAT, left))
            self.heartbeat.touch()

    def announce_exit(self, reason: str) -> None:
        """Announce in the store, where other ranks may be waiting, that this rank exits. Never raises."""
        store = self.store
        if store is None:
            return

        def announce() -> None:
            with contextlib.suppress(Exception):  # a store that ended with rank 0: the others notice that themselves
                store.set(EXIT_KEY, json.dumps({"rank": self.rank, "reason": reason[:500]}))
                if self.rank == 0:
                    time.sleep(_STORE_LINGER)

        with contextlib.suppress(Exception):  # no memory or no thread is left, perhaps the reason of the exit
            thread = threading.Thread(target=announce, daemon=True)
            thread.start()
            thread.join(_ANNOUNCE_TIMEOUT)  # the store's host may be stopped and never answer

    def close(self) -> None:
        """Destroy the process group on all ranks together: rank 0 hosts the store and must not exit before the others.

        Each part has its own heartbeat: none of them is training, and all are slow on a busy machine.
        """
        self.heartbeat.mark("close")
        if self.store is not None:
            with self.heartbeat.waiting_in("barrier"):
                dist.barrier()
            with self.heartbeat.waiting_in("destroy_process_group"):
                dist.destroy_process_group()
            self.store = None

    def _outcome(self, key: str, timeout: float, what: str, failure: str, stop: StopFlag | None) -> dict[str, Any]:
        """Return another rank's outcome as soon as the store has it.

        Raises:
            PeerLost: the outcome is an error. Hang: there is none in time, and the rank did not announce its exit.
        """
        assert self.store is not None
        deadline = time.monotonic() + timeout
        try:
            with self.heartbeat.waiting_in(f"store: {key}", counted=False):
                value = wait_for_key(self.store, key, deadline, what, stop=stop, heartbeat=self.heartbeat)
        except RendezvousError as error:  # all ranks had joined, so one of them hangs, and not this one
            hang = Hang(str(error), hint="that rank is stopped, or its volume does not answer")
            hang.cause = "peer"
            raise hang from error
        outcome: dict[str, Any] = json.loads(value)
        if "error" in outcome:
            raise PeerLost(f"{failure}: {outcome['error']}")
        return outcome


def alone(device: torch.device) -> Group:
    """Return a group of this process only."""
    return Group(Ranks(local_rank=0), device, None, StopFlag())


def interface_variables(interface: str, nnodes: int) -> dict[str, str]:
    """Return the variables by which gloo and, between nodes, NCCL use exactly this network interface."""
    gloo = {"GLOO_SOCKET_IFNAME": interface}
    return gloo | {"NCCL_SOCKET_IFNAME": f"={interface}"} if nnodes > 1 else gloo  # without "=" it is a prefix


def join_group(
    ranks: Ranks,
    device: torch.device,
    backend: str,
    *,
    rendezvous_timeout: float,
    collective_timeout: float,
    stop: StopFlag,
    heartbeat: Heartbeat,
    also_alone: bool = False,
) -> Group:
    """Wait for the other ranks and initialize the process group.

    Args:
        also_alone: also for a single rank, to test the backend on one device.
    Raises:
        RendezvousError: a rank is missing after ``rendezvous_timeout`` seconds; the message names it.
        RanksError: two processes claim one rank, or ranks have different world sizes.
    """
    if ranks.world_size == 1 and not also_alone:
        return Group(ranks, device, None, stop, heartbeat)
    store: Store
    if ranks.world_size == 1:
        store = HashStore()  # in memory, so it needs no port
    else:
        rendezvous = RankRendezvous(ranks, time.monotonic() + rendezvous_timeout, stop, heartbeat)
        store = PrefixStore(key_prefix(os.environ), rendezvous.connect())
        rendezvous.wait_for_all_ranks(store, backend)
    if not ranks.init_file and (interface := route_interface(ranks.master_addr)):
        for name, value in interface_variables(interface, ranks.nnodes).items():
            os.environ.setdefault(name, value)
    # NCCL connects all GPUs here, which takes minutes with thousands of them; its own limit ends the wait.
    heartbeat.mark("rendezvous", limit=collective_timeout)
    with heartbeat.waiting_in("init_process_group"):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,
            store=PrefixStore("group", store),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=collective_timeout),
            device_id=device if backend == "nccl" else None,
        )
    return Group(ranks, device, store, stop, heartbeat)
