"""``GET /ranks``: the rows of all nodes, and an answer that a client takes slowly."""

from __future__ import annotations

import contextlib
import json
import socket
import time

from ddprun.diagnostics import Diagnostics
from ddprun.distributed.topology import Ranks
from ddprun.heartbeat import Heartbeat, HeartbeatRecord
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.peers import Peers
from ddprun.launcher.rank_table import MOST_RANKS, NodeRanks, _Pace
from ddprun.reporting.http_port import ProgressPort
from ddprun.step_parts import StepSums
from tests.processes import free_port

ROW = {
    "rank": 8, "step": 3, "phase": "train", "collective": "all_reduce", "ageSeconds": 0.5, "stepSeconds": None,
    "dataWaitSeconds": 0.25, "memoryBytes": 2**30,
}  # fmt: skip


def a_table(nodes: int) -> tuple[NodeRanks, Peers]:
    ranks = Ranks(nnodes=nodes, nproc_per_node=8, world_size=8 * nodes)
    peers = Peers(ranks, None)
    return NodeRanks(ranks, peers, NodeProgress(ranks.world_size)), peers


def test_rows_of_other_nodes_grow_older() -> None:
    table, peers = a_table(3)
    peers.rank_rows[1] = (time.monotonic() - 10, [ROW])
    answer = table.answer()
    assert answer["ranks"][0] == ROW | {"node": 1, "parts": None, "ageSeconds": answer["ranks"][0]["ageSeconds"]}
    assert 10.5 <= answer["ranks"][0]["ageSeconds"] < 15
    assert (answer["schema"], answer["worldSize"], answer["missingNodes"]) == (1, 24, [0, 2])


def test_ranks_of_a_node_that_has_left_are_not_compared_any_more() -> None:
    table, peers = a_table(2)
    peers.steps += [(rank, ([StepSums(8, 1.0)], [])) for rank in (7, 8, 15)]
    peers.left.append(1)
    table.turn()
    assert table._slow._records.keys() == {7}


def test_an_answer_is_bounded_and_a_slow_client_delays_no_other() -> None:
    nodes = MOST_RANKS // 8 + 10
    table, peers = a_table(nodes)
    for node in range(1, nodes):
        peers.rank_rows[node] = (time.monotonic(), [ROW | {"rank": 8 * node + local} for local in range(8)])
    number = free_port()
    port = ProgressPort(number, lambda: {"step": 7}, ranks=table.answer)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", number))
    slow.sendall(b"GET /ranks HTTP/1.0\r\n\r\n")
    port.handle(1.0)  # begins the long answer
    with contextlib.closing(port), contextlib.closing(slow):
        quick = socket.create_connection(("127.0.0.1", number))
        quick.sendall(b"GET /progress HTTP/1.0\r\n\r\n")
        port.handle(1.0)
        port.handle(1.0)
        assert quick.recv(4096).endswith(b'{"step": 7}')
        received = b""
        slow.setblocking(False)
        while True:
            port.handle(0.0)
            with contextlib.suppress(BlockingIOError):
                if not (data := slow.recv(4096)):
                    break
                received += data
        answer = json.loads(received.partition(b"\r\n\r\n")[2])
    assert (len(answer["ranks"]), answer["omittedRanks"]) == (MOST_RANKS, 8 * (nodes - 1) - MOST_RANKS)
    assert len(received) < 600_000


def test_the_speed_and_the_wait_for_data_are_those_of_the_last_seconds() -> None:
    pace = _Pace()
    assert (pace.per_second, pace.data_wait) == (None, None)
    for step in range(1, 100):
        pace.observe(HeartbeatRecord(step=step, time=step * 0.5))
    assert pace.per_second == 2.0
    assert pace.data_wait is None, "no DataLoader is used"
    for step in range(100, 200):
        pace.observe(HeartbeatRecord(step=step, time=50 + (step - 100) * 2.0, waited=(step - 99) * 1.5))
        pace.observe(HeartbeatRecord(step=step, time=99.0, waited=9.0))  # no step, so no change
    assert (pace.per_second, pace.data_wait) == (0.5, 1.5)
    pace.observe(HeartbeatRecord(step=200, time=251.0, waited=300.0))
    assert pace.per_second is not None
    assert pace.data_wait == 1 / pace.per_second, "no more than the step takes"
    pace.observe(HeartbeatRecord(step=1, time=500.0, waited=0.1))
    assert (pace.per_second, pace.data_wait) == (None, None), "a new life"


def test_the_next_mark_records_the_wait_for_data_which_is_no_sign_of_life() -> None:
    files = Diagnostics.create(0)
    heartbeat = Heartbeat(files.memory())
    heartbeat.mark("train", 5)
    before = files.last_heartbeat()
    heartbeat.data_wait += 0.5
    heartbeat.data_wait += 0.25
    assert files.last_heartbeat() == before
    assert heartbeat.count(6, time.monotonic())
    assert (files.last_heartbeat().step, files.last_heartbeat().waited) == (6, 0.0), "a quick step only counts"
    heartbeat.data_wait += 0.5
    heartbeat.mark("train", 7)
    assert (files.last_heartbeat().waited, heartbeat.data_wait) == (1.25, 0.0)
    heartbeat.mark("train", 8)
    assert files.last_heartbeat().waited == 1.25, "recorded once"
    files.close()
