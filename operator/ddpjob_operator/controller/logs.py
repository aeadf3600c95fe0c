"""Log format: one JSON object per line, with the job that ``about`` sets for all lines logged in its context."""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime

_job: ContextVar[dict[str, object] | None] = ContextVar("job", default=None)


@contextlib.contextmanager
def about(namespace: str, job: str) -> Iterator[None]:
    """Add namespace and job to every line that is logged in this context, and the attempt once it is set."""
    token = _job.set({"namespace": namespace, "job": job})
    try:
        yield
    finally:
        _job.reset(token)


def set_attempt(attempt: int) -> None:
    """Set the attempt of the job of this context."""
    fields = _job.get()
    if fields is not None:
        fields["attempt"] = attempt


class JsonFormatter(logging.Formatter):
    """Formats a record as JSON: ts (RFC 3339, UTC), level, logger, message, namespace, job, attempt, exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _job.get() or {}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str) -> None:
    """Log everything to standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # kopf logs every handled object, and an error several times with its traceback; ``watches`` reports it once.
    logging.getLogger("kopf").setLevel(logging.DEBUG if level == "debug" else logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
