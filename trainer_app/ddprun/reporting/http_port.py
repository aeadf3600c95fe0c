"""A port that answers HTTP requests without a thread: its owner lets it handle what came.

Its answers are short and need no wait, so that the launcher can own it beside its ranks. Slow and hostile clients cost
a bounded number of descriptors and bytes.
"""

import collections
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from ddprun.distributed.topology import bind
from ddprun.files import Json, dumps_json

_CONNECTIONS = 16  # open at once; a new connection ends the oldest of them
_LONGEST_HEAD = 16384  # bytes
_ACCEPTED_AT_ONCE = 64
_READ_SIZE = 65536
NOT_FOUND: "Answer" = (b"404 Not Found", {"error": "not found"})

Answer = tuple[bytes, Json]
"""Status line and body."""

_open: "weakref.WeakSet[HttpPort]" = weakref.WeakSet()


@dataclass(frozen=True)
class Request:
    """A request.

    Attributes:
        headers: by name in lower case.
        body: what has come of it.
        length: of the body, as the client gave it; 0 if it gave none.
    """

    method: bytes
    path: bytes
    headers: dict[bytes, bytes]
    body: bytes
    length: int


class HttpPort:
    """Answers each request with what ``answer`` returns, and closes the connection.

    Args:
        listener: a socket that listens and does not block; the port owns it.
        takes: called with (socket, what it sent) for a connection whose first byte is ``{``; it returns whether the
            connection is now its own.
        expects: returns for how many bytes of a request's body to wait before the answer.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[Request], Answer],
        *,
        takes: Callable[[socket.socket, bytes], bool] = lambda *_: False,
        expects: Callable[[Request], int] = lambda _: 0,
    ) -> None:
        self._listener, self._answer, self._takes, self._expects = listener, answer, takes, expects
        self._received: collections.OrderedDict[socket.socket, bytes] = collections.OrderedDict()
        self._unsent: dict[socket.socket, memoryview] = {}  # of answers, until the clients have taken them
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        _open.add(self)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to handle."""
        return self._selector.fileno()

    def handle(self, wait: float | None = 0.0) -> None:
        """Accept and answer what has come, or what comes within ``wait`` seconds; None waits without limit."""
        for key, _ in self._selector.select(wait):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj in self._unsent:
                assert isinstance(key.fileobj, socket.socket)
                self._send(key.fileobj)
            elif key.fileobj in self._received:  # not ended meanwhile, for a newer connection
                assert isinstance(key.fileobj, socket.socket)
                self._receive(key.fileobj)

    def serve_in_thread(self) -> None:
        """Handle all that comes in a daemon thread."""

        def serve() -> None:
            while True:
                self.handle(None)

        threading.Thread(target=serve, name="progress", daemon=True).start()

    def close(self) -> None:
        """End all connections and release the port."""
        for connection in list(self._received):
            self._end(connection)
        self._selector.close()
        self._listener.close()
        _open.discard(self)

    def leave_to_parent(self) -> None:
        """In a forked child: close the copies of the descriptors, which would keep the port open after the parent."""
        for owned in (*self._received, self._listener):
            owned.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no more, ended meanwhile, or no descriptor is left
                return
            connection.setblocking(False)
            while len(self._received) >= _CONNECTIONS:
                self._end(next(iter(self._received)))
            self._received[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)
            self._receive(connection)  # what it has sent already, so that it keeps its place for no time

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        received = self._received[connection] = self._received[connection] + data
        if received.startswith(b"{") and b"\n" in received:
            self._selector.unregister(connection)
            del self._received[connection]
            if not self._takes(connection, received):
                connection.close()
            return
        request = _request(received)
        if not data or (request is None and len(received) > _LONGEST_HEAD):
            self._end(connection)
        elif request and len(request.body) >= self._expects(request):
            self._unsent[connection] = memoryview(self._response(request))
            self._send(connection)

    def _send(self, connection: socket.socket) -> None:
        """Send what the client takes now of the answer, and the rest when it takes more."""
        try:
            rest = self._unsent[connection] = self._unsent[connection][connection.send(self._unsent[connection]) :]
            if rest:
                self._selector.modify(connection, selectors.EVENT_WRITE)
                return
            connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            self._selector.modify(connection, selectors.EVENT_WRITE)
            return
        except OSError:  # the client has gone
            pass
        self._end(connection)

    def _response(self, request: Request) -> bytes:
        status, content = self._answer(request)
        body = dumps_json(content).encode()
        head = b"HTTP/1.0 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        return head if request.method == b"HEAD" else head + body

    def _end(self, connection: socket.socket) -> None:
        del self._received[connection]
        self._unsent.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()


class ProgressPort(HttpPort):
    """Answers ``GET /progress``, which the operator polls, ``GET /ranks`` and ``GET /healthz``.

    The launcher owns it: its answers need neither the interpreter nor the GIL of a rank, and they outlive the ranks. A
    rank without a launcher serves from a thread of its own.

    Args:
        progress: returns the answer to ``GET /progress``.
        takes: as of ``HttpPort``.
        host: the only address to listen on.
        ranks: returns the answer to ``GET /ranks``; None without a launcher.
        look: returns the answer to a request that is to look inside the ranks; None if it is another request.
    Raises:
        OSError, OverflowError: the port cannot be bound.
    """

    def __init__(
        self,
        port: int,
        progress: Callable[[], Json],
        takes: Callable[[socket.socket, bytes], bool] = lambda *_: False,
        *,
        ranks: Callable[[], Json] | None = None,
        look: Callable[[Request], Answer | None] = lambda _: None,
        host: str | None = None,
    ) -> None:
        def answer(request: Request) -> Answer:
            if (found := look(request)) is not None:
                return found
            if request.method not in (b"GET", b"HEAD"):
                return b"501 Not Implemented", {"error": "only GET"}
            if request.path == b"/progress":
                return b"200 OK", progress()
            if request.path == b"/ranks" and ranks is not None:
                return b"200 OK", ranks()
            return (b"200 OK", {"ok": True}) if request.path == b"/healthz" else NOT_FOUND

        super().__init__(listening(port, host or ""), answer, takes=takes)


def _request(received: bytes) -> Request | None:
    """Return the request, of whose body more may follow; None before the end of its headers."""
    head, end, body = received.partition(b"\r\n\r\n")
    if not end:
        head, end, body = received.partition(b"\n\n")
    if not end:
        return None
    first, *lines = head.split(b"\n")
    words = first.split()
    method, path = (words[0], words[1]) if len(words) > 1 else (b"", b"")
    fields = (line.partition(b":") for line in lines)
    headers = {name.strip().lower(): value.strip() for name, _, value in fields}
    digits = headers.get(b"content-length", b"")
    length = int(digits[:18]) if digits.isdigit() else 0
    return Request(method, path, headers, body[:length], length)


def listening(port: int, host: str = "") -> socket.socket:
    """Return a socket that listens on a port of an address, by default of all addresses of IPv4 and IPv6.

    Raises:
        OSError, OverflowError: the port cannot be bound.
    """
    listener = bind(port, host, again=True)
    listener.listen(128)
    listener.setblocking(False)
    return listener


def _after_fork() -> None:
    for port in list(_open):
        port.leave_to_parent()
        _open.discard(port)


os.register_at_fork(after_in_child=_after_fork)
