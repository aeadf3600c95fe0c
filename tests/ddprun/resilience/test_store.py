"""A wait for the store ends in time even if another program has its port."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddprun.distributed.rendezvous import announce_killed
from ddprun.distributed.topology import Ranks
from tests.ddptrain.builders import SMALL
from tests.ddptrain.runs import PATIENCE, ForkServer


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_never_answers_is_named_in_time(ddptrain: ForkServer, idx: Path, silent_port: int) -> None:
    place = ("--init", f"tcp://127.0.0.1:{silent_port}", "--rank", 1, "--world-size", 2)
    run = ddptrain.run("train", *SMALL, "--data-dir", idx, *place, "--rendezvous-timeout", 1, code=69)
    assert f"cannot join the store at 127.0.0.1:{silent_port}" in run.message()["message"]
    assert "another program has that port" in run.output()


def test_a_rank_that_connects_to_itself_waits_for_rank_zero() -> None:
    # With two ephemeral ports, the kernel takes the wanted port as the source port of the connection.
    network = "ip link set lo up && echo 40000 40001 > /proc/sys/net/ipv4/ip_local_port_range"
    train = f"exec {sys.executable} -m ddptrain train --data digits --init tcp://127.0.0.1:40000"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{network} && {train} --rank 1 --world-size 2 --rendezvous-timeout 1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert "rank 0 (node 0) is missing: 127.0.0.1:40000 does not answer" in done.stderr
    assert done.returncode == 69


def test_announcing_a_killed_rank_ends_although_the_store_never_answers(silent_port: int) -> None:
    ranks = Ranks(nnodes=2, world_size=2, master_port=silent_port)
    thread = threading.Thread(target=announce_killed, args=(ranks, 0, "killed", {}), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
