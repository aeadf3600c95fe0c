"""Events are sent in the background, and the events of one namespace do not delay or displace those of another."""

import asyncio
import logging
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.engine.actions import Note
from ddpjob_operator.controller import logs
from ddpjob_operator.controller.events import MAX_WAITING, EventSender
from tests.builders import a_job
from tests.processes import eventually_async
from tests.worlds.memory import MemoryCluster


class SlowNamespace(MemoryCluster):
    """Every create in ``flooded`` lasts until ``is_fast`` is set, as where the API server limits its events."""

    def __init__(self) -> None:
        super().__init__()
        self.is_fast = asyncio.Event()
        self.started = 0
        self.lines: list[str] = []
        for namespace in ("flooded", "quiet"):
            self.create_namespace(namespace)

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        self.lines.append(logs.JsonFormatter().format(logging.makeLogRecord({})))
        if namespace == "flooded":
            self.started += 1
            await self.is_fast.wait()
        return await super().create(resource, namespace, body)

    def messages(self, namespace: str) -> list[str]:
        return [event["message"] for event in self.store.all(names.EVENTS, namespace)]


def a_job_in(namespace: str) -> dict[str, Any]:
    job = a_job()
    job["metadata"]["namespace"] = namespace
    return job


async def test_flood_of_events_in_one_namespace_delays_no_event_of_another(caplog: pytest.LogCaptureFixture) -> None:
    cluster = SlowNamespace()
    events = EventSender(cluster)
    for number in range(MAX_WAITING + 50):
        events.send(a_job_in("flooded"), Note("Normal", "Flood", f"{number}"))
    with logs.about("quiet", "first"):
        events.send(a_job_in("quiet"), Note("Normal", "Started", "first"))
    events.send(a_job_in("quiet"), Note("Normal", "Finished", "second"))
    await eventually_async("they are posted", lambda: len(cluster.messages("quiet")) == 2)
    assert cluster.started == 1, "one event of a namespace at a time, so that they arrive in order"
    assert "too many events wait" in caplog.text
    assert '"job"' not in "".join(cluster.lines), "the sender's log lines are about the events of all jobs"
    cluster.is_fast.set()
    await events.flush()
    assert len(cluster.messages("flooded")) == MAX_WAITING
