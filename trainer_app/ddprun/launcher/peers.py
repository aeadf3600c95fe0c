"""The connections between the launchers of all nodes: each has one to node 0's, on the port of ``GET /progress``.

A message is a line of JSON. When a node asks, all nodes inspect their ranks, and node 0 collects what they find. A node
that is lost or cannot be reached only delays that by ANSWER seconds. The messages of ``lives`` use these connections.

Both sides first prove that they know the token of the attempt, which the operator draws and only its pods have. Neither
sends it: each answers a number that the other has just drawn, so what a stranger has recorded proves nothing later. The
keys that follow from both numbers authenticate each message and its place, so a program on the way cannot change,
repeat or leave out one. A side that has proved nothing may keep little memory, and few connections for a short time.

A group that was started by hand has no token. Node 0 then draws a secret for each node and sends it to the first that
connects as this node: a stranger who comes later is refused.
"""

import collections
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any

from ddprun.distributed.topology import Ranks, loopback_of
from ddprun.files import Json, dumps_json
from ddprun.launcher.hang_detector import RankSnapshot
from ddprun.launcher.life_messages import Message, from_json, to_json
from ddprun.launcher.lives import Connected, Lost, Received
from ddprun.launcher.processes import run_with_timeout
from ddprun.replica_audit import Digests
from ddprun.step_parts import StepSums

Records = tuple[list[StepSums], list[Digests]]
"""What a rank has recorded of its steps, and of its parameters."""

VERSION = 4  # of all messages; raise it with each change: launchers of another version prove nothing to each other
ANSWER = 5.0  # seconds for the nodes to inspect their ranks
_LONGEST_LINE = 4 * 2**20  # bytes
_LONGEST_PROOF = 16384  # bytes from a side that has proved nothing
_STRANGERS = 256  # connections at once that have proved nothing; a new one ends the oldest
_PROVING = 5.0  # seconds
_CONNECTING = 5.0  # seconds; the kernel tries for two minutes to reach an address that does not answer
_FIRST_DELAY, _LONGEST_DELAY = 0.05, 5.0  # seconds between attempts to reach node 0
_RESOLVE = 2.0  # seconds
_HELLO = "ddprun-launcher"
_MAC = 64  # hexadecimal digits before each message


def take_token(env: MutableMapping[str, str]) -> str:
    """Return the token of the attempt, or "", and leave in its place what follows from it: ranks print variables."""
    token = env.get("DDPJOB_TOKEN", "")
    if token:
        env["DDPJOB_TOKEN"] = hashlib.sha256(b"ranks" + token.encode()).hexdigest()
    return token


def _group(ranks: Ranks) -> bytes:
    """Return what the launchers of the same attempt have in common: others may share a port or an address."""
    names = ("DDPJOB_UID", "DDPJOB_ATTEMPT", "PET_RDZV_ID")
    common = {"nnodes": ranks.nnodes, "nproc": ranks.nproc_per_node} | {
        name: os.environ.get(name, "") for name in names
    }
    return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).digest()


@dataclass(frozen=True)
class _Handshake:
    """What two launchers have drawn and sent before either has proved anything.

    Attributes:
        until: when a proof is too late.
        asked, drawn: the numbers that the node and the leader have drawn.
        secret: empty, as ``drawn``, on a node until node 0 has answered.
    """

    node: int
    asked: str
    until: float
    secret: bytes = b""
    drawn: str = ""

    def mac(self, use: str) -> bytes:
        """Return what only a launcher with the secret can compute; another value for each use and side."""
        content = [use, self.node, self.asked, self.drawn, VERSION]
        return hmac.digest(self.secret, dumps_json(content).encode(), "sha256")

    def proof(self, side: str) -> str:
        """Return the answer of a side, "leader" or "node"."""
        return self.mac(f"{side} proves").hex()

    def keys(self, side: str) -> tuple[bytes, bytes]:
        """Return the keys of a side for the messages that it sends and receives."""
        return self.mac(f"{side} sends"), self.mac(f"{'node' if side == 'leader' else 'leader'} sends")


