"""Where the ranks meet before a training: each signs in at the store, and rank 0 says who is missing.

``group`` calls ``meet`` with the store in hand; how the ranks reach it is ``store``. ``worker`` and ``infer`` ask here
how long to wait for the others.

The store through which ranks reach each other: hosted by rank 0 at MASTER_ADDR:MASTER_PORT, or a file.

``rendezvous`` has the ranks meet in it, ``group`` exchanges data and last words over it, and ``launch`` speaks there
for a rank that was killed. Whatever may wait long waits by polling, so that SIGTERM and a peer's death are noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from ddptrain.distributed.topology import Ranks
from ddptrain.errors import PeerLost, RanksError, RendezvousError, TrainerError
from ddptrain.heartbeat import Heartbeat
from ddptrain.signals import StopFlag

DEFAULT_TIMEOUT = 600.0  # seconds
_READING = 5.0  # seconds


def meet(store: Store, ranks: Ranks, deadline: float, stop: StopFlag, heartbeat: Heartbeat) -> None:
    """Each rank signs in; rank 0 waits for all and tells the verdict to everybody."""
    presence = json.dumps({"world": ranks.world_size, "host": socket.gethostname()})
    if store.add(f"claims/{ranks.rank}", 1) > 1:
        raise RanksError(
            f"two processes claim rank {ranks.rank}",
            hint=f"{ranks.init_file} is left from an earlier run, or two were given one number"
            if ranks.init_file
            else "two nodes have the same NODE_RANK, or an earlier run still holds the port",
            next_step="name a fresh file" if ranks.init_file else "give every node its own NODE_RANK",
        )
    store.set(f"present/{ranks.rank}", presence)
    if ranks.is_zero:
        try:
            _await_all(store, ranks, deadline, stop, heartbeat)
        except TrainerError as error:
            store.set("verdict", json.dumps({"missing": isinstance(error, RendezvousError), "message": str(error)}))
            _await_readers(store, ranks)
            raise
        store.set("verdict", "{}")
        return
    # Rank 0 decides at its own deadline; a little patience lets its verdict, with the names, arrive.
    what = "rank 0's verdict on who is here"
    verdict = json.loads(wait_for_key(store, "verdict", deadline + 15, what, stop=stop, heartbeat=heartbeat))
    if verdict:
        store.add("readers", 1)
        if verdict["missing"]:
            raise RendezvousError(verdict["message"], hint="rank 0 gave up waiting")
        raise PeerLost(f"rank 0 left before all had met: {verdict['message']}")


def _await_readers(store: Store, ranks: Ranks) -> None:
    """Keep the store up until all who signed in have read the verdict: without it they only see rank 0 vanish."""
    present = sum(store.check([f"present/{rank}"]) for rank in range(1, ranks.world_size))
    end = time.monotonic() + _READING
    while store.add("readers", 0) < present and time.monotonic() < end:
        time.sleep(0.02)


def _await_all(store: Store, ranks: Ranks, deadline: float, stop: StopFlag, heartbeat: Heartbeat) -> None:
    waiting = set(range(ranks.world_size))
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"present/{rank}"]):
                waiting.discard(rank)
                theirs = json.loads(store.get(f"present/{rank}"))
                if theirs["world"] != ranks.world_size:
                    raise RanksError(
                        f"rank {rank} on {theirs['host']} counts {theirs['world']} ranks, rank 0 {ranks.world_size}",
                        next_step="give every node the same NNODES and NPROC_PER_NODE",
                    )
        if waiting and time.monotonic() > deadline:
            raise RendezvousError(
                f"missing {_named(sorted(waiting), ranks)} of {ranks.world_size} ranks",
                hint="their pods have not started, cannot reach rank 0, or failed before they could sign in",
                next_step="look at the log of the first missing node",
            )
        if waiting:
            stop.raise_if_requested("rendezvous")
            heartbeat.touch()
            time.sleep(0.02)


def _named(missing: Iterable[int], ranks: Ranks) -> str:
    """``rank 2 (node 1), rank 3 (node 1)``, cut after eight."""
    missing = list(missing)
    names = [f"rank {r} (node {ranks.node_of(r)})" for r in missing[:8]]
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return ", ".join(names) + more


def parse_rendezvous_timeout(rendezvous_conf: str) -> float:
    """Seconds out of torchrun's ``--rdzv-conf`` spelling, ``key=value,timeout=N``; 600 where it says nothing."""
    for part in rendezvous_conf.split(","):
        key, _, value = part.partition("=")
        if key.strip() == "timeout" and value.strip().replace(".", "", 1).isdecimal():
            return float(value)
    return DEFAULT_TIMEOUT


LEFT = "left"  # key under which a failing rank says that it is not coming
_TELLING = 2.0  # seconds


