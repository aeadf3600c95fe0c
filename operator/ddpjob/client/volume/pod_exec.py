"""A program in a pod, over a WebSocket: its standard output as bytes, as they come.

https://kubernetes.io/docs/reference/generated/kubernetes-api/v1.34/#-strong-proxy-operations-pod-v1-core-strong-
"""

import json
import ssl
from collections.abc import Generator
from typing import Any

import certifi
from kubernetes.stream.ws_client import get_websocket_url, websocket_proxycare
from websocket import ABNF, WebSocket, WebSocketBadStatusException, WebSocketException

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.client.connection import ApiConnection, path_of, request_error
from ddpjob.client.volume.contents import CutError
from ddpjob.errors import NotAllowedError, UnavailableError

_PROTOCOL = "v4.channel.k8s.io"  # of every API server; v5 only adds the end of standard input
_STDOUT, _STDERR, _STATUS = b"\1", b"\2", b"\3"
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
    try:
        while True:
            opcode, frame = socket.recv_data_frame(control_frame=True)
            if opcode == ABNF.OPCODE_CLOSE:
                return
            if opcode not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT):
                continue
            channel, data = frame.data[:1], frame.data[1:]
            if channel == _STDOUT:
                yield data
            elif channel == _STDERR:
                errors = (errors + data)[-_STDERR_BYTES:]
            elif channel == _STATUS:
                _require_success(data, errors.decode(errors="replace"))
                return
    except (WebSocketException, OSError) as error:
        raise CutError(request_error(error).message) from error
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
        raise CutError(request_error(error).message) from error
    socket.settimeout(_SILENT_SECONDS)
    return socket


def _tls(configuration: Any) -> Json:
    verifies = configuration.verify_ssl
    given = {
        "ca_certs": (configuration.ssl_ca_cert or certifi.where()) if verifies else None,
        "check_hostname": configuration.assert_hostname if verifies else None,
        "certfile": configuration.cert_file,
        "keyfile": configuration.key_file,
        "server_hostname": configuration.tls_server_name,
    }
    options = {key: value for key, value in given.items() if value not in (None, "")}
    return {"cert_reqs": ssl.CERT_REQUIRED if verifies else ssl.CERT_NONE} | options


def _refused(connection: ApiConnection, error: WebSocketBadStatusException, pod: str) -> Exception:
    try:
        message = str(json.loads(error.resp_body or b"")["message"])
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
    """Raise an error unless the status of the program says that it ended with 0."""
    try:
        status = json.loads(data)
        if status["status"] == "Success":
            return
        message = (errors.strip().splitlines() or [str(status.get("message"))])[-1]
        causes = (status.get("details") or {}).get("causes") or ()
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise CutError(f"not a status: {data[:200]!r}") from error
    if {"reason": "ExitCode", "message": "1"} in causes:  # a signal ends it when its pod ends
        raise UnavailableError(
            f"the program that reads the volume failed: {message}",
            "python3 of the job's image is older than 3.7, or the program has an error",
            "report it with this message",
        )
    raise CutError(message)
