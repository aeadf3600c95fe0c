"""A TCP proxy on loopback that cuts connections after so many bytes from the server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

_PART = 65_536


class CuttingProxy:
    """Use as a context manager. port: of the proxy. cuts: bytes after which the next connection with so many is cut."""

    def __init__(self, address: tuple[str, int], cuts: Sequence[int]) -> None:
        self.cuts = [*cuts]
        self._address = address
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        _close(*self._open)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._address, timeout=20)
                server.settimeout(None)
                self._open += [client, server]
                for pair in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        count = 0
        with suppress(OSError):
            while data := source.recv(_PART):
                count += len(data)
                if is_counted and self._is_cut(count):
                    break
                target.sendall(data)
        _close(source, target)

    def _is_cut(self, count: int) -> bool:
        with self._lock:
            if self.cuts and count > self.cuts[0]:
                del self.cuts[0]
                return True
        return False


def _close(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
