"""Unexpected errors in a reconcile, and invalid settings of the process."""

import logging
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob_operator.controller.main import main
from ddpjob_operator.controller.metrics import Metrics
from tests.builders import a_job
from tests.controller.controllers import a_controller
from tests.worlds.memory import MemoryCluster


async def test_unexpected_error_logs_one_traceback_and_retries_with_backoff(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics()
    parts = a_controller(MemoryCluster(), metrics=metrics)
    broken: dict[str, Any] = a_job()
    broken["metadata"]["generation"] = "not a number"
    parts.cache.put(names.DDPJOBS, broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await parts.process(Key("default", "mnist"))
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]
    assert "the same error again" in caplog.records[-1].getMessage()
    assert 0.1 <= parts.queue.retry(Key("default", "mnist")) <= 0.4, "the fourth failure in a row"
    assert b'ddpjob_reconcile_errors_total{error="ValueError"} 3.0' in metrics.render()
    await parts.poller.close()


def test_invalid_setting_exits_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPJOB_OPERATOR_HEALTH_PORT", "eighty")
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
