"""Measure restarts in place: a killed rank → the next life, on real ranks, and among many simulated launchers.

    python -m tests.benchmarks.in_place --kills 50
    python -m tests.benchmarks.in_place --kills 0 --killed-launchers 10
    python -m tests.benchmarks.in_place --kills 0 --launchers 512 2048

Ranks: two nodes of two ranks with gloo on this machine; random ranks are killed with SIGKILL. "forked" is when the last
rank of the next life begins, and is the launchers' share; the first step is the script's. With a killed launcher, node
1's, the times are until the ranks of node 0 have ended, and until its launcher has. Launchers: node 0's real agreement
and connections in this process, and in another process one connection for each other node, which answers at once. The
time is from a failure until each node has been told to start the next life.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ddprun.distributed.topology import Ranks
from ddprun.launcher.agreement import Agreement
from ddprun.launcher.life_messages import (
    Abort,
    Failed,
    Failure,
    Hello,
    Life,
    Message,
    Ready,
    Start,
    from_json,
    to_json,
)
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.peers import _HELLO, Peers, _Connection, _Handshake
from ddprun.reporting.http_port import ProgressPort
from tests.processes import free_port

SCRIPT = """
import os, sys, time
from pathlib import Path
begun = time.time()
import torch
import torch.distributed as dist

