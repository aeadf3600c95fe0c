"""A status that the CRD of another release refuses: readiness and an event report it, and nothing is done."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import Invalid
from ddpjob_operator.controller.schema import SchemaMonitor, refused_fields
from tests.builders import a_job, ended, running
from tests.controller.controllers import a_controller, serve
from tests.processes import eventually_async
from tests.worlds.memory.faulty import Call, Fault, FaultyCluster

JOB = Key("default", "mnist")

# As a kube-apiserver 1.34 answers: a merge patch with an unknown field, and one with a value outside an enum.
UNKNOWN_FIELD = (
    'DDPJob.ddpjob.dev "" is invalid: patch: Invalid value: "{\\"env\\":\\"unknown field \\\\\\"x\\\\\\"\\"}": '
    'strict decoding error: unknown field "status.currentAttempt", unknown field "status.nodes.lost"'
)
ENUM = 'DDPJob.ddpjob.dev "mnist" is invalid: status.state: Unsupported value: "Ending": supported values: "Pending"'


def unknown_field() -> Invalid:
    return Invalid(UNKNOWN_FIELD, code=422, details={"causes": [{"field": "patch", "message": "…"}]})


class OtherCrd:
    """A cluster whose CRD refuses every status of a job while ``refuses``."""

    def __init__(self) -> None:
        self.refuses = False
        self.refused = 0
        self.cluster = FaultyCluster(self._fault)
        self.controller = a_controller(self.cluster)

    def _fault(self, call: Call) -> Fault | None:
        if not self.refuses or call.verb != "patch_status" or call.resource is not names.DDPJOBS:
            return None
        self.refused += 1
        return Fault(before=unknown_field())

    def create(self, name: str = JOB.name) -> None:
        job = a_job()
        job["metadata"] = {"name": name}
        self.cluster.server.create(names.DDPJOBS, JOB.namespace, job)

    def report(self, rank: int, status: Json) -> None:
        name = self.pods()[rank]["metadata"]["name"]
        self.cluster.server.patch_status(names.PODS, JOB.namespace, name, {"status": status})

    def pods(self) -> list[Json]:
        return sorted(self.cluster.store.all(names.PODS), key=lambda pod: str(pod["metadata"]["name"]))

    def status(self) -> Json:
        job = self.cluster.store.get(names.DDPJOBS, *JOB)
        return dict((job or {}).get("status") or {})

    def events(self) -> list[Json]:
        return [event for event in self.cluster.store.all(names.EVENTS) if event["reason"] == "StatusRefused"]

    async def until_refused(self, times: int = 3) -> None:
        goal = self.refused + times
        await eventually_async("the operator tried again", lambda: self.refused >= goal)

    @asynccontextmanager
    async def operated(self) -> AsyncIterator[None]:
        task = asyncio.create_task(serve(self.controller, self.cluster.watch))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
async def other() -> OtherCrd:
    return OtherCrd()


async def test_new_job_starts_only_after_its_decision_was_recorded(other: OtherCrd) -> None:
    other.refuses = True
    async with other.operated():
        other.create()
        await other.until_refused()
        assert other.pods() == []
        other.refuses = False
        await eventually_async("the job starts", lambda: len(other.pods()) == 2)


async def test_restart_that_cannot_be_recorded_touches_no_pod(other: OtherCrd) -> None:
    async with other.operated():
        other.create()
        await eventually_async("the pods exist", lambda: len(other.pods()) == 2)
        for rank in (0, 1):
            other.report(rank, running())
        await eventually_async("it runs", lambda: other.status().get("state") == "Running")
        status, names_before = other.status(), [pod["metadata"]["name"] for pod in other.pods()]
        other.refuses = True
        other.report(0, ended(1))
        await other.until_refused()
        assert [pod["metadata"]["name"] for pod in other.pods()] == names_before
        assert not any("deletionTimestamp" in pod["metadata"] for pod in other.pods())
        assert other.status() == status
        other.refuses = False
        await eventually_async("the next attempt", lambda: other.status().get("attempt") == 2)


async def test_pods_are_not_created_beside_a_record_after_a_refusal(other: OtherCrd) -> None:
    async with other.operated():
        other.create()
        await eventually_async("it is recorded", lambda: other.status().get("attempt") == 1)
        await eventually_async("its pods exist", lambda: len(other.pods()) == 2)
        other.refuses = True
        other.report(0, running())
        await other.until_refused(1)
        before = len(other.pods())
        other.create("second")
        await other.until_refused(5)
        made = [change for change in other.cluster.store.changes_after(0) if change.resource is names.PODS]
        assert len([change for change in made if change.type == "ADDED"]) == len(other.pods()) == before
        other.refuses = False
        await eventually_async("the second job starts", lambda: len(other.pods()) == before + 2)


async def test_refused_status_is_reported_until_it_is_written(
    other: OtherCrd, caplog: pytest.LogCaptureFixture
) -> None:
    other.refuses = True
    async with other.operated():
        other.create()
        await other.until_refused()
        ready, why = other.controller.schema.verdict()
        assert not ready
        for part in ("ddpjobs.ddpjob.dev", "status.currentAttempt, status.nodes.lost", "default/mnist", "crd.yaml"):
            assert part in why
        await eventually_async("the event", other.events)
        (event,) = other.events()
        assert (event["type"], event["involvedObject"]["name"]) == ("Warning", "mnist")
        assert "status.currentAttempt" in event["message"] and "crd.yaml" in event["message"]
        assert "the schema refuses status.currentAttempt" in caplog.text
        assert "env" not in caplog.text, "the object, with the user's variables, is not logged"
        other.refuses = False
        await eventually_async("the status is written", lambda: other.status().get("attempt") == 1)
        assert other.controller.schema.verdict() == (True, "ok")


async def test_deleted_job_is_not_reported_any_more(other: OtherCrd) -> None:
    other.refuses = True
    async with other.operated():
        other.create()
        await other.until_refused(1)
        other.cluster.server.delete(names.DDPJOBS, *JOB)
        await eventually_async("it is ready", lambda: other.controller.schema.verdict()[0])


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (unknown_field(), ["status.currentAttempt", "status.nodes.lost"]),
        (Invalid(ENUM, code=422, details={"causes": [{"field": "status.state"}]}), ["status.state"]),
        (Invalid('strict decoding error: unknown field "status.foo"', code=400), ["status.foo"]),
        (Invalid("Request entity too large: limit is 3145728", code=413), []),
        (
            Invalid(
                "metadata.resourceVersion: …", code=422, details={"causes": [{"field": "metadata.resourceVersion"}]}
            ),
            [],
        ),
    ],
    ids=["unknown fields of a patch", "enum", "unknown field", "too large", "metadata"],
)
def test_refused_fields_come_from_the_answer_of_the_api_server(error: Invalid, fields: list[str]) -> None:
    assert refused_fields(error) == fields


def test_each_refusal_is_one_event_and_readiness_counts_the_jobs() -> None:
    monitor = SchemaMonitor()
    assert monitor.note(JOB, ["status.a", "status.b", "status.c", "status.d"]) is not None
    assert monitor.note(JOB, ["status.a", "status.b", "status.c", "status.d"]) is None
    assert monitor.note(Key("default", "other"), ["status.a"]) is not None
    assert "status.a, status.b, status.c of default/mnist and 1 more: apply" in monitor.verdict()[1]
    monitor.clear(JOB)
    assert "status.a of default/other: apply" in monitor.verdict()[1]
    assert monitor.note(JOB, ["status.a"]) is not None
    monitor.clear(JOB)
    monitor.clear(Key("default", "other"))
    assert monitor.verdict() == (True, "ok")
