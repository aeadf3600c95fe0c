"""The port that answers ``GET /progress`` and ``GET /healthz``, without a thread: its owner lets it handle what came.

The launcher owns it: its answers need neither the interpreter nor the GIL of a rank, and they outlive the ranks. A rank
without a launcher serves from a thread of its own.
"""

import collections
import contextlib
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable

from ddprun.files import Json, dumps_json

_CONNECTIONS = 16  # open at once; a new connection ends the oldest of them
_LONGEST_REQUEST = 16384  # bytes
_ACCEPTED_AT_ONCE = 64

_open: "weakref.WeakSet[ProgressPort]" = weakref.WeakSet()


class ProgressPort:
    """Listens on all addresses: the operator polls the pod's.

    Args:
        progress: returns the answer to ``GET /progress``.
        takes: called with (socket, what it sent) for a connection whose first byte is ``{``; it returns whether the
            connection is now its own.
    Raises:
        OSError, OverflowError: the port cannot be bound.
    """

    def __init__(
        self,
        port: int,
        progress: Callable[[], Json],
        takes: Callable[[socket.socket, bytes], bool] = lambda *_: False,
    ) -> None:
        self._progress, self._takes = progress, takes
        self._received: collections.OrderedDict[socket.socket, bytes] = collections.OrderedDict()
        self._listener = _listening(port)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        _open.add(self)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to handle."""
        return self._selector.fileno()

    def handle(self, wait: float | None = 0.0) -> None:
        """Accept and answer what has come, or what comes within ``wait`` seconds; None waits for ever."""
        for key, _ in self._selector.select(wait):
            if key.fileobj is self._listener:
                self._accept()
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

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_LONGEST_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received[connection] += data
        request = self._received[connection]
        if request.startswith(b"{") and b"\n" in request:
            self._selector.unregister(connection)
            del self._received[connection]
            if not self._takes(connection, request):
                connection.close()
        elif not data or len(request) > _LONGEST_REQUEST:
            self._end(connection)
        elif b"\r\n\r\n" in request or b"\n\n" in request:
            with contextlib.suppress(OSError):  # the client has gone, or reads nothing: a short answer needs no wait
                connection.sendall(self._answer(request))
                connection.shutdown(socket.SHUT_WR)
            self._end(connection)

    def _answer(self, request: bytes) -> bytes:
        words = request.split(b"\n", 1)[0].split()
        method, path = (words[0], words[1]) if len(words) > 1 else (b"", b"")
        answer: Json = {"error": "not found"}
        status = b"404 Not Found"
        if method not in (b"GET", b"HEAD"):
            status, answer = b"501 Not Implemented", {"error": "only GET"}
        elif path == b"/progress":
            status, answer = b"200 OK", self._progress()
        elif path == b"/healthz":
            status, answer = b"200 OK", {"ok": True}
        body = dumps_json(answer).encode()
        head = b"HTTP/1.0 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
        return head if method == b"HEAD" else head + body

    def _end(self, connection: socket.socket) -> None:
        del self._received[connection]
        self._selector.unregister(connection)
        connection.close()


def _listening(port: int) -> socket.socket:
    """Return a socket that listens for IPv4 and IPv6."""
    dual = socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if dual:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("", port))
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _after_fork() -> None:
    for port in list(_open):
        port.leave_to_parent()
        _open.discard(port)


os.register_at_fork(after_in_child=_after_fork)
