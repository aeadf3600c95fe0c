"""Unexpected errors in a reconcile, and invalid settings of the process."""

import asyncio
import logging
from typing import Any, cast

import pytest

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.engine.actions import EngineSettings
from ddpjob.progress.poller import ProgressPoller
from ddpjob_operator.cluster.base import Cluster
from ddpjob_operator.controller.apply import Executor
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.events import EventSender
from ddpjob_operator.controller.main import main
from ddpjob_operator.controller.metrics import Metrics
from ddpjob_operator.controller.pod_logs import PodLogs
from ddpjob_operator.controller.reconcile import Reconciler
from ddpjob_operator.controller.schema import SchemaMonitor
from ddpjob_operator.controller.unbound_claims import UnboundClaims
from ddpjob_operator.controller.workloads import Workloads
from ddpjob_operator.controller.workqueue import WorkQueue
from tests.builders import NOW, a_job


async def test_unexpected_error_logs_one_traceback_and_retries_with_backoff(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unreachable = cast(Cluster, None)  # the error comes before any request
    cache, metrics = Cache(), Metrics()
    poller, queue = ProgressPoller(10, lambda key: None), WorkQueue()
    reconciler = Reconciler(
        cluster=unreachable,
        cache=cache,
        queue=queue,
        executor=Executor(unreachable, cache, 1),
        poller=poller,
        claims=UnboundClaims(unreachable, queue.add),
        workloads=Workloads(unreachable, cache, asyncio.get_running_loop().time, uses_kueue=False),
        pod_logs=PodLogs(unreachable, queue.add),
        events=EventSender(unreachable),
        metrics=metrics,
        schema=SchemaMonitor(),
        settings=EngineSettings(),
        clock=asyncio.get_running_loop().time,
        now=lambda: NOW,
    )
    broken: dict[str, Any] = a_job()
    broken["metadata"]["generation"] = "not a number"
    cache.put(names.DDPJOBS, broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await reconciler.process(Key("default", "mnist"))
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False]
    assert "the same error again" in caplog.records[-1].getMessage()
    assert 0.1 <= queue.retry(Key("default", "mnist")) <= 0.4, "the fourth failure in a row"
    assert b'ddpjob_reconcile_errors_total{error="ValueError"} 3.0' in metrics.render()
    await poller.close()


def test_invalid_setting_exits_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--health-port", "eighty"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_version_flag_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("ddpjob-operator ")
