"""The connection of a launcher to node 0's as bytes, written from its description, and a man in the middle."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import select
import socket
from collections.abc import Callable
from typing import Any

VERSION = 4


def group_secret(env: dict[str, str], *, nnodes: int, nproc: int = 1) -> bytes:
    """Return what the launchers of an attempt derive from its token; without one, from uid and attempt."""
    names = ("DDPJOB_UID", "DDPJOB_ATTEMPT", "PET_RDZV_ID")
    common = {"nnodes": nnodes, "nproc": nproc} | {name: env.get(name, "") for name in names}
    group = hashlib.sha256(json.dumps(common, sort_keys=True).encode()).digest()
    token = env.get("DDPJOB_TOKEN", "")
    return hmac.digest(token.encode(), group, "sha256") if token else group


class Speaker:
    """One who speaks as a node: ``lines`` for the socket, and what it makes of node 0's answer."""

    def __init__(self, node: int, secret: bytes | None = None) -> None:
        self.node, self.secret = node, secret
        self.sent, self.asked, self.answer = 0, "7", dict[str, Any]()

    @property
    def hello(self) -> bytes:
        return json.dumps({"ddprun-launcher": self.node, "asks": self.asked}).encode() + b"\n"

    def proof(self, answer: bytes) -> bytes:
        """Return the line that follows node 0's answer; a secret in that is taken."""
        self.answer = json.loads(answer)
        self.secret = self.secret or bytes.fromhex(self.answer.get("secret", ""))
        return json.dumps({"proof": self._mac("node proves").hex()}).encode() + b"\n"

    def message(self, message: dict[str, Any]) -> bytes:
        content = json.dumps(message).encode()
        mac = hmac.digest(self._mac("node sends"), b"%d " % self.sent + content, "sha256").hex().encode()
        self.sent += 1
        return mac + content + b"\n"

    def _mac(self, use: str) -> bytes:
        content = [use, self.node, self.asked, self.answer["asks"], VERSION]
        return hmac.digest(self.secret or b"", json.dumps(content).encode(), "sha256")


class Relay:
    """A man in the middle: passes each line of one connection on to ``port``, as ``alter`` returns it.

    alter: called with "node" or "leader", which sends, and the line; returns the lines to pass on.
    """

    def __init__(self, port: int, alter: Callable[[str, bytes], list[bytes]]) -> None:
        self._port, self._alter = port, alter
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sides: dict[str, socket.socket] = {}
        self._received = {"node": b"", "leader": b""}

    def turn(self) -> None:
        """Pass on what has come."""
        if select.select([self._listener], [], [], 0)[0]:
            self._end()
            node, _ = self._listener.accept()
            self._sides = {"node": node, "leader": socket.create_connection(("127.0.0.1", self._port), 5)}
        for side, other in (("node", "leader"), ("leader", "node")):
            while side in self._sides and select.select([self._sides[side]], [], [], 0)[0]:
                data = b""
                with contextlib.suppress(OSError):
                    data = self._sides[side].recv(65536)
                if not data:
                    self._end()
                    return
                *lines, self._received[side] = (self._received[side] + data).split(b"\n")
                for line in lines:
                    with contextlib.suppress(OSError):
                        self._sides[other].sendall(b"".join(one + b"\n" for one in self._alter(side, line)))

    def close(self) -> None:
        self._end()
        self._listener.close()

    def _end(self) -> None:
        for side in self._sides.values():
            side.close()
        self._sides, self._received = {}, {"node": b"", "leader": b""}
