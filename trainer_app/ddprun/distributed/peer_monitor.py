"""Notices that another node is gone while the ranks wait on a GPU, where nothing else would before the hang timeout.

gloo's connections break when a peer ends. A rank that waits for a kernel of NCCL learns nothing, and no connection
breaks if a whole machine fails. So one rank of each node writes a sign of life to rank 0's store, and reads the sign of
the next node: some requests per node and interval, at any number of nodes. ``worker`` starts it with NCCL.
"""

import json
import threading
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from ddprun.distributed.rendezvous import EXIT_KEY
from ddprun.distributed.topology import Ranks
from ddprun.errors import PeerLost
from ddprun.heartbeat import StallTimer

INTERVAL, SILENCE = 5.0, 30.0  # seconds between two signs of life, and without one until a node counts as lost


class PeerMonitor:
    """Two threads: the first talks to the store, which may never answer; the second notices that.

    Args:
        connect: returns a client of the store that no other thread uses; a client carries out one request at a time.
        lost: called with the reason, at most once by each thread.
    """

    def __init__(
        self,
        ranks: Ranks,
        connect: Callable[[], Store],
        lost: Callable[[PeerLost], None],
        *,
        interval: float = INTERVAL,
        silence: float = SILENCE,
    ) -> None:
        self._ranks, self._connect, self._lost = ranks, connect, lost
        self._interval, self._silence = interval, silence
        self._stopped = threading.Event()
        self._rounds = 0  # completed

    def start(self) -> None:
        """Start the threads."""
        for work in (self._talk, self._watch_store):
            threading.Thread(target=work, name="peer-monitor", daemon=True).start()

    def stop(self) -> None:
        """End the threads; the other nodes end theirs, too."""
        self._stopped.set()

    def _talk(self) -> None:
        node, following = self._ranks.node_rank, (self._ranks.node_rank + 1) % self._ranks.nnodes
        stall, seen, changes = StallTimer(self._interval), b"", 0
        try:
            store = self._connect()
            while not self._stopped.wait(self._interval):
                self._rounds += 1
                store.set(f"alive/{node}", str(self._rounds))
                if store.check([EXIT_KEY]):
                    exited = json.loads(store.get(EXIT_KEY))
                    self._report(f"rank {exited['rank']} left: {exited['reason']}")
                    return
                if not store.check([f"alive/{following}"]):
                    continue  # it has not begun
                newest = store.get(f"alive/{following}")
                seen, changes = newest, changes + (newest != seen)
                if stall.observe(changes) >= self._silence:
                    reason = f"node {following} has given no sign of life for {self._silence:g} s"
                    store.set(EXIT_KEY, json.dumps({"rank": following * self._ranks.nproc_per_node, "reason": reason}))
                    self._report(reason)
                    return
        except RuntimeError as error:  # every error of the store is one
            self._report(f"the store of rank 0 is gone: {str(error).partition(chr(10))[0][:200]}")

    def _watch_store(self) -> None:
        stall = StallTimer(self._interval)
        while not self._stopped.wait(self._interval):
            if stall.observe(self._rounds) >= self._silence + self._interval:
                self._report(f"the store of rank 0 has not answered for {self._silence:g} s")
                return

    def _report(self, reason: str) -> None:
        if not self._stopped.is_set():
            hint = "the machine, its network or the launcher of that node failed"
            self._lost(PeerLost(f"a peer was lost: {reason}", hint=hint))
