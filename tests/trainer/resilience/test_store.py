"""A wait for the store ends in time even if another program has its port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddptrain.distributed.rendezvous import announce_killed
from ddptrain.distributed.topology import Ranks
from tests.trainer.builders import SMALL
from tests.trainer.runs import PATIENCE, ForkServer


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


def test_announcing_a_killed_rank_ends_although_the_store_never_answers(silent_port: int) -> None:
    ranks = Ranks(nnodes=2, world_size=2, master_port=silent_port)
    thread = threading.Thread(target=announce_killed, args=(ranks, 0, "killed", {}), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
