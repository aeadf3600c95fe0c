"""Rendezvous: the store through which the ranks find each other, and the wait until all of them are present.

Rank 0 hosts the store at MASTER_ADDR:MASTER_PORT, or all ranks share a file. ``process_group`` joins here and exchanges
small values; the launcher announces killed ranks. Every wait polls, so that a SIGTERM and a peer's exit are noticed.
"""

import contextlib
import hashlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ddprun.distributed.topology import Ranks, bind, loopback_of
from ddprun.errors import PeerLost, RanksError, RendezvousError, TrainerError
from ddprun.heartbeat import Heartbeat
from ddprun.signals import StopFlag

DEFAULT_TIMEOUT = 600.0  # seconds
EXIT_KEY = "left"  # a rank that exits writes its rank and the reason under this key
_REPLY_TIMEOUT = 2.0  # seconds for a store to answer a new connection
_VERDICT_READ = 5.0  # seconds that rank 0 keeps the store up for the others to read why it fails
_POLL = 0.02  # seconds
_FIRST_LINE, _NEXT_LINE = 10.0, 60.0  # seconds of waiting until it is printed, and until it is printed again


def parse_rendezvous_timeout(rdzv_conf: str) -> float:
    """Return the seconds in torchrun's ``--rdzv-conf`` (``key=value,timeout=N``); 600 if it has none."""
    for part in rdzv_conf.split(","):
        key, _, value = part.partition("=")
        if key.strip() == "timeout" and value.strip().replace(".", "", 1).isdecimal():
            return float(value)
    return DEFAULT_TIMEOUT


