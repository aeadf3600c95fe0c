"""The port at which a script reports its progress as in a TrainJob of Kubeflow, without a line of this project.

``Trainer`` of transformers reports to KUBEFLOW_TRAINER_SERVER_URL by itself, if that is set. The port is on loopback
only, and the token keeps out other users of the same network, such as pods with ``hostNetwork``. The token is in memory
of the launcher, which needs no volume and leaves nothing behind, and the kernel shows it to processes of the same user.
"""

import hmac
import os
import secrets
import time
from collections.abc import Callable, MutableMapping

from ddprun.launcher.processes import launcher_line
from ddprun.launcher.trainer_status import TrainerStatus, parse
from ddprun.reporting.http_port import NOT_FOUND, Answer, HttpPort, Request, listening

_VARIABLES = "KUBEFLOW_TRAINER_SERVER_"
_OFF = "DISABLE_KUBEFLOW_INTEGRATION"
_LONGEST_BODY = 65536  # bytes; the callback of transformers sends some 100 for each metric


class TrainerPort(HttpPort):
    """Takes the reports of the life of the ranks that ``begin`` has begun last.

    Args:
        take: called with each report and the time.
    Raises:
        OSError: no port or no memory for the token.
    """

    def __init__(self, take: Callable[[TrainerStatus, float], None]) -> None:
        self._take = take
        token = secrets.token_urlsafe(32)
        self._expected = b"Bearer " + token.encode()
        self._path = b""
        self._refused = False  # and said
        listener = listening(0, "127.0.0.1")
        self._number = listener.getsockname()[1]
        self._token_file = os.memfd_create("ddprun-token")
        os.write(self._token_file, token.encode())
        os.fchmod(self._token_file, 0o400)
        super().__init__(listener, self._answer_to, expects=self._expected_length)

    def begin(self, life: int, env: MutableMapping[str, str] = os.environ) -> None:
        """Set the variables for the ranks of this life, and refuse the reports of earlier ones."""
        self._path = b"/lives/%d/status" % life
        env[f"{_VARIABLES}URL"] = f"http://127.0.0.1:{self._number}{self._path.decode()}"
        env[f"{_VARIABLES}TOKEN"] = f"/proc/{os.getpid()}/fd/{self._token_file}"
        _bypass_proxy(env)

    def close(self) -> None:
        super().close()
        os.close(self._token_file)

    def _is_right(self, request: Request) -> bool:
        given = request.headers.get(b"authorization", b"")
        return request.path == self._path and hmac.compare_digest(given, self._expected)

    def _expected_length(self, request: Request) -> int:
        return request.length if self._is_right(request) and request.length <= _LONGEST_BODY else 0

    def _answer_to(self, request: Request) -> Answer:
        if request.path != self._path:
            return NOT_FOUND
        if not self._is_right(request):
            return b"401 Unauthorized", {"error": "wrong token"}
        if request.method != b"POST":
            return b"405 Method Not Allowed", {"error": "only POST"}
        try:
            if request.length > _LONGEST_BODY:
                raise ValueError(f"longer than {_LONGEST_BODY} bytes")
            status = parse(request.body)
        except ValueError as error:
            if not self._refused:
                self._refused = True
                launcher_line(f"warning: a progress report of the script is refused: {str(error)[:200]}")
            return b"400 Bad Request", {"error": str(error)[:200]}
        self._take(status, time.time())
        return b"200 OK", {}


def is_wanted(env: MutableMapping[str, str] = os.environ) -> bool:
    """Return whether the reports are on, and neither a TrainJob nor a server of the user takes them."""
    taken = any(name.startswith(_VARIABLES) for name in env)
    return not taken and env.get(_OFF, "").upper() != "TRUE"


def _bypass_proxy(env: MutableMapping[str, str]) -> None:
    """Keep requests to the port, with the token, from a proxy that the user has set for other hosts."""
    for name in [name for name in ("no_proxy", "NO_PROXY") if name in env] or ["no_proxy"]:
        hosts = [host.strip() for host in env.get(name, "").split(",") if host.strip()]
        if hosts != ["*"] and "127.0.0.1" not in hosts and _has_proxy(env):
            env[name] = ",".join([*hosts, "127.0.0.1"])


def _has_proxy(env: MutableMapping[str, str]) -> bool:
    return any(name.lower() in ("http_proxy", "all_proxy") and value for name, value in env.items())
