"""A node that is gone is noticed by the others through the store, without a connection that breaks."""

from __future__ import annotations

import json
import os
import queue
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from ddprun.distributed.peer_monitor import PeerMonitor
from ddprun.distributed.process_group import Group
from ddprun.distributed.rendezvous import EXIT_KEY
from ddprun.distributed.topology import Ranks
from ddprun.errors import PeerLost
from ddprun.signals import StopFlag
from tests.ddptrain.runs import ForkServer, Run, wait_until

Lost = queue.Queue[tuple[int, PeerLost]]
Started = tuple[list[PeerMonitor], Lost]

SERVER = """
import signal
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""


def client(port: int) -> Callable[[], Store]:
    return lambda: TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=60))


def start(port: int, nodes: int, *, silence: float) -> Started:
    """Start the monitors of some nodes of two ranks each; the queue gets (node, why it counts a peer as lost)."""
    lost: Lost = queue.Queue()

    def put(node: int) -> Callable[[PeerLost], None]:
        return lambda error: lost.put((node, error))

    monitors = [
        PeerMonitor(Ranks(nodes, node, 2), client(port), put(node), interval=0.1, silence=silence)
        for node in range(nodes)
    ]
    for monitor in monitors:
        monitor.start()
    return monitors, lost


@pytest.fixture
def server(ddptrain: ForkServer, tmp_path: Path) -> Run:
    """A process that hosts a store, and prints its port."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return ddptrain.start(module=script)


def port_of(server: Run) -> int:
    return int(wait_until(lambda: server.output().endswith("\n") and server.output(), "the store's port"))


def test_a_silent_node_is_lost_for_all_others(server: Run) -> None:
    port = port_of(server)
    monitors, lost = start(port, 3, silence=2)
    client(port)().wait(["alive/0", "alive/1", "alive/2"], timedelta(seconds=60))
    monitors[1].stop()  # as if its machine had failed
    found = dict(lost.get(timeout=60) for _ in range(2))
    assert set(found) == {0, 2}
    assert all("node 1 has given no sign of life for 2 s" in str(error) for error in found.values())
    for monitor in monitors:
        monitor.stop()


def test_an_announced_exit_reaches_every_node(server: Run) -> None:
    port = port_of(server)
    monitors, lost = start(port, 2, silence=60)
    client(port)().set(EXIT_KEY, json.dumps({"rank": 3, "reason": "boom"}))
    found = dict(lost.get(timeout=60) for _ in range(2))
    assert {str(error) for error in found.values()} == {"a peer was lost: rank 3 left: boom"}
    for monitor in monitors:
        monitor.stop()


def test_a_rank_does_not_count_its_own_exit_as_a_lost_peer(server: Run) -> None:
    port = port_of(server)
    monitors, lost = start(port, 2, silence=60)
    store = client(port)()
    store.wait(["alive/0", "alive/1"], timedelta(seconds=60))
    group = Group(Ranks(2, 0, 2), torch.device("cpu"), store, StopFlag(), monitor=monitors[0])
    group.announce_exit("boom")  # rank 0 keeps the store up for some intervals of the monitor
    assert lost.get(timeout=60)[0] == 1
    assert lost.empty()
    monitors[1].stop()


def test_a_store_that_no_longer_answers_is_noticed(server: Run) -> None:
    monitors, lost = start(port_of(server), 2, silence=2)
    os.kill(server.pid, signal.SIGSTOP)
    _, error = lost.get(timeout=60)
    assert "the store of rank 0 has not answered for 2 s" in str(error)
    for monitor in monitors:
        monitor.stop()
    os.kill(server.pid, signal.SIGCONT)