def connect(ranks: Ranks, deadline: float, stop: StopFlag, heartbeat: Heartbeat, env: Mapping[str, str]) -> Store:
    """The store: hosted by rank 0 (by torchrun's agent under torchrun), joined by the others."""
    if ranks.init_file:
        return _file_store(ranks)
    hosts = ranks.is_zero and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _await_port(ranks, deadline, stop, heartbeat)
        return _joined(ranks, deadline, stop, heartbeat)
    try:
        return TCPStore(
            # The host listens on every address; its own DNS name may be the last to resolve.
            "localhost",
            ranks.master_port,
            is_master=True,
            wait_for_workers=False,
            timeout=_until(deadline),
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"rank 0 cannot listen on port {ranks.master_port}: {_reason(error)}",
            hint="another process has the port, perhaps an earlier run that still ends",
            next_step="choose another MASTER_PORT",
        ) from error


def _joined(ranks: Ranks, deadline: float, stop: StopFlag, heartbeat: Heartbeat) -> Store:
    """A client of the store whose port accepts connections."""
    told = _dial(ranks, _until(deadline))
    while True:
        try:
            found = told.get(timeout=0.1)
        except queue.Empty:
            stop.raise_if_requested("rendezvous")
            heartbeat.touch()
            if time.monotonic() <= deadline + _TELLING:
                continue
            found = RuntimeError("it accepts connections, but does not answer as a store does")
        if isinstance(found, Store):
            return found
        raise RendezvousError(
            f"cannot join the store at {ranks.master_addr}:{ranks.master_port}: {_reason(found)}",
            hint="another program has that port there, or a proxy answers in the place of a host that is gone",
            next_step="check MASTER_ADDR; choose another MASTER_PORT",
        ) from found


def _dial(ranks: Ranks, patience: timedelta) -> queue.SimpleQueue[Store | RuntimeError]:
    """The client, or why there is none, as soon as that is known: where another program has the port, perhaps never.

    PyTorch waits for the first answer of the store without any limit, so that the wait must be somebody else's.
    """
    told: queue.SimpleQueue[Store | RuntimeError] = queue.SimpleQueue()

    def dial() -> None:
        try:
            told.put(TCPStore(ranks.master_addr, ranks.master_port, wait_for_workers=False, timeout=patience))
        except RuntimeError as error:
            told.put(error)

    threading.Thread(target=dial, name="dial", daemon=True).start()
    return told


def _until(deadline: float) -> timedelta:
    return timedelta(seconds=max(1.0, deadline - time.monotonic()))


def _reason(error: RuntimeError) -> str:
    return str(error).partition("\n")[0][:300]


def _file_store(ranks: Ranks) -> Store:
    """A file as meeting place: on one machine, or on a volume that all share and that knows locks."""
    try:
        Path(ranks.init_file).touch()  # the store itself would wait, without a word, for a directory that is not there
    except OSError as error:
        raise RendezvousError(
            f"cannot meet at file://{ranks.init_file}: {error.strerror}",
            next_step="name a file that every rank can write, fresh for every start",
        ) from error
    return FileStore(ranks.init_file, ranks.world_size)


def _await_port(ranks: Ranks, deadline: float, stop: StopFlag, heartbeat: Heartbeat) -> None:
    """Until the store's host accepts connections. Its name may not resolve yet: a pod's appears with its address."""
    pause, last = 0.05, "nothing tried"
    while True:
        stop.raise_if_requested("rendezvous")
        heartbeat.touch()
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


def job_key(env: Mapping[str, str]) -> str:
    """Keeps two jobs that meet at one port, or two lives of one job, from reading each other's keys."""
    parts = (
        env.get(k, "") for k in ("DDPJOB_UID", "DDPJOB_ATTEMPT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    )
    return "ddptrain/" + "/".join(parts)


def wait_for_key(
    store: Store, key: str, deadline: float, what: str, *, stop: StopFlag | None, heartbeat: Heartbeat
) -> bytes:
    """The key's value as soon as it is set.

    Args:
        stop: leave on a signal; None at the end of a run, where all ranks leave together anyway.

    Raises:
        PeerLost: a rank announced that it leaves, or the store's host is gone.
        RendezvousError: ``deadline`` (of time.monotonic) passed.
        Stopped: a signal came.
    """
    pause = 0.002
    while not store.check([key]):
        heartbeat.touch()
        if store.check([LEFT]):
            left = json.loads(store.get(LEFT))
            raise PeerLost(f"rank {left['rank']} left: {left['reason']}")
        if time.monotonic() > deadline:
            raise RendezvousError(f"waited in vain for {what}", hint="that rank is stopped, slow or gone")
        if stop is not None:
            stop.raise_if_requested(f"waiting for {what}")
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    value: bytes = store.get(key)
    return value


def announce_killed(ranks: Ranks, rank: int, reason: str, env: Mapping[str, str] = os.environ) -> None:
    """For the launcher: say of a rank that was killed what it cannot say itself. Never raises.

    Ranks of other nodes that poll the store, waiting for its data or its word, have no connection that breaks.
    """
    with contextlib.suppress(OSError, RuntimeError, queue.Empty):
        # The store itself would retry for its whole timeout where rank 0 is gone, and hold up the restart.
        socket.create_connection((ranks.master_addr, ranks.master_port), timeout=_TELLING).close()
        found = _dial(ranks, timedelta(seconds=_TELLING)).get(timeout=2 * _TELLING)
        if isinstance(found, Store):
            PrefixStore(job_key(env), found).set(LEFT, json.dumps({"rank": rank, "reason": reason[:500]}))