folder, rank, life = Path(sys.argv[1]), os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = folder / "step"
step, done, goes_on = int(saved.read_text().split()[0]) if saved.exists() else 0, 0, torch.ones(1)
while goes_on:
    model(torch.ones(8, 4)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    step, done = step + 1, done + 1
    if rank == "0":
        (folder / "new").write_text(f"{step} {done} {life}")
        (folder / "new").rename(saved)
        goes_on[0] = 0 if (folder / "go").exists() else 1
    if done == 1:
        (folder / "tmp").with_suffix(rank).write_text(f"{begun} {time.time()} {os.getpid()}")
        (folder / "tmp").with_suffix(rank).rename(folder / f"life-{life}.rank-{rank}")
    dist.broadcast(goes_on, 0)
    time.sleep(0.01)
dist.destroy_process_group()
""".replace("with_suffix(rank)", "with_suffix('.' + rank)")
RANKS = 4
_PATIENCE = 120.0


def killed_ranks(kills: int) -> tuple[list[float], list[float]]:
    """Return the seconds from each kill to the last fork, and to the first step of all ranks."""
    with _two_nodes() as (folder, nodes):
        return _kill(folder, kills, nodes)


def killed_launcher() -> tuple[float, float]:
    """Return the seconds from the kill of node 1's launcher until node 0's ranks have ended, and its launcher."""
    with _two_nodes() as (folder, nodes):
        paths = [folder / f"life-0.rank-{rank}" for rank in range(RANKS)]
        _until(partial(_all_exist, paths), folder)
        _until(lambda: "all 2 launchers take part" in (folder / "node-0.log").read_text(), folder)
        ranks = [Path("/proc", path.read_text().split()[2]) for path in paths[:2]]
        killed = time.monotonic()
        nodes[1].kill()
        _until(lambda: not any(rank.exists() for rank in ranks), folder)
        ended = time.monotonic() - killed
        nodes[0].wait(_PATIENCE)
        return ended, time.monotonic() - killed


@contextmanager
def _two_nodes() -> Iterator[tuple[Path, Sequence[subprocess.Popen[bytes]]]]:
    """Start the launchers of two nodes, and provide their folder."""
    with tempfile.TemporaryDirectory(prefix="ddpjob-in-place-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        env = {
            **os.environ, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(free_port()), "DDPJOB_PROGRESS_PORT": str(free_port()), "DDPJOB_UID": "uid",
            "DDPJOB_ATTEMPT": "1", "DDPJOB_INPLACE_RESTARTS": "1000",
        }  # fmt: skip
        nodes = [
            subprocess.Popen(
                [sys.executable, "-m", "ddprun", str(folder / "train.py"), name],
                env=env | {"PET_NODE_RANK": str(node), "DDPJOB_TERMINATION_LOG": str(folder / f"end-{node}")},
                stdout=(folder / f"node-{node}.log").open("wb"), stderr=subprocess.STDOUT,
            )
            for node in (0, 1)
        ]  # fmt: skip
        try:
            yield folder, nodes
        finally:
            for node in nodes:
                node.kill()
                node.wait()


def _kill(folder: Path, kills: int, nodes: Sequence[subprocess.Popen[bytes]]) -> tuple[list[float], list[float]]:
    draw, forked, stepped, victims, killed = random.Random(5), list[float](), list[float](), list[int](), 0.0
    most = 8
    _until(lambda: "all 2 launchers take part" in (folder / "node-0.log").read_text(), folder)
    for life in range(kills + 1):
        paths = [folder / f"life-{life}.rank-{rank}" for rank in range(RANKS)]
        _until(partial(_all_exist, paths), folder)
        times = [path.read_text().split() for path in paths]
        if life:
            forked.append(max(float(begun) for begun, _, _ in times) - killed)
            stepped.append(max(float(step) for _, step, _ in times) - killed)
        if life == kills:
            break
        _until(partial(_has_made, folder / "step", life, most), folder)
        victims.append(draw.randrange(RANKS))
        killed = time.time()
        os.kill(int(times[victims[-1]][2]), signal.SIGKILL)
        most = int((folder / "step").read_text().split()[1]) + 2  # one step may be under way
    (folder / "go").touch()
    codes = [node.wait(_PATIENCE) for node in nodes]
    said = re.findall(r"^restart in place .*: rank (\d+) was killed", (folder / "node-0.log").read_text(), re.M)
    right = sum(victim == int(blamed) for victim, blamed in zip(victims, said, strict=False))
    print(f"{kills} kills: exit codes {codes}, {len(said)} restarts in place, the killed rank blamed in {right}")
    return forked, stepped


def _all_exist(paths: Sequence[Path]) -> bool:
    return all(path.exists() for path in paths)


def _has_made(saved: Path, life: int, steps: int) -> bool:
    """Return whether the life has made more steps than that; more than in any life before are progress."""
    _, done, of_life = map(int, saved.read_text().split())
    return of_life == life and done > steps


def _until(condition: Callable[[], bool], folder: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("".join(path.read_text() for path in folder.glob("*.log")))
        time.sleep(0.005)


class _Node:
    """The connection of one simulated launcher, which answers at once."""

    def __init__(self, node: int, number: int, secret: bytes, life: Life, selector: selectors.DefaultSelector) -> None:
        self._node, self._secret, self._life, self.is_admitted = node, secret, life, False
        self.connection = _Connection(socket.create_connection(("127.0.0.1", number), 60), selector)
        self.connection.send({_HELLO: node, "asks": "1"})

    def say(self, message: Message) -> None:
        self.connection.send({"life": to_json(message)})

    def handle(self) -> bool:
        """Answer what has come; return whether it was the start of a life."""
        starts = False
        for message in self.connection.messages():
            if "asks" in message:
                handshake = _Handshake(self._secret, self._node, "1", message["asks"])
                self.connection.send({"proof": handshake.proof("node")})
                self.connection.admit(handshake.keys("node"))
                self.say(Hello(self._life, f"boot-{self._node}"))
                self.is_admitted = True
            match from_json(message.get("life")):
                case Abort():
                    self.say(Ready(self._life, healthy=True, failure=None))
                case Start():
                    starts = True
        return starts


def _simulated(number: int, secret: bytes, life: Life, count: int, shared: tuple[Any, Any]) -> None:
    go, done = shared
    with selectors.DefaultSelector() as selector:
        nodes: dict[_Connection, _Node] = {}

        def handle(timeout: float | None) -> int:
            return sum(nodes[key.data].handle() for key, _ in selector.select(timeout))

        for node in range(1, count):
            one = _Node(node, number, secret, life, selector)
            nodes[one.connection] = one
            while not one.is_admitted:
                handle(None)
        while not go.is_set():
            handle(0.05)
        began, left = time.monotonic(), count - 1
        first = next(iter(nodes.values()))
        first.say(Failed(life, Failure(137, "own", "Killed", None, 1, 3, "rank 1 was killed by SIGKILL")))
        while left:
            left -= handle(None)
        done.put(time.monotonic() - began)


def many_launchers(count: int) -> float:
    """Return the seconds from a failure on one of ``count`` nodes until all were told to start the next life."""
    ranks, number = Ranks(nnodes=count, world_size=count), free_port()
    peers = Peers(ranks, number, token="of the attempt")
    agreement = Agreement(ranks, peers, 5, NodeProgress(count))
    port = ProgressPort(number, dict, peers.takes)
    context = multiprocessing.get_context("fork")
    go, done = context.Event(), context.Queue()
    life = Life(peers.group_id, os.environ.get("DDPJOB_ATTEMPT", ""))
    others = context.Process(target=_simulated, args=(number, peers._secret, life, count, (go, done)))
    others.start()
    with selectors.DefaultSelector() as selector:
        selector.register(port, selectors.EVENT_READ, port)
        selector.register(peers, selectors.EVENT_READ, peers)
        while others.is_alive():
            for key, _ in selector.select(0.05):
                key.data.handle()
            peers.handle()
            if agreement.turn([]):
                agreement.ended(healthy=True, failure=None)
            if not agreement.missing:
                go.set()
    port.close()
    return float(done.get(timeout=10))


def _shown(values: Sequence[float]) -> str:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
    return (
        f"median {statistics.median(ordered) * 1000:.0f} ms, p95 {p95 * 1000:.0f} ms, max {ordered[-1] * 1000:.0f} ms"
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--killed-launchers", type=int, default=0)
    parser.add_argument("--launchers", type=int, nargs="*", default=[])
    options = parser.parse_args()
    if options.kills:
        forked, stepped = killed_ranks(options.kills)
        print(f"killed rank → all ranks of the next life forked: {_shown(forked)}")
        print(f"killed rank → first step of the next life: {_shown(stepped)}")
    if options.killed_launchers:
        ended, left = zip(*(killed_launcher() for _ in range(options.killed_launchers)), strict=True)
        print(f"killed launcher → the ranks of the other node have ended: {_shown(ended)}")
        print(f"killed launcher → the other launcher has ended: {_shown(left)}")
    for count in options.launchers:
        print(f"{count} launchers: failure → all told to start: {many_launchers(count) * 1000:.0f} ms")


if __name__ == "__main__":
    main()
