"""Log lines: one JSON object each, with the job of their context."""

import json
import logging
import sys

from ddpjob_operator.controller import logs


def line(message: str = "hello", **extra: object) -> dict[str, object]:
    record = logging.LogRecord("ddpjob.test", logging.INFO, __file__, 1, message, None, None)
    record.__dict__ |= extra
    loaded: dict[str, object] = json.loads(logs.JsonFormatter().format(record))
    return loaded


def test_a_line_has_time_level_logger_and_message() -> None:
    logged = line()
    assert set(logged) == {"ts", "level", "logger", "message"}
    assert (logged["level"], logged["logger"], logged["message"]) == ("info", "ddpjob.test", "hello")
    assert str(logged["ts"]).endswith("+00:00")


def test_a_line_inside_a_reconcile_names_the_job_and_its_attempt() -> None:
    with logs.about("default", "mnist"):
        assert "attempt" not in line()
        logs.set_attempt(2)
        logged = line()
    assert (logged["namespace"], logged["job"], logged["attempt"]) == ("default", "mnist", 2)
    assert "job" not in line()


def test_line_break_or_quote_does_not_create_a_second_line() -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, 'a\n{"level": "error"}', None, None)
    assert "\n" not in logs.JsonFormatter().format(record)


def test_exception_is_logged_with_its_traceback() -> None:
    try:
        raise ValueError("boom")
    except ValueError:
        logged = line(exc_info=sys.exc_info())
    assert "ValueError: boom" in str(logged["exception"])
    assert "test_logs.py" in str(logged["exception"])


def test_text_lines_name_the_job_too() -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "hello", None, None)
    with logs.about("default", "mnist"):
        logs.set_attempt(3)
        assert (
            logs.TextFormatter(logs.TEXT_FORMAT)
            .format(record)
            .endswith("hello [namespace=default job=mnist attempt=3]")
        )