class _Connection:
    """A socket that neither blocks the launcher nor fills its memory."""

    def __init__(self, sock: socket.socket, selector: selectors.EpollSelector) -> None:
        self._sock, self._selector, self._received, self._unsent = sock, selector, b"", b""
        self.closed, self.longest = False, _LONGEST_PROOF
        self.node: int | None = None  # that has proved to be the other side
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = self._taken = 0  # messages with these keys
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self)

    def admit(self, keys: tuple[bytes, bytes]) -> None:
        """Trust the other side from now on: messages may be long, and each is authenticated."""
        self.longest, self._keys = _LONGEST_LINE, keys

    def send(self, message: Json) -> None:
        """Send the message as soon as the peer takes it."""
        content = dumps_json(message).encode()
        if self._keys:
            content = _mac(self._keys[0], self._sent, content) + content
            self._sent += 1
        self._unsent += content + b"\n"
        if len(self._unsent) > 2 * _LONGEST_LINE:
            self.close()
        self._flush()

    def messages(self) -> Iterator[Json]:
        """Send and receive what is possible now, and yield the messages that are complete.

        The reader of one may ``admit`` the other side; it then has authenticated the next.
        """
        self._flush()
        while not self.closed:
            try:
                data = self._sock.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._received += data
            if not data or len(self._received) > self.longest:
                self.close()
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            content, message = line, None
            if self._keys:
                given, content = line[:_MAC], line[_MAC:]
                if not hmac.compare_digest(given, _mac(self._keys[1], self._taken, content)):
                    self.close()
                    return
                self._taken += 1
            with contextlib.suppress(ValueError, RecursionError):
                message = json.loads(content)
            if isinstance(message, dict):
                yield message

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._sock)
            self._sock.close()

    def leave_to_parent(self) -> None:
        self._sock.close()

    def _flush(self) -> None:
        if self.closed or not self._unsent:
            return
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._sock, wanted, self)


def _mac(key: bytes, number: int, content: bytes) -> bytes:
    """Return what proves that a message is the one with this number in its direction."""
    return hmac.digest(key, b"%d " % number + content, "sha256").hex().encode()


@dataclass
class NodeFindings:
    """What one node found when it inspected its ranks.

    Attributes:
        stacks: the stacks of each rank that answered, by rank.
    """

    node: int
    ranks: list[RankSnapshot] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)


