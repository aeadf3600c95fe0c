"""Jobs in a queue of Kueue, in simulated time: Workloads that cannot be created, or read."""

import asyncio

from ddpjob.api import names
from ddpjob.api.objects import Json, condition
from ddpjob.engine.actions import LOOKUP_SECONDS
from ddpjob_operator.cluster.base import Forbidden, NotFound, NotServed, Unavailable
from ddpjob_operator.controller.workqueue import MAX_DELAY
from tests.controller.bench import Bench, on_bench
from tests.worlds.memory.faulty import Call, Fault


@on_bench
async def test_a_corrected_queue_is_tried_at_once_and_waits_for_no_delay_of_the_one_before(bench: Bench) -> None:
    bench.refuse(Forbidden("workloads is forbidden: no such queue", code=403), "", names.WORKLOADS)
    await bench.restart(kueue=True)
    bench.submit(labels={names.LABEL_QUEUE: "wrong"})
    await asyncio.sleep(1200)
    assert bench.status()["state"] == "Queued"
    corrected = {"metadata": {"labels": {names.LABEL_QUEUE: "right"}}}
    bench.server.patch(names.DDPJOBS, "default", "mnist", corrected)
    await asyncio.sleep(1)
    created = [call for call in bench.calls if (call.verb, call.resource) == ("create", names.WORKLOADS)]
    assert created[-1].body is not None and created[-1].body["spec"]["queueName"] == "right"
    assert len(created) < 20


@on_bench
async def test_only_a_minute_without_workload_ends_the_attempt_of_a_job_that_can_get_none(bench: Bench) -> None:
    """The running job gets a queue, and a priority class that does not exist."""
    none = NotFound("workloads is not found", code=404)
    answers = [
        Unavailable("etcdserver: leader changed", code=500),
        none,
        NotServed("404 page not found", code=404),
        none,
    ]
    await bench.restart(kueue=True)
    await bench.run_job()

    def rule(call: Call) -> Fault | None:
        if call.resource is names.WORKLOADS:
            return Fault(before=answers[0] if call.verb == "get" else Unavailable("busy", code=500))
        is_class = call.resource is names.WORKLOAD_PRIORITIES
        return Fault(before=NotFound("no class high", code=404)) if is_class else None

    bench.rule = rule
    labels: Json = {names.LABEL_QUEUE: "research", names.LABEL_QUEUE_PRIORITY: "high"}
    bench.server.patch(names.DDPJOBS, "default", "mnist", {"metadata": {"labels": labels}})
    await asyncio.sleep(1)
    for _ in range(3):
        reads = bench.sent("get", names.WORKLOADS)
        assert reads and bench.status()["state"] == "Running", answers[0]
        del answers[0]
        await asyncio.sleep(LOOKUP_SECONDS + 1)
        assert bench.sent("get", names.WORKLOADS) > reads
    assert bench.status()["state"] == "Running"
    for value in (dict.fromkeys(labels), labels):
        bench.server.patch(names.DDPJOBS, "default", "mnist", {"metadata": {"labels": value}})
        await asyncio.sleep(LOOKUP_SECONDS + 20 if value is not labels else 1)
    assert bench.status()["state"] == "Running", "it needed no Workload for a minute"
    unanswered = Fault(before=Unavailable("the API server is away", code=503))
    bench.rule = lambda call: unanswered if call.resource is names.DDPJOBS else rule(call)
    bench.server.patch(names.DDPJOBS, "default", "mnist", {"metadata": {"labels": labels | {"changed": "now"}}})
    await asyncio.sleep(3600)
    bench.rule = rule
    reads = bench.sent("get", names.WORKLOADS)
    await asyncio.sleep(MAX_DELAY + 1)
    assert bench.sent("get", names.WORKLOADS) > reads
    assert bench.status()["state"] == "Running", "nothing was asked for an hour"
    await asyncio.sleep(LOOKUP_SECONDS + 1)
    assert (bench.status()["state"], bench.status()["restarts"]) == ("Queued", 0) and not bench.pods(1)


@on_bench
async def test_a_workload_of_another_owner_is_no_workload_of_the_job(bench: Bench) -> None:
    """It has the name of the running job's, which gets a queue, and a priority class that does not exist."""
    await bench.restart(kueue=True)
    job = await bench.run_job()
    name = names.service_name("mnist", job["metadata"]["uid"])
    bench.cluster.store.put(names.WORKLOADS, {"metadata": {"name": name, "namespace": "default", "uid": "other"}})
    bench.refuse(NotFound("no class high", code=404), "", names.WORKLOAD_PRIORITIES)
    labels = {names.LABEL_QUEUE: "research", names.LABEL_QUEUE_PRIORITY: "high"}
    bench.server.patch(names.DDPJOBS, "default", "mnist", {"metadata": {"labels": labels}})
    await asyncio.sleep(1)
    assert condition(bench.status(), "Running")["reason"] == "QueueUnavailable"
    assert bench.status()["state"] == "Running", "there may be a Workload"
    await asyncio.sleep(2 * LOOKUP_SECONDS)
    assert bench.status()["state"] == "Queued" and not bench.pods(1)
