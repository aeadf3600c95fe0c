"""The port that answers ``GET /progress``, ``GET /ranks`` and ``GET /healthz``: the operator polls the first.

The launcher owns it: its answers need neither the interpreter nor the GIL of a rank, and they outlive the ranks. A rank
without a launcher serves from a thread of its own.
"""

import socket
from collections.abc import Callable

from ddprun.files import Json
from ddprun.reporting.http_port import NOT_FOUND, Answer, HttpPort, Request, listening


class ProgressPort(HttpPort):
    """Listens on all addresses, where the operator polls the pod's, or on the address ``host``.

    Args:
        progress: returns the answer to ``GET /progress``.
        takes: as of ``HttpPort``.
        ranks: returns the answer to ``GET /ranks``; None without a launcher.
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
        host: str | None = None,
    ) -> None:
        def answer(request: Request) -> Answer:
            if request.method not in (b"GET", b"HEAD"):
                return b"501 Not Implemented", {"error": "only GET"}
            if request.path == b"/progress":
                return b"200 OK", progress()
            if request.path == b"/ranks" and ranks is not None:
                return b"200 OK", ranks()
            return (b"200 OK", {"ok": True}) if request.path == b"/healthz" else NOT_FOUND

        super().__init__(listening(port, host or ""), answer, takes=takes)