class Peers:
    """The launchers of a group as this one sees them; of a node that trains alone, only itself.

    Attributes:
        node: this one.
        is_asked: this node is to ``give`` its findings. is_look: a client wants them, and no stall is the reason.
        inspections: of node 0: how many have begun.
        stalled: the nodes that say that they are stalled; of another node than 0, at most itself.
        said: what node 0 has reported of a stall, until the reader empties it.
        is_over: node 0 has withdrawn that.
        is_asked_for_ranks: node 0 wants the rows of this node's ranks.
        rank_rows: of node 0: by node, when it sent its rows last (time.monotonic), and the rows.
        steps: of node 0: what ranks of other nodes have recorded of their steps, until the reader takes it.
        looks: (node, message) of ``look_inside``, until the reader takes them.
        diverged: what node 0 has found about parameters of this node's ranks, until the reader takes it.
        left: of node 0: nodes whose connection has ended, until the reader takes them.
        life_events: connections and messages for ``lives``, until the reader takes them.
    """

    def __init__(self, ranks: Ranks, port: int | None, token: str = "") -> None:
        self._ranks, self._port, group = ranks, port, _group(ranks)
        # A webhook may have removed the token from the pods; they have the random uid of the job, too.
        known = hmac.digest(token.encode(), group, "sha256") if token else group
        self._secret = known if token or os.environ.get("DDPJOB_UID") else None  # None: started by hand
        self._drawn = secrets.token_bytes()  # of node 0 of such a group
        self._given: set[int] = set()  # the nodes that have proved that they know the secret which they were sent
        self._selector = selectors.EpollSelector()
        self._nodes: dict[int, _Connection] = {}  # of node 0: all that are connected; else at most node 0
        self._proving: collections.OrderedDict[_Connection, _Handshake] = collections.OrderedDict()
        self._found: str | None = None  # the address at which node 0 was reached
        self.life_events: collections.deque[Connected | Lost | Received] = collections.deque()
        self._connecting: socket.socket | None = None
        self._connecting_until = 0.0
        self._delay, self._next_try = _FIRST_DELAY, time.monotonic() + _FIRST_DELAY
        self._waits, self._deadline = False, 0.0  # for node 0, until
        self._missing: set[int] = set()  # nodes that are to answer
        self._findings: dict[int, NodeFindings] = {}
        self.node, self.is_asked, self.is_look = ranks.node_rank, False, False
        self.stalled: set[int] = set()
        self.inspections = 0
        self.said, self.is_over, self.is_asked_for_ranks = "", False, False
        self.rank_rows: dict[int, tuple[float, list[Any]]] = {}
        self.steps: list[tuple[int, Records]] = []
        self.looks: list[tuple[int, Json]] = []
        self.left: list[int] = []
        self.diverged: Json | None = None
        os.register_at_fork(after_in_child=self._leave_to_parent)

    @property
    def is_leader(self) -> bool:
        return self.node == 0

    @property
    def is_alone(self) -> bool:
        """Whether no other launcher is connected."""
        return not self._nodes

    def fileno(self) -> int:
        return self._selector.fileno()

    def handle(self) -> None:
        """Take what the other launchers have sent, and connect to node 0 if it is time to try."""
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._connected()
            elif not key.data.closed:  # for a newer one
                for message in key.data.messages():
                    try:
                        self._take(key.data, message)
                    except (AttributeError, LookupError, TypeError, ValueError):  # no launcher sends that
                        key.data.close()
        now = time.monotonic()
        for connection in [one for one, begun in self._proving.items() if one.closed or now >= begun.until]:
            connection.close()
            del self._proving[connection]
        for node in [node for node, connection in self._nodes.items() if connection.closed]:
            self._lost(node)
        if self._connecting and now >= self._connecting_until:
            self._connected()
        if self.seeks_leader and not self._connecting and not self._proving:
            self._connect()

    @property
    def seeks_leader(self) -> bool:
        """Whether this node is to connect to node 0."""
        return not self.is_leader and bool(self._port) and not self._nodes

    def say(self, message: Message, node: int = 0) -> None:
        """Send a message of ``lives``."""
        if node in self._nodes:
            self._nodes[node].send({"life": to_json(message)})

    def takes(self, sock: socket.socket, received: bytes) -> bool:
        """Take over a connection to node 0's port; False if its first line is not a launcher's.

        It is a node of the group when it has proved that.
        """
        line, _, rest = received.partition(b"\n")
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError):
            hello = json.loads(line)
            node, asked = hello[_HELLO], hello["asks"]
            if type(node) is int and 0 < node < self._ranks.nnodes and isinstance(asked, str) and not rest:
                while len(self._proving) >= _STRANGERS:
                    self._proving.popitem(last=False)[0].close()
                secret = self._secret or hmac.digest(self._drawn, b"%d" % node, "sha256")
                handshake = _Handshake(node, asked, time.monotonic() + _PROVING, secret, secrets.token_hex())
                connection = _Connection(sock, self._selector)
                self._proving[connection] = handshake
                answer = {"asks": handshake.drawn, "proof": handshake.proof("leader")}
                is_given = self._secret is None and node not in self._given
                connection.send(answer | ({"secret": secret.hex()} if is_given else {}))
                return True
        return False

    def _prove(self, connection: _Connection, message: Json) -> None:
        """Take the other side's proof, and with it the connection, or end that."""
        begun, proof, side = self._proving.pop(connection), message.get("proof"), "leader" if self.is_leader else "node"
        node, handshake = begun.node, begun if self.is_leader else self._answered(begun, message)
        expected = handshake.proof("node" if self.is_leader else "leader") if handshake else ""
        if not (handshake and isinstance(proof, str) and hmac.compare_digest(ascii(proof), ascii(expected))):
            connection.close()
            return
        if node in self._nodes:
            self._nodes[node].close()
            self._lost(node)
        self._given.add(node)
        self._nodes[node], connection.node = connection, node
        if not self.is_leader:
            self._secret = handshake.secret
            connection.send({"proof": handshake.proof(side)})
        connection.admit(handshake.keys(side))
        if not self.is_leader:
            self._delay = _FIRST_DELAY
            self._send({"stalled": self.node in self.stalled})
            self.life_events.append(Connected())

    def _answered(self, begun: _Handshake, answer: Json) -> _Handshake | None:
        """Return the handshake with node 0's answer; None without a secret. A stranger may have sent anything."""
        drawn, given, secret = answer.get("asks"), answer.get("secret"), self._secret
        if secret is None and isinstance(given, str):
            with contextlib.suppress(ValueError):
                secret = bytes.fromhex(given)
        if not secret or not isinstance(drawn, str):
            return None
        return replace(begun, node=self.node, secret=secret, drawn=drawn)

    def look(self, message: Json, nodes: Iterable[int] | None = None) -> None:
        """Send a message of ``look_inside`` to these nodes, or to all, that are connected."""
        for node in self._nodes.keys() if nodes is None else self._nodes.keys() & set(nodes):
            self._nodes[node].send({"look": message})

    def ask(self, *, is_look: bool = False) -> None:
        """Make all nodes inspect their ranks. ``is_settled`` says when they have, or do not answer."""
        if self.is_leader:
            self._begin(is_look=is_look)
        else:
            self._waits, self._deadline, self.is_look = True, time.monotonic() + ANSWER, is_look
            self._send({"ask": True})

    def give(self, findings: NodeFindings) -> None:
        """Pass on what this node has found."""
        self.is_asked = False
        if self.is_leader:
            self._findings[0] = findings
        else:
            self._send({"findings": {"ranks": list(map(asdict, findings.ranks)), "stacks": findings.stacks}})

    @property
    def is_settled(self) -> bool:
        """Whether all nodes have answered, or have had the time for it."""
        if self.is_leader:
            return not self.is_asked and (not self._missing or time.monotonic() >= self._deadline)
        return not (self._waits and self._nodes) or time.monotonic() >= self._deadline

    def findings(self) -> list[NodeFindings]:
        """Return what node 0 has collected, by node."""
        return [self._findings[node] for node in sorted(self._findings)]

    def settle(self, message: str) -> None:
        """Of node 0: tell the nodes that all have answered, and what is reported; empty for nothing."""
        self._missing.clear()
        self._findings = {}  # the stacks of thousands of ranks
        self._send({"settled": message})

    def tell_stalled(self, stalled: bool) -> None:
        """Tell node 0 whether this node's ranks are stalled."""
        if stalled != (self.node in self.stalled):
            (self.stalled.add if stalled else self.stalled.discard)(self.node)
            if not self.is_leader:
                self._send({"stalled": stalled})

    def tell_over(self) -> None:
        """Of node 0: withdraw what was reported."""
        self._send({"over": True})

    def ask_for_ranks(self) -> None:
        """Of node 0: make the other nodes send the rows of their ranks."""
        self._send({"ranks": True})

    def give_ranks(self, rows: list[Json]) -> None:
        """Send the rows of this node's ranks to node 0."""
        self.is_asked_for_ranks = False
        self._send({"rows": rows})

    def give_steps(self, records: Mapping[int, Records]) -> None:
        """Send what ranks of this node have recorded of their steps to node 0."""
        self._send({"steps": {
            rank: [
                [[round(number, 7) for number in astuple(one)] for one in sums],
                [one.wire() for one in digests],
            ]
            for rank, (sums, digests) in records.items()
        }})  # fmt: skip

    def tell_diverged(self, node: int, found: Json) -> bool:
        """Of node 0: make the node end its ranks, because one differs. Returns whether it is connected."""
        if node in self._nodes:
            self._nodes[node].send({"diverged": found})
        return node in self._nodes

    def _begin(self, *, is_look: bool = False) -> None:
        if self._missing or self.is_asked:
            if self.is_look and not is_look:  # an inspection is under way, and now it is for a stall, too
                self.is_look = False
                self._send({"stall": True})
            return
        self._findings, self._missing = {}, set(self._nodes)
        self.inspections += 1
        self._deadline = time.monotonic() + ANSWER
        self.is_asked, self.is_look = True, is_look
        self._send({"inspect": "look" if is_look else "stall"})

    def _take(self, connection: _Connection, message: Json) -> None:
        if connection in self._proving:
            self._prove(connection, message)
            return
        node = connection.node
        if node is None or self._nodes.get(node) is not connection:  # closed, for a newer one
            return
        if "life" in message:
            self.life_events.append(Received(from_json(message["life"]), node))
        elif "look" in message:
            self.looks.append((node, dict(message["look"])))
        elif self.is_leader:
            self._take_of_node(node, message)
        else:
            if "inspect" in message:
                self.is_asked, self.is_look = True, message["inspect"] == "look"
            self.is_look &= "stall" not in message
            self.is_over |= "over" in message
            self.is_asked_for_ranks |= "ranks" in message
            if "diverged" in message:
                self.diverged = {name: message["diverged"][name] for name in ("step", "rank", "message")}
            if "settled" in message:
                self._waits, self.is_over = False, False
                self.said = str(message["settled"])

    def _take_of_node(self, node: int, message: Json) -> None:
        if "ask" in message:
            self._begin()
        if "stalled" in message:
            (self.stalled.add if message["stalled"] is True else self.stalled.discard)(node)
        if "rows" in message:
            self.rank_rows[node] = (time.monotonic(), message["rows"])
        for rank, (sums, digests) in message.get("steps", {}).items():
            if int(rank) // self._ranks.nproc_per_node != node:
                raise ValueError(f"rank {rank} is not of node {node}")
            checked = [StepSums.checked(one) for one in sums], [Digests.checked(one) for one in digests]
            self.steps.append((int(rank), checked))
        if given := message.get("findings"):
            stacks = {int(rank): text for rank, text in given["stacks"].items()}
            self._findings[node] = NodeFindings(node, [RankSnapshot(**rank) for rank in given["ranks"]], stacks)
            self._missing.discard(node)

    def _lost(self, node: int) -> None:
        del self._nodes[node]
        self._missing.discard(node)
        self.stalled.discard(node)
        self.rank_rows.pop(node, None)
        self.left.append(node)
        self.life_events.append(Lost(node))
        self._delay, self._next_try = _FIRST_DELAY, time.monotonic() + _FIRST_DELAY

    def _send(self, message: Json) -> None:
        for connection in self._nodes.values():
            connection.send(message)

    def _connect(self) -> None:
        if time.monotonic() < self._next_try:
            return
        address = self._found or self._address()
        self._next_try = time.monotonic() + self._delay
        self._delay = min(2 * self._delay, _LONGEST_DELAY)
        if address is None:
            return
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.connect_ex((address, self._port)) not in (0, errno.EINPROGRESS):
            sock.close()
            return
        self._connecting, self._connecting_until = sock, time.monotonic() + _CONNECTING
        self._selector.register(sock, selectors.EVENT_WRITE, None)

    def _address(self) -> str | None:
        """Return the address of node 0, whose name may not be resolved for a while; None if it is not known."""
        name = self._ranks.master_addr
        if loopback := loopback_of(name):
            return loopback
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(name))
        found: str | None = run_with_timeout(
            _RESOLVE, lambda: socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0]
        )
        return found

    def _connected(self) -> None:
        sock, self._connecting = self._connecting, None
        assert sock is not None
        self._selector.unregister(sock)
        try:
            self._found = str(sock.getpeername()[0])
        except OSError:  # refused, or no answer in time
            sock.close()
            self._found = None
            return
        connection, asked = _Connection(sock, self._selector), secrets.token_hex()
        self._proving[connection] = _Handshake(0, asked, time.monotonic() + _PROVING)
        connection.send({_HELLO: self.node, "asks": asked})

    def _leave_to_parent(self) -> None:
        """In a forked child: close the copies of the descriptors, which would keep the connections open."""
        for connection in (*self._nodes.values(), *self._proving):
            connection.leave_to_parent()
        if self._connecting:
            self._connecting.close()
        self._selector.close()
