"""The controller in simulated time beside webhooks, proxies and other programs that interfere with its requests."""

import asyncio

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json, condition
from ddpjob_operator.cluster.base import ClusterError, Conflict, Forbidden, Invalid, TooManyRequests, Unavailable
from tests.builders import failed
from tests.controller.bench import Bench, on_bench
from tests.worlds.memory.faulty import Call, Fault


@on_bench
async def test_a_proxy_that_asks_for_a_day_delays_a_job_by_a_minute(bench: Bench) -> None:
    bench.refuse(TooManyRequests("busy", code=429, retry_after=86_400.0), "create", names.PODS, times=1)
    bench.submit()
    await asyncio.sleep(70)
    assert len(bench.pods(1)) == 2


@on_bench
async def test_edits_of_the_metadata_in_each_moment_do_not_delay_a_decision(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Each edit between a read and a write of a job makes the write a conflict."""
    await bench.run_job()
    bench.refuse(Conflict("the object has been modified", code=409), "patch_status", times=15)
    before = bench.sent("patch_status", names.DDPJOBS)
    bench.server.delete(names.PODS, "default", bench.pods(1)[0]["metadata"]["name"], grace_seconds=0)
    await asyncio.sleep(2)
    assert bench.sent("patch_status", names.DDPJOBS) - before > 15 and bench.status()["attempt"] == 2
    assert "another operator" not in caplog.text


@on_bench
async def test_conflicts_with_successes_between_them_do_not_delay_a_decision(bench: Bench) -> None:
    await bench.run_job(restartPolicy={"maxRestarts": 100})
    writes = 0

    def every_second(call: Call) -> Fault | None:
        nonlocal writes
        writes += call.verb == "patch_status"
        is_edited = call.verb == "patch_status" and writes % 2
        return Fault(before=Conflict("the object has been modified", code=409)) if is_edited else None

    bench.rule = every_second
    while writes < 50:
        suspend = not bench.server.get(names.DDPJOBS, "default", "mnist")["spec"].get("suspend")
        bench.server.patch(names.DDPJOBS, "default", "mnist", {"spec": {"suspend": suspend}})
        before = bench.status()
        await asyncio.sleep(0.5)
        assert bench.status() != before


@on_bench
async def test_a_status_that_always_conflicts_is_written_ever_less_often(bench: Bench) -> None:
    bench.refuse(Conflict("a webhook answers 409", code=409), "patch_status")
    bench.submit()
    await asyncio.sleep(600)
    assert bench.sent("patch_status", names.DDPJOBS) < 80


@pytest.mark.parametrize("operators", [1, 2])
@on_bench
async def test_a_second_operator_of_the_namespace_is_logged_once_for_a_job(
    bench: Bench, operators: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen: two operators served a namespace, and no line and no event said so."""
    if operators == 2:
        await bench.begin()
    await bench.run_job()
    bench.server.delete(names.PODS, "default", bench.pods(1)[0]["metadata"]["name"], grace_seconds=0)
    await asyncio.sleep(5)
    assert bench.status()["attempt"] == 2
    lines = [record for record in caplog.records if "another operator" in record.getMessage()]
    assert all(record.levelname == "WARNING" for record in lines)
    assert 1 <= len(lines) <= 2 if operators == 2 else not lines, "each operator says it once for a job"


STRIPPED = {
    "job-uid": ("label ddpjob.dev/job-uid", lambda meta: meta["labels"].pop(names.LABEL_JOB_UID)),
    "attempt": ("label ddpjob.dev/attempt", lambda meta: meta["labels"].update({names.LABEL_ATTEMPT: "x"})),
    "labels": ("label ddpjob.dev/", lambda meta: meta.update(labels={"app": "x"})),
    "owner": ("ownerReferences", lambda meta: meta.pop("ownerReferences")),
    "controller": ("ownerReferences", lambda meta: meta["ownerReferences"][0].pop("controller")),
    "name": ("name", lambda meta: meta.update(name=meta["name"] + "x")),
}


@pytest.mark.parametrize("what", STRIPPED)
@on_bench
async def test_a_pod_that_a_webhook_made_unrecognizable_is_deleted_and_reported(bench: Bench, what: str) -> None:
    field, strip = STRIPPED[what]

    def mutate(resource: names.Resource, obj: Json) -> None:
        if resource is names.PODS:
            strip(obj["metadata"])

    bench.server.mutate = mutate
    bench.submit(numNodes=4)
    await asyncio.sleep(600)
    made = [c.obj for c in bench.history() if c.resource is names.PODS and c.type == "ADDED"]
    assert not [pod for pod in bench.cluster.store.all(names.PODS) if "deletionTimestamp" not in pod["metadata"]]
    assert 4 <= len(made) <= 16, "the delay between two tries grows"
    running = condition(bench.status(), "Running")
    assert running["reason"] == "CreateRefused" and field in running["message"], running
    assert "webhook" in running["message"] and bench.status()["restarts"] == 0
    bench.server.mutate = lambda resource, obj: None
    await asyncio.sleep(600)
    assert len(bench.pods(bench.status()["attempt"])) == 4


@pytest.mark.parametrize(
    "error", [Forbidden("policy denies ddpjobs/status", code=403), Invalid("denied", code=422)], ids=["403", "422"]
)
@on_bench
async def test_no_pod_runs_without_a_record_while_the_status_is_refused(bench: Bench, error: ClusterError) -> None:
    bench.submit("first")
    await asyncio.sleep(2)
    bench.refuse(error, "patch_status")
    bench.submit()
    bench.submit("another")
    await asyncio.sleep(120)
    pods = [pod for pod in bench.cluster.store.all(names.PODS) if "deletionTimestamp" not in pod["metadata"]]
    assert {pod["metadata"]["labels"][names.LABEL_JOB_NAME] for pod in pods} == {"first"}
    events = [e for e in bench.cluster.store.all(names.EVENTS) if e["reason"] == "StatusRefused"]
    assert {e["involvedObject"]["name"] for e in events} == {"mnist", "another"}
    sent = [c for c in bench.calls if c.resource is names.EVENTS and c.body and c.body["reason"] == "StatusRefused"]
    assert error.args[0] in events[0]["message"] and len(sent) == 2, "one event for each job"
    bench.refuse(None)
    await asyncio.sleep(60)
    assert bench.status()["attempt"] == 1 and len(bench.pods(1)) == 6, "two of each job"


@on_bench
async def test_pods_whose_creates_take_longer_than_the_refusal_of_their_status_are_deleted(bench: Bench) -> None:
    bench.submit("first")
    await asyncio.sleep(2)

    def refused(call: Call) -> Fault | None:
        if (call.verb, call.resource) == ("create", names.PODS):
            return Fault(slow_seconds=1)
        return Fault(before=Forbidden("policy", code=403)) if call.verb == "patch_status" else None

    bench.rule = refused
    bench.submit()
    await asyncio.sleep(60)
    assert bench.sent("create", names.PODS) == 4
    assert {pod["metadata"]["labels"][names.LABEL_JOB_NAME] for pod in bench.pods(1)} == {"first"}


@on_bench
async def test_after_a_refused_status_no_pod_is_created_before_its_record_although_others_are_recorded(
    bench: Bench,
) -> None:
    error = Forbidden("policy denies mnist", code=403)
    bench.rule = lambda call: Fault(before=error) if (call.verb, call.name) == ("patch_status", "mnist") else None
    bench.submit("first")
    await asyncio.sleep(2)
    bench.submit()
    for number in range(10):
        await asyncio.sleep(15)
        bench.submit(f"other-{number}")
    await asyncio.sleep(2)
    pods = [c.obj for c in bench.history() if c.resource is names.PODS and c.type == "ADDED"]
    of_mnist = [pod for pod in pods if pod["metadata"]["labels"][names.LABEL_JOB_NAME] == "mnist"]
    assert len(of_mnist) == 2 and len(pods) == 2 * 12, "only the first try was beside the record"


@on_bench
async def test_the_event_of_a_decision_follows_its_requests_and_is_not_lost_when_they_fail(bench: Bench) -> None:
    await bench.run_job()
    before = len(bench.calls)
    bench.refuse(Unavailable("connection reset"), "delete", names.PODS, times=2)
    bench.report(bench.pods(1)[0], failed(1))
    await asyncio.sleep(10)
    assert bench.status()["attempt"] == 2 and bench.sent("delete", names.PODS) > 2
    writes = [(call.verb, call.resource) for call in bench.calls[before:] if call.is_write]
    event, delete = writes.index(("create", names.EVENTS)), writes.index(("delete", names.PODS))
    assert writes.index(("patch_status", names.DDPJOBS)) < delete < event
    assert bench.events().count("Restarting") == 1


@pytest.mark.parametrize("finalizer", ["example.com/backup", "orphan"])
@on_bench
async def test_pods_of_a_deleted_job_end_while_a_finalizer_keeps_it(bench: Bench, finalizer: str) -> None:
    await bench.run_job()
    bench.server.patch(names.DDPJOBS, "default", "mnist", {"metadata": {"finalizers": [finalizer]}})
    bench.server.delete(names.DDPJOBS, "default", "mnist")
    await asyncio.sleep(10)
    if finalizer == "orphan":  # kubectl delete --cascade=orphan
        assert len(bench.pods(1)) == 2
        return
    assert not bench.pods(1) and bench.status()["state"] == "Suspended"
    shown = condition(bench.status(), "Suspended")
    assert (shown["status"], shown["reason"]) == ("True", "Deleting") and finalizer in shown["message"]
    assert bench.status()["restarts"] == 0 and bench.status()["attempt"] == 1
    reconciles = bench.reconciles()
    await asyncio.sleep(600)
    assert not bench.pods(1) and bench.reconciles() - reconciles < 5
    bench.server.patch(names.DDPJOBS, "default", "mnist", {"metadata": {"finalizers": None}})
    await asyncio.sleep(1)
    assert not bench.status()