def key_prefix(env: Mapping[str, str]) -> str:
    """Return a prefix that separates the keys of two jobs on one port, and those of two attempts of one job.

    It is a digest: every program that reaches the store can list its keys.
    """
    names = ("DDPJOB_UID", "DDPJOB_ATTEMPT", "DDPJOB_TOKEN", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return "ddprun/" + hashlib.sha256(json.dumps([env.get(name, "") for name in names]).encode()).hexdigest()[:32]


@dataclass
class RankRendezvous:
    """One rank's wait for the store and for the other ranks.

    Attributes:
        deadline: of time.monotonic; the waits that fail at it raise RendezvousError.
    """

    ranks: Ranks
    deadline: float
    stop: StopFlag
    heartbeat: Heartbeat

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._next_line = self._began + _FIRST_LINE

    def connect(self) -> Store:
        """Return the store. Rank 0 hosts it, under torchrun its agent does; the other ranks connect.

        Raises:
            RendezvousError: the store cannot be opened, or does not answer in time.
        """
        ranks = self.ranks
        if ranks.init_file:
            try:
                Path(ranks.init_file).touch()  # FileStore would wait silently for a missing directory
            except OSError as error:
                raise RendezvousError(
                    f"cannot use file://{ranks.init_file} for the rendezvous: {error.strerror}",
                    next_step="name a file that every rank can write, a new one for every start",
                ) from error
            return FileStore(ranks.init_file, ranks.world_size)
        seconds = max(1.0, self.deadline - time.monotonic())
        if not ranks.is_zero or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self._wait_for_port()
            try:
                return store_client(ranks, seconds, self._poll)
            except RuntimeError as error:
                raise RendezvousError(
                    f"cannot join the store at {ranks.master_addr}:{ranks.master_port}: {_first_line(error)}",
                    hint="another program has that port there, or a proxy answers for a host that is gone",
                    next_step="check MASTER_ADDR; choose another MASTER_PORT",
                ) from error
        host = loopback_of(ranks.master_addr)
        try:
            listener = bind(ranks.master_port, host, again=True).detach() if host else None
            return TCPStore(
                host or "localhost",  # it listens on every address; the host's own DNS name may be the last to resolve
                ranks.master_port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
                master_listen_fd=listener,
            )
        except (OSError, RuntimeError) as error:
            raise RendezvousError(
                f"rank 0 cannot listen on port {ranks.master_port}: {_first_line(error)}",
                hint="another process has the port, perhaps an earlier run that has not ended yet",
                next_step="choose another MASTER_PORT",
            ) from error

    def wait_for_all_ranks(self, store: Store, backend: str) -> None:
        """Register this rank and wait until rank 0 has seen all ranks.

        Raises:
            RendezvousError: a rank is missing at the deadline.
            RanksError: two processes claim one rank, or the ranks have different world sizes or backends.
            PeerLost: rank 0 failed before all ranks were present.
        """
        ranks = self.ranks
        if store.add(f"claims/{ranks.rank}", 1) > 1:
            raise RanksError(
                f"two processes claim rank {ranks.rank}",
                hint=f"{ranks.init_file} is left from an earlier run, or two processes got the same rank"
                if ranks.init_file
                else "two nodes have the same NODE_RANK, or an earlier run still holds the port",
                next_step="name a new file" if ranks.init_file else "give every node its own NODE_RANK",
            )
        presence = {"world": ranks.world_size, "host": socket.gethostname(), "backend": backend}
        store.set(f"present/{ranks.rank}", json.dumps(presence))
        if ranks.is_zero:
            try:
                self._check_presence(store, backend)
            except TrainerError as error:
                store.set("verdict", json.dumps({"missing": isinstance(error, RendezvousError), "message": str(error)}))
                # The store stays up until all present ranks have read the verdict; else they only lose a connection.
                present = sum(store.check([f"present/{rank}"]) for rank in range(1, ranks.world_size))
                end = time.monotonic() + _VERDICT_READ
                while store.add("readers", 0) < present and time.monotonic() < end:
                    time.sleep(_POLL)
                raise
            store.set("verdict", "{}")
            return
        # Rank 0 decides at its own deadline; the margin lets its verdict, with the missing ranks, arrive.
        what = "rank 0's verdict on who is here"
        deadline = self.deadline + 15
        verdict = json.loads(wait_for_key(store, "verdict", deadline, what, stop=self.stop, heartbeat=self.heartbeat))
        if verdict:
            store.add("readers", 1)
            if verdict["missing"]:
                missing = RendezvousError(verdict["message"], hint="rank 0 stopped waiting")
                missing.cause = "peer"
                raise missing
            raise PeerLost(f"rank 0 left before all ranks were present: {verdict['message']}")

    def _check_presence(self, store: Store, backend: str) -> None:
        ranks, waiting = self.ranks, set(range(self.ranks.world_size))
        while True:
            for rank in [rank for rank in sorted(waiting) if store.check([f"present/{rank}"])]:
                waiting.discard(rank)
                theirs = json.loads(store.get(f"present/{rank}"))
                if theirs["world"] != ranks.world_size:
                    raise RanksError(
                        f"rank {rank} on {theirs['host']} has {theirs['world']} ranks, rank 0 has {ranks.world_size}",
                        next_step="give every node the same NNODES and NPROC_PER_NODE",
                    )
                if theirs["backend"] != backend:
                    raise RanksError(
                        f"rank {rank} on {theirs['host']} uses {theirs['backend']}, rank 0 {backend}",
                        hint="--device auto takes the CPU on a node with fewer GPUs than ranks",
                        next_step="give every node the same number of GPUs, or set --device",
                    )
            if not waiting:
                return
            if time.monotonic() > self.deadline:
                missing = RendezvousError(
                    f"missing {self._names(waiting)} of {ranks.world_size} ranks",
                    hint="their nodes have not started, cannot reach rank 0, or failed before the rendezvous",
                    next_step="look at the log of the first missing node",
                )
                missing.cause = "peer"  # a missing rank knows why it did not arrive
                raise missing
            self._poll(f"{self._names(waiting)} of {ranks.world_size} ranks")
            time.sleep(_POLL)

    def _wait_for_port(self) -> None:
        """Wait until the store accepts connections. Its name may not resolve yet: a pod's appears with its address."""
        ranks, pause, failed = self.ranks, 0.05, "no answer yet"
        while True:
            self._poll(f"rank 0 (node 0) at {ranks.master_addr}:{ranks.master_port}: {failed}")
            try:
                with socket.create_connection((ranks.master_addr, ranks.master_port), timeout=3) as connection:
                    # Both ends are one socket if the kernel picked the wanted port as the source port.
                    if connection.getsockname() == connection.getpeername():
                        raise ConnectionRefusedError("no process listens on this port")
                    return
            except OSError as error:
                failed = str(error)
                if time.monotonic() > self.deadline:
                    raise RendezvousError(
                        f"rank 0 (node 0) is missing: {ranks.master_addr}:{ranks.master_port} does not answer: {error}",
                        hint="the node of rank 0 has not started, or a network policy or firewall is in the way",
                        next_step="look at rank 0's log; check MASTER_ADDR and MASTER_PORT",
                    ) from error
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)

    def _names(self, waiting: set[int]) -> str:
        names = [f"rank {rank} (node {self.ranks.node_of(rank)})" for rank in sorted(waiting)]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    def _poll(self, what: str = "") -> None:
        """Check for a stop signal, and print after some time what the node waits for.

        Args:
            what: who is missing, and why if that is known; one rank of each node prints it.
        """
        self.stop.raise_if_requested("rendezvous")
        self.heartbeat.touch()
        now = time.monotonic()
        if what and now >= self._next_line and self.ranks.local_rank in (0, None):
            self._next_line = now + _NEXT_LINE
            seconds, limit = now - self._began, self.deadline - self._began
            print(f"waiting for {what} ({seconds:.0f} of {limit:.0f} s)", flush=True)


