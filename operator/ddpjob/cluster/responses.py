"""From an HTTP answer of the API server to a dict or a typed error with the server's own message."""

import email.utils
import json
import time
from collections.abc import Mapping
from typing import Any, cast

from ddpjob.api.wire import Json
from ddpjob.cluster.base import (
    AlreadyExists,
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceTerminating,
    NotFound,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)

MAX_TEXT = 500  # of an answer that is no Status object: a proxy's error page, for example


def decode(body: bytes) -> Json:
    """The JSON object of a successful answer. Raises ``Unavailable`` when something else answered."""
    try:
        value = json.loads(body)
    except ValueError as error:
        raise Unavailable(f"the server's answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Unavailable("the server's answer is not a JSON object")
    return value


def error_of(status: int, headers: Mapping[str, str], body: bytes) -> ClusterError:
    """The typed error for an answer with status 400 or above."""
    answer = _status_object(body)
    message = str(answer.get("message") or f"HTTP {status}")
    details = answer.get("details") or {}
    reason = answer.get("reason", "")
    if status == 429:
        return TooManyRequests(message, retry_after=_retry_after(headers, details), code=status, details=details)
    return _class_of(status, reason, details)(message, code=status, details=details)


def _class_of(status: int, reason: str, details: Json) -> type[ClusterError]:
    if status == 403 and any(c.get("reason") == "NamespaceTerminating" for c in details.get("causes") or ()):
        return NamespaceTerminating
    if status == 409:
        return AlreadyExists if reason == "AlreadyExists" else Conflict
    if status >= 500:
        return Unavailable
    return {401: Unauthorized, 403: Forbidden, 404: NotFound, 400: Invalid, 413: Invalid, 422: Invalid}.get(
        status, ClusterError
    )


def _status_object(body: bytes) -> Json:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and answer.get("kind") == "Status":
        return cast(Json, answer)
    text = body.decode(errors="replace").strip()
    return {"message": text[:MAX_TEXT]} if text else {}


def _retry_after(headers: Mapping[str, str], details: Json) -> float:
    """Seconds to wait: the header as seconds or as a date (RFC 9110, 10.2.3), else the Status's, else one."""
    value: Any = headers.get("Retry-After") or details.get("retryAfterSeconds") or 1
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(str(value)).timestamp() - time.time())
    except ValueError:
        return 1.0
