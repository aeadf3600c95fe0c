"""The connections between launchers: who is admitted, what a stranger can do, and messages of restarts in place."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddprun.distributed.topology import Ranks
from ddprun.launcher import peers
from ddprun.launcher.life_messages import Alive, Hello, to_json
from ddprun.launcher.lives import Connected, Lost, Received
from ddprun.launcher.peers import VERSION, Peers, take_token
from ddprun.reporting.http_port import ProgressPort
from tests.ddprun.launcher_messages import Relay, Speaker, group_secret
from tests.ddptrain.runs import ForkServer, wait_until
from tests.processes import free_port

LIFE = 1
HELLO = Received(Hello(LIFE, "boot"), 1)


class TwoNodes:
    """The launchers of nodes 0 and 1 as objects of this process, connected over a real port."""

    def __init__(
        self,
        *,
        uid: str = "a random uid",
        other_uid: str | None = None,
        attempt: str = "1",
        token: str = "a random token",  # noqa: S107 - of a test
        other_token: str | None = None,
        versions: tuple[int, int] = (VERSION, VERSION),
        alter: Callable[[str, bytes], list[bytes]] | None = None,
    ) -> None:
        self.number, self.versions = free_port(), versions
        self.relay = Relay(self.number, alter) if alter else None
        with pytest.MonkeyPatch.context() as env:
            env.setenv("DDPJOB_UID", uid)
            env.setenv("DDPJOB_ATTEMPT", "1")
            self.leader = Peers(Ranks(nnodes=2, world_size=2), self.number, token)
            env.setenv("DDPJOB_UID", uid if other_uid is None else other_uid)
            env.setenv("DDPJOB_ATTEMPT", attempt)
            ranks = Ranks(nnodes=2, node_rank=1, world_size=2)
            reached = self.relay.port if self.relay else self.number
            self.node = Peers(ranks, reached, token if other_token is None else other_token)
        self.port = ProgressPort(self.number, dict, self.leader.takes)

    def close(self) -> None:
        self.port.close()
        if self.relay:
            self.relay.close()

    def turn(self) -> None:
        select.select([self.port, self.leader, self.node], [], [], 0.01)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peers, "VERSION", self.versions[0])
            self.port.handle()
            self.leader.handle()
            patch.setattr(peers, "VERSION", self.versions[1])
            self.node.handle()
        if self.relay:
            self.relay.turn()

    def until_connected(self) -> None:
        def connected() -> bool:
            self.turn()
            return not (self.leader.is_alone or self.node.is_alone)

        wait_until(connected, "the two launchers to be connected")

    def turns(self, number: int = 20) -> None:
        for _ in range(number):
            self.turn()

    def received(self) -> list[object]:
        """Return what the leader has received since."""
        found = list(self.leader.life_events)
        self.leader.life_events.clear()
        return found


@pytest.fixture
def two() -> Iterator[TwoNodes]:
    nodes = TwoNodes()
    yield nodes
    nodes.close()


def test_messages_reach_the_other_side_and_a_lost_connection_is_made_again(two: TwoNodes) -> None:
    two.until_connected()
    two.node.say(HELLO.message)
    two.leader.say(Alive(LIFE), 1)
    wait_until(lambda: two.turn() or (two.leader.life_events and len(two.node.life_events) > 1), "both messages")
    assert two.received() == [HELLO]
    assert list(two.node.life_events) == [Connected(), Received(Alive(LIFE), 0)]
    two.node.life_events.clear()
    two.leader._nodes[1].close()
    wait_until(lambda: two.turn() or Connected() in two.node.life_events, "a new connection")
    two.until_connected()
    assert list(two.node.life_events) == [Lost(0), Connected()]
    assert two.received() == [Lost(1)]


@pytest.mark.parametrize(
    "other",
    [
        {"other_uid": "another uid", "token": ""}, {"attempt": "2", "token": ""},
        {"other_token": "another token"}, {"other_token": ""}, {"token": "", "other_token": "a token"},
    ],
)  # fmt: skip
def test_launcher_of_another_job_or_attempt_is_refused(other: dict[str, str]) -> None:
    two = TwoNodes(**other)

    def tried() -> bool:
        two.turn()
        assert two.leader.is_alone and two.node.is_alone
        return not two.node._proving and two.node._found is not None and two.node._delay > 0.3

    wait_until(tried, "an attempt to connect, and its end")
    assert not two.leader.life_events and not two.node.life_events
    two.close()


def test_launcher_of_another_version_is_refused() -> None:
    two = TwoNodes(versions=(VERSION, VERSION + 1))
    wait_until(lambda: two.turn() or two.node._delay > 0.3, "an attempt to connect, and its end")
    assert two.leader.is_alone and two.node.is_alone and not two.leader.life_events
    two.close()


def test_connection_to_an_address_that_does_not_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_CONNECTING", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, contextlib.ExitStack() as others:
        # The kernel drops the first packet of each connection for which the queue of the listener has no place.
        address = silent.getsockname()
        for _ in range(4):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(address)
        node = Peers(Ranks(nnodes=2, node_rank=1, world_size=2), address[1])
        tried: set[socket.socket] = set()

        def tries() -> bool:
            select.select([node], [], [], 0.01)
            node.handle()
            if node._connecting:
                assert len(select.select([], [node._connecting], [], 0)[1]) == 0, "the address answers"
                tried.add(node._connecting)
            return len(tried) > 2

        wait_until(tries, "three attempts to connect", 60)  # the kernel gives up one after 127 s
        assert node._delay >= 8 * peers._FIRST_DELAY


def a_stranger(two: TwoNodes) -> socket.socket:
    return socket.create_connection(("127.0.0.1", two.number), 5)


def test_what_a_stranger_has_recorded_proves_nothing_later(two: TwoNodes) -> None:
    sent: list[bytes] = []
    send = socket.socket.send

    class Recorded(socket.socket):
        def send(self, data: bytes, *flags: int) -> int:  # type: ignore[override]
            sent.append(bytes(data))
            return send(self, data, *flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddprun.launcher.peers.socket.socket", Recorded)
        two.until_connected()
        two.node.say(HELLO.message)
        two.turns()
    assert two.received() == [HELLO]
    lines = b"".join(sent).splitlines(keepends=True)
    of_leader = next(line for line in lines if b"asks" in line and b"proof" in line)
    hello, *others = [line for line in lines if line != of_leader]
    assert b"ddprun-launcher" in hello and len(others) == 3  # proof, state, message
    assert b"a random" not in b"".join(sent)
    with a_stranger(two) as stranger:
        stranger.sendall(hello)
        two.turns()
        with contextlib.suppress(OSError):
            stranger.sendall(b"".join(others))
        two.turns()
    assert two.received() == [] and not two.leader.is_alone


@pytest.mark.parametrize(
    "said",
    [
        b"\x00" * 100, b"GET /progress", b"{" * 20_000, b"[]\n", b'{"ddprun-launcher": 1}\n',
        b'{"ddprun-launcher": 1, "asks": "1"}\n{"proof": ""}\n',
        b'{"ddprun-launcher": 1, "asks": "1"}\n' + b"x" * 99_999,
        b'{"ddprun-launcher": 1, "asks": "1"}\n{"life": {"message": "failed"}}\n',
    ],
    ids=lambda said: f"{len(said)}-bytes",
)  # fmt: skip
def test_stranger_changes_nothing(two: TwoNodes, said: bytes) -> None:
    two.until_connected()
    with a_stranger(two) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(said)
            two.turns(5)
            stranger.sendall(said)
        two.turns(5)
    two.node.say(HELLO.message)
    wait_until(lambda: two.turn() or two.leader.life_events, "the message")
    assert two.received() == [HELLO]


@pytest.mark.parametrize(
    "proof",
    ['"wrong"', '"\\ud800"', '"\u00e9"', "null", "1e999", "[" * 900 + "]" * 900],
    ids=lambda text: ascii(text[:8]),
)
def test_stranger_who_proves_nothing_is_refused(two: TwoNodes, proof: str) -> None:
    two.until_connected()
    with a_stranger(two) as stranger:
        stranger.sendall(b'{"ddprun-launcher": 1, "asks": "\\ud800"}\n')
        wait_until(lambda: two.turn() or two.leader._proving, "the leader to ask")
        stranger.sendall(f'{{"proof": {proof}, "asks": {proof}}}\n'.encode())
        wait_until(lambda: two.turn() or not two.leader._proving, "the refusal")
    two.node.say(HELLO.message)
    wait_until(lambda: two.turn() or two.leader.life_events, "the message")
    assert two.received() == [HELLO]


def test_a_stall_during_an_inspection_for_a_client_is_told_to_all_nodes(two: TwoNodes) -> None:
    two.until_connected()
    two.leader.ask(is_look=True)
    two.turns()
    assert two.node.is_look and two.node.is_asked
    two.leader.ask()
    two.turns()
    assert not two.node.is_look and not two.leader.is_look and two.leader.inspections == 1


def test_connection_is_as_its_description_says(two: TwoNodes) -> None:
    """An independent program that knows the token is taken for node 1."""
    env = {"DDPJOB_UID": "a random uid", "DDPJOB_ATTEMPT": "1", "DDPJOB_TOKEN": "a random token"}
    node = Speaker(1, group_secret(env, nnodes=2))
    with a_stranger(two) as sock:
        join(two, sock, node)
        sock.sendall(node.message({"life": to_json(HELLO.message)}))
        wait_until(lambda: two.turn() or HELLO in two.leader.life_events, "the message")
        sock.sendall(node.message({"life": {"message": "of another version"}}))
        wait_until(lambda: two.turn() or Lost(1) in two.leader.life_events, "the end of the connection")


def join(two: TwoNodes, sock: socket.socket, node: Speaker) -> None:
    """Introduce and prove; the launchers take turns meanwhile."""
    sock.sendall(node.hello)
    wait_until(lambda: two.turn() or select.select([sock], [], [], 0)[0], "node 0's answer")
    sock.sendall(node.proof(sock.recv(4096)))


def test_stranger_who_knows_uid_and_attempt_is_refused(two: TwoNodes) -> None:
    """Labels of the pods and every metric system show both."""
    two.until_connected()
    node = Speaker(1, group_secret({"DDPJOB_UID": "a random uid", "DDPJOB_ATTEMPT": "1"}, nnodes=2))
    with a_stranger(two) as sock, contextlib.suppress(OSError):
        join(two, sock, node)
        sock.sendall(node.message({"life": to_json(HELLO.message)}))
        wait_until(lambda: two.turn() or not two.leader._proving, "the refusal")
    assert two.received() == [] and not two.leader.is_alone


def the_message(side: str, line: bytes) -> bool:
    return side == "node" and b'"life"' in line


def changed(side: str, line: bytes) -> list[bytes]:
    return [line.replace(b"boot", b"evil") if the_message(side, line) else line]


def sent_twice(side: str, line: bytes) -> list[bytes]:
    return [line, line] if the_message(side, line) else [line]


def left_out(side: str, line: bytes) -> list[bytes]:
    return [] if side == "node" and b'"stalled"' in line else [line]


def sent_back(side: str, line: bytes) -> list[bytes]:
    """The message that node 0 receives is its own."""
    if side == "leader" and b"alive" in line:
        OWN.append(line)
    return [OWN.pop()] if the_message(side, line) and OWN else [line]


OWN: list[bytes] = []


@pytest.mark.parametrize("alter", [changed, sent_twice, left_out, sent_back])
def test_message_that_is_changed_on_the_way_ends_the_connection(alter: Callable[[str, bytes], list[bytes]]) -> None:
    two = TwoNodes(alter=alter)
    two.until_connected()
    two.leader.say(Alive(LIFE), 1)
    two.turns()
    two.node.say(HELLO.message)
    wait_until(lambda: two.turn() or Lost(1) in two.leader.life_events, "the end of the connection", 60)
    assert two.received().count(HELLO) == (alter is sent_twice)  # the first of the two is genuine
    two.close()


def test_group_started_by_hand_refuses_who_comes_after_its_nodes() -> None:
    """It has no token: each node gets a secret when it connects first, and proves with it that it comes again."""
    two = TwoNodes(uid="", token="")
    two.until_connected()
    two.node.say(HELLO.message)
    wait_until(lambda: two.turn() or two.leader.life_events, "the message")
    assert two.received() == [HELLO]
    node = Speaker(1, group_secret({}, nnodes=2))
    with a_stranger(two) as sock, contextlib.suppress(OSError):
        join(two, sock, node)
        assert "secret" not in node.answer
        wait_until(lambda: two.turn() or not two.leader._proving, "the refusal")
    assert two.received() == [] and not two.leader.is_alone
    two.leader._nodes[1].close()
    wait_until(lambda: two.turn() or Lost(0) in two.node.life_events, "the loss")
    two.until_connected()
    two.close()


def test_each_group_and_each_node_started_by_hand_has_another_secret() -> None:
    secrets = set()
    for _ in range(2):
        two = TwoNodes(uid="", token="")
        two.leader._ranks = Ranks(nnodes=3, world_size=3)
        for number in (1, 2):
            node = Speaker(number)
            with a_stranger(two) as sock:
                join(two, sock, node)
                assert node.secret is not None
                secrets.add(node.secret)
        two.close()
    assert len(secrets) == 4


def test_ranks_get_no_token_of_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"DDPJOB_TOKEN": "a random token", "HOME": "/"}
    assert take_token(env) == "a random token" and "a random token" not in env.values()
    left = env["DDPJOB_TOKEN"]
    assert left and take_token(env) == left
    assert take_token(empty := {"HOME": "/"}) == "" and empty == {"HOME": "/"}


def test_strangers_take_few_connections(two: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_STRANGERS", 8)
    two.until_connected()
    with contextlib.ExitStack() as opened:
        for number in range(20):
            stranger = opened.enter_context(a_stranger(two))
            stranger.sendall(json.dumps({"ddprun-launcher": 1, "asks": str(number)}).encode() + b"\n")
            wait_until(lambda: two.turn() or select.select([stranger], [], [], 0)[0], "node 0's answer")  # noqa: B023
        assert len(two.leader._proving) == 8
        two.node.say(HELLO.message)
        wait_until(lambda: two.turn() or two.leader.life_events, "the message")
    assert two.received() == [HELLO]


PRINTING = """
import os
print(dict(os.environ), flush=True)
raise ValueError(f"no way on with {dict(os.environ)}")
"""


@pytest.mark.parametrize("start", ["auto", "spawn"])
def test_program_that_prints_its_variables_shows_no_token(ddptrain: ForkServer, tmp_path: Path, start: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(PRINTING)
    env = {"DDPJOB_TOKEN": "a-random-token", "DDPJOB_UID": "u", "DDPJOB_ATTEMPT": "1"}
    argv = ("--nproc-per-node", 2, "--start", start, "--log-dir", tmp_path / "logs", script)
    run = ddptrain.start(*argv, env=env, module="ddprun")
    assert run.wait() == 1
    files = [file.read_text() for file in (tmp_path / "logs").rglob("*") if file.is_file()]
    assert "DDPJOB_TOKEN" in run.output() and "no way on" in run.message()["message"]
    assert not any("a-random-token" in text for text in (run.output(), run.termination_log.read_text(), *files))