def wait_for_key(
    store: Store, key: str, deadline: float, what: str, *, stop: StopFlag | None, heartbeat: Heartbeat
) -> bytes:
    """Return the key's value as soon as it is set.

    Args:
        what: the meaning of the key, for error messages.
        stop: end the wait on a signal; None at the end of a run, when all ranks exit together anyway.

    Raises:
        PeerLost: a rank announced that it exits, or the store's host is gone.
        RendezvousError: ``deadline`` (of time.monotonic) passed.
        Stopped: a signal came.
    """
    pause = 0.002
    while not store.check([key]):
        heartbeat.touch()
        if store.check([EXIT_KEY]):
            exited = json.loads(store.get(EXIT_KEY))
            raise PeerLost(f"rank {exited['rank']} left: {exited['reason']}")
        if time.monotonic() > deadline:
            raise RendezvousError(f"timed out waiting for {what}", hint="that rank is stopped, slow or gone")
        if stop is not None:
            stop.raise_if_requested(f"waiting for {what}")
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    value: bytes = store.get(key)
    return value


def store_client(ranks: Ranks, seconds: float, on_poll: Callable[[], None] = lambda: None) -> Store:
    """Return a client of the store, whose port accepts connections.

    PyTorch waits for the store's first answer without a limit, so the wait is in another thread.

    Raises:
        RuntimeError: the connection failed, or the port does not answer as a store does within ``seconds``.
    """
    replies: queue.SimpleQueue[Store | RuntimeError] = queue.SimpleQueue()

    def connect() -> None:
        timeout = timedelta(seconds=seconds)
        try:
            replies.put(TCPStore(ranks.master_addr, ranks.master_port, wait_for_workers=False, timeout=timeout))
        except RuntimeError as error:
            replies.put(error)

    threading.Thread(target=connect, name="connect-store", daemon=True).start()
    deadline = time.monotonic() + seconds + _REPLY_TIMEOUT
    while True:
        try:
            reply = replies.get(timeout=0.1)
        except queue.Empty:
            on_poll()
            if time.monotonic() > deadline:
                raise RuntimeError("it accepts connections, but does not answer as a store does") from None
            continue
        if isinstance(reply, RuntimeError):
            raise reply
        return reply


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def announce_killed(ranks: Ranks, rank: int, reason: str, env: Mapping[str, str] = os.environ) -> None:
    """Announce in the store, for the launcher, that ``rank`` was killed. Never raises.

    Ranks of other nodes that poll the store have no connection to the killed rank that could break.
    """
    with contextlib.suppress(OSError, RuntimeError):
        # Without this check the store would retry for its whole timeout if rank 0 is gone, and delay the restart.
        socket.create_connection((ranks.master_addr, ranks.master_port), timeout=_REPLY_TIMEOUT).close()
        store = PrefixStore(key_prefix(env), store_client(ranks, _REPLY_TIMEOUT))
        store.set(EXIT_KEY, json.dumps({"rank": rank, "reason": reason[:500]}))
