"""Where another program has the port of the store, nobody waits for it for ever."""

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
    """A port where connections are taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_takes_connections_and_says_nothing_is_refused_in_time_and_named(
    ddptrain: ForkServer, idx: Path, silent_port: int
) -> None:
    place = ("--init", f"tcp://127.0.0.1:{silent_port}", "--rank", 1, "--world-size", 2)
    run = ddptrain.run("train", *SMALL, "--data-dir", idx, *place, "--rendezvous-timeout", 1, code=69)
    assert f"cannot join the store at 127.0.0.1:{silent_port}" in run.message()["message"]
    assert "another program has that port" in run.output()


def test_a_launcher_that_speaks_for_a_killed_rank_waits_for_no_answer(silent_port: int) -> None:
    ranks = Ranks(nnodes=2, world_size=2, master_port=silent_port)
    speaking = threading.Thread(target=announce_killed, args=(ranks, 0, "killed", {}), daemon=True)
    speaking.start()
    speaking.join(PATIENCE)
    assert not speaking.is_alive()
