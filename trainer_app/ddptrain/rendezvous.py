"""Where the ranks meet before a training: each signs in at the store, and rank 0 says who is missing.

``group`` calls ``meet`` with the store in hand; how the ranks reach it is ``store``. ``worker`` and ``infer`` ask here
how long to wait for the others.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable

from torch.distributed import Store  # type: ignore[attr-defined]

from ddptrain.breadcrumbs import Breadcrumbs
from ddptrain.errors import PeerLost, RanksError, RendezvousError, TrainerError
from ddptrain.ranks import Ranks
from ddptrain.stop import StopFlag
from ddptrain.store import wait_for_key

DEFAULT_TIMEOUT = 600.0  # seconds
_READING = 5.0  # seconds


def meet(store: Store, ranks: Ranks, deadline: float, stop: StopFlag, crumbs: Breadcrumbs) -> None:
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
            _await_all(store, ranks, deadline, stop, crumbs)
        except TrainerError as error:
            store.set("verdict", json.dumps({"missing": isinstance(error, RendezvousError), "message": str(error)}))
            _await_readers(store, ranks)
            raise
        store.set("verdict", "{}")
        return
    # Rank 0 decides at its own deadline; a little patience lets its verdict, with the names, arrive.
    what = "rank 0's verdict on who is here"
    verdict = json.loads(wait_for_key(store, "verdict", deadline + 15, what, stop=stop, crumbs=crumbs))
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


def _await_all(store: Store, ranks: Ranks, deadline: float, stop: StopFlag, crumbs: Breadcrumbs) -> None:
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
            stop.leave_if_requested("rendezvous")
            crumbs.touch()
            time.sleep(0.02)


def _named(missing: Iterable[int], ranks: Ranks) -> str:
    """``rank 2 (node 1), rank 3 (node 1)``, cut after eight."""
    missing = list(missing)
    names = [f"rank {r} (node {ranks.node_of(r)})" for r in missing[:8]]
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return ", ".join(names) + more


def timeout_of(rendezvous_conf: str) -> float:
    """Seconds out of torchrun's ``--rdzv-conf`` spelling, ``key=value,timeout=N``; 600 where it says nothing."""
    for part in rendezvous_conf.split(","):
        key, _, value = part.partition("=")
        if key.strip() == "timeout" and value.strip().replace(".", "", 1).isdecimal():
            return float(value)
    return DEFAULT_TIMEOUT
