"""A program in a pod, over a WebSocket: its standard output as bytes, as they come.

https://kubernetes.io/docs/reference/generated/kubernetes-api/v1.34/#-strong-proxy-operations-pod-v1-core-strong-
"""

import json
import ssl
from collections.abc import Generator
from typing import Any, cast

import certifi
from kubernetes.stream.ws_client import get_websocket_url, websocket_proxycare
from websocket import ABNF, WebSocket, WebSocketBadStatusException, WebSocketException

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.client.connection import ApiConnection, path_of
from ddpjob.client.volume.contents import CutError
from ddpjob.errors import NotAllowedError, UnavailableError

_PROTOCOL = "v4.channel.k8s.io"  # of every API server; v5 only adds the end of standard input
_STDOUT, _STDERR, _STATUS = 1, 2, 3
_CONNECT_SECONDS = 20.0
_SILENT_SECONDS = 60.0
"""A connection without a byte for this long is dead: the program gives a sign of life for each 16 MiB."""
_STDERR_BYTES = 4000


def output_of(
    connection: ApiConnection, namespace: str, pod: str, container: str, command: list[str]
) -> Generator[bytes, None, None]:
    """Yield the standard output of a program in a pod.

    Raises:
        CutError: the connection was refused or cut, or the program was killed.
        NotAllowedError: the user may not run programs in pods.
        UnavailableError: the program failed.
    """
    socket = _opened(connection, namespace, pod, container, command)
    errors = b""
    for channel, data in _frames(socket):
        if channel == _STDOUT:
            yield data
        elif channel == _STDERR:
            errors = (errors + data)[-_STDERR_BYTES:]
        elif channel == _STATUS:
            _require_success(data, errors.decode(errors="replace"))
            return


def _frames(socket: Any) -> Generator[tuple[int, bytes], None, None]:
    """Yield channel and data of each frame, and close the socket. Raises ``CutError``."""
    try:
        while True:
            opcode, frame = socket.recv_data_frame(control_frame=True)
            if opcode == ABNF.OPCODE_CLOSE:
                return
            if opcode in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data:
                yield frame.data[0], frame.data[1:]
    except (WebSocketException, OSError) as error:
        raise CutError(" ".join(str(error).split()) or type(error).__name__) from error
    finally:
        socket.shutdown()


def _opened(connection: ApiConnection, namespace: str, pod: str, container: str, command: list[str]) -> Any:
    configuration = connection.api.configuration
    query = [*(("command", word) for word in command), ("container", container), ("stdout", "true"), ("stderr", "true")]
    _, url, headers, *_ = connection.api.param_serialize(
        "GET", path_of(names.PODS, namespace, pod, "exec"), query_params=query, auth_settings=["BearerToken"]
    )
    url = get_websocket_url(url)  # type: ignore[no-untyped-call]
    given = [f"{key}: {headers[key]}" for key in ("authorization", "User-Agent") if key in headers]
    options: dict[str, Any] = {"header": given, "subprotocols": [_PROTOCOL]}
    if configuration.proxy or configuration.proxy_headers:
        options = websocket_proxycare(options, configuration, url, headers)  # type: ignore[no-untyped-call]
    # The official function for this sets no time limit.
    socket = WebSocket(sslopt=_tls(configuration), skip_utf8_validation=True)
    socket.settimeout(_CONNECT_SECONDS)
    try:
        socket.connect(url, **options)  # type: ignore[no-untyped-call]
    except WebSocketBadStatusException as error:
        raise _refused(connection, error, pod) from error
    except (WebSocketException, OSError) as error:
        raise CutError(" ".join(str(error).split()) or type(error).__name__) from error
    socket.settimeout(_SILENT_SECONDS)
    return socket


def _tls(configuration: Any) -> Json:
    options: Json = {"cert_reqs": ssl.CERT_NONE}
    if configuration.verify_ssl:
        options = {"cert_reqs": ssl.CERT_REQUIRED, "ca_certs": configuration.ssl_ca_cert or certifi.where()}
        if configuration.assert_hostname is not None:
            options["check_hostname"] = configuration.assert_hostname
    given = {
        "certfile": configuration.cert_file,
        "keyfile": configuration.key_file,
        "server_hostname": configuration.tls_server_name,
    }
    return options | {key: value for key, value in given.items() if value}


def _refused(connection: ApiConnection, error: WebSocketBadStatusException, pod: str) -> Exception:
    body = error.resp_body or b""
    try:
        answer = json.loads(body)
        message = str(answer["message"])
    except (ValueError, TypeError, KeyError):
        message = f"HTTP {error.status_code}"
    if error.status_code == 403:
        return NotAllowedError(
            f"not allowed: {message}",
            "programs run in a pod by pods/exec, which the role edit has, and view has not",
            "kubectl auth can-i create pods/exec",
        )
    if error.status_code == 401:
        connection.renew()
    return CutError(f"pod {pod}: {message}")


def _require_success(data: bytes, errors: str) -> None:
    """Raise an error unless the program ended with 0."""
    if (code := _exit_code(data)) == 0:
        return
    message = (errors.strip().splitlines() or [f"exit code {code}"])[-1]
    if code == 1:  # the program itself failed; it is killed by a signal when its pod ends
        raise UnavailableError(
            f"the program that reads the volume failed: {message}",
            "python3 of the job's image is older than 3.7, or the program has an error",
            "report it with this message",
        )
    raise CutError(f"exit code {code}: {message}")


def _exit_code(data: bytes) -> int:
    """Return the exit code in the status of a program. Raises ``CutError`` if there is none."""
    try:
        status = cast(Json, json.loads(data))
        if status.get("status") == "Success":
            return 0
        causes = (status.get("details") or {}).get("causes") or ()
        return int(next(cause["message"] for cause in causes if cause.get("reason") == "ExitCode"))
    except StopIteration:
        raise CutError(str(status.get("message"))) from None
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise CutError(f"not a status: {data[:200]!r}") from error
