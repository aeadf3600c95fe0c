"""Log lines: one JSON object each, with the job of their context."""

import json
import logging
import sys

from ddpjob_operator.controller import logs


def line(message: str = "hello", **extra: object) -> dict[str, object]:
    record = logging.LogRecord("ddpjob.test", logging.INFO, __file__, 1, message, None, None)
    record.__dict__ |= extra
    text = logs.JsonFormatter().format(record)
    assert "\n" not in text
    loaded: dict[str, object] = json.loads(text)
    return loaded


def test_a_line_has_time_level_logger_and_message() -> None:
    logged = line('a\n{"level": "error"}')
    assert set(logged) == {"ts", "level", "logger", "message"}
    assert (logged["level"], logged["logger"], logged["message"]) == ("info", "ddpjob.test", 'a\n{"level": "error"}')
    assert str(logged["ts"]).endswith("+00:00")


def test_a_line_inside_a_reconcile_names_the_job_and_its_attempt() -> None:
    with logs.about("default", "mnist"):
        assert "attempt" not in line()
        logs.set_attempt(2)
        logged = line()
    assert (logged["namespace"], logged["job"], logged["attempt"]) == ("default", "mnist", 2)
    assert "job" not in line()


def test_exception_is_logged_with_its_traceback() -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        logged = line(exc_info=sys.exc_info())
    assert "ValueError: boom" in str(logged["exception"])
    assert "test_logs.py" in str(logged["exception"])
