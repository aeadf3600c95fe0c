"""The controller in simulated time: refused and lost requests, and what they cost."""

import asyncio
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, condition
from ddpjob.engine.actions import Create
from ddpjob.engine.desired import DesiredPods
from ddpjob_operator.cluster.base import (
    Forbidden,
    Unauthorized,
    Unavailable,
)
from ddpjob_operator.controller.reconcile import RECORD_SECONDS
from tests.api.specs import CLAIM
from tests.builders import failed, running
from tests.controller.bench import Bench, on_bench
from tests.worlds.memory.api_errors import modified
from tests.worlds.memory.faulty import Call, Fault, lost_answer

FOREIGN: dict[Resource, Json] = {
    names.SERVICES: {"clusterIP": "None", "selector": {"of": "another"}},
    names.NETWORK_POLICIES: {"podSelector": {}},
    names.CLAIMS: CLAIM["spec"],
}


@pytest.mark.parametrize("seconds", [0.0, 5.0])
@on_bench
async def test_no_pod_is_created_again_that_was_lost_while_others_are_created(bench: Bench, seconds: float) -> None:
    """The create of another pod fails after some seconds: the pod is lost after its failure, or while it is sent."""
    create = bench.cluster.create

    async def fail(resource: Resource, namespace: str, body: Json) -> Json:
        if resource is names.PODS and body["metadata"]["name"].endswith("-1-2"):
            await asyncio.sleep(seconds)
            raise Unavailable("webhook is down", code=500)
        return await create(resource, namespace, body)

    bench.cluster.create = fail  # type: ignore[method-assign]
    bench.submit(numNodes=3)
    await asyncio.sleep(0.5)
    assert len(bench.pods(1)) == 2 and bench.status()["attempt"] == 1
    bench.server.delete(names.PODS, "default", bench.pods(1)[0]["metadata"]["name"], grace_seconds=0)
    await asyncio.sleep(10)
    assert bench.status()["attempt"] == 2 and bench.status()["restarts"] == 0
    ranks = [c.obj["metadata"]["name"] for c in bench.history() if c.resource is names.PODS and c.type == "ADDED"]
    assert len(set(ranks)) == len(ranks), "a pod was created twice"


@on_bench
async def test_creates_end_when_more_fail_than_succeed(bench: Bench) -> None:
    bench.refuse(Unavailable("webhook is down", code=500), "create", names.PODS)
    bench.submit(numNodes=1000)
    await asyncio.sleep(0.5)
    assert bench.sent("create", names.PODS) <= 64, "at most those that were sent at once"
    assert condition(bench.status(), "Running")["reason"] == "CreateFailed"
    bench.refuse(None)
    await asyncio.sleep(3)
    assert len(bench.pods(1)) == 1000


@pytest.mark.parametrize("conflicts", [1, 20])
@on_bench
async def test_conflict_of_a_delete_hides_no_live_pod(bench: Bench, conflicts: int) -> None:
    """The API server, or an admission webhook, answers 409 although the pod exists with the same uid."""
    await bench.run_job()

    bench.refuse(modified(names.PODS, "mnist"), "delete", names.PODS, times=conflicts)
    lasts = conflicts > 1
    bench.report(bench.pods(1)[1], failed(1))
    await asyncio.sleep(3)
    stalled = condition(bench.status(), "Stalled")
    assert (stalled["status"], stalled["reason"] == "DeleteRefused") == (str(lasts), lasts), stalled
    assert len(bench.pods(1)) == 1 + lasts
    await asyncio.sleep(1000)
    assert [p["metadata"]["name"][-4:] for p in bench.pods(1)] == ["-1-1"], "the ended pod is kept"
    assert condition(bench.status(), "Stalled")["status"] == "False"


@pytest.mark.parametrize("number", range(1, 7))
@on_bench
async def test_lost_reply_of_a_status_write_loses_no_event_and_no_count(bench: Bench, number: int) -> None:
    lost = 0

    def rule(call: Call) -> Fault | None:
        nonlocal lost
        if call.verb != "patch_status" or call.resource is not names.DDPJOBS:
            return None
        lost += 1
        return lost_answer(call.verb) if lost == number else None

    bench.rule = rule
    await bench.run_job(restartPolicy={"maxRestarts": 1})
    bench.report(bench.pods(1)[1], failed(1))
    await asyncio.sleep(5)
    await bench.run_all(2)
    bench.report(bench.pods(2)[1], failed(1))
    await asyncio.sleep(10)
    assert lost >= number
    assert sorted(bench.events()) == ["Failed", "Restarting", "Running", "Running", "Started"]
    counts = bench.metrics.render().decode()
    assert "ddpjob_attempts_total 2.0" in counts and 'ddpjob_restarts_total{counted="true"} 1.0' in counts


@on_bench
async def test_a_job_with_the_name_of_a_deleted_one_has_no_memory_of_its_creates(bench: Bench) -> None:
    await bench.run_job()
    bench.server.delete(names.DDPJOBS, "default", "mnist")
    for pod in bench.cluster.store.all(names.PODS):  # or the next job waits for their end
        bench.server.delete(names.PODS, "default", pod["metadata"]["name"], grace_seconds=0)
    bench.submit()
    refused = Forbidden("exceeded quota", code=403)
    bench.rule = lambda call: (
        Fault(before=refused) if (call.verb, call.resource) == ("create", names.PODS) and call.name[-1] == "1" else None
    )
    await asyncio.sleep(30)
    shown = bench.status()
    assert (shown["restarts"], condition(shown, "Running")["reason"]) == (0, "CreateRefused")
    bench.refuse(None)
    await asyncio.sleep(60)
    assert bench.status()["restarts"] == 0 and len(bench.pods(bench.status()["attempt"])) == 2


@pytest.mark.parametrize("resource", [names.SERVICES, names.NETWORK_POLICIES, names.CLAIMS])
@pytest.mark.parametrize("verdict", ["NameConflict", "NameTerminating"])
@on_bench
async def test_name_that_another_object_has_costs_few_pods(bench: Bench, verdict: str, resource: Resource) -> None:
    """It is another owner's, or a finalizer holds it. Seen: 259 pods in ten minutes; pods held their GPUs for ever."""
    held = bench.submit(numNodes=8, suspend=True, checkpoint={"claimTemplate": CLAIM}, networkPolicy="Isolated")
    own = names.service_name("mnist", held["metadata"]["uid"])
    name = names.claim_name("mnist") if resource is names.CLAIMS else own
    is_held = verdict == "NameTerminating"
    meta = {
        "name": name,
        "finalizers": ["ddpjob.dev/test"] if is_held else [],
        "labels": {names.LABEL_JOB_NAME: "other"},
    }
    head = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta}
    bench.server.create(resource, "default", head | {"spec": FOREIGN[resource]})
    if is_held:
        bench.server.delete(resource, "default", name)
    bench.server.patch(names.DDPJOBS, "default", "mnist", {"spec": {"suspend": False}})
    await asyncio.sleep(30)
    attempt = bench.status()["currentAttempt"]
    assert (attempt["phase"], attempt["ending"]["verdict"]) == ("Ending", verdict)
    await asyncio.sleep(570)
    assert not [pod for pod in bench.cluster.store.all(names.PODS) if "deletionTimestamp" not in pod["metadata"]]
    assert bench.sent("create", names.PODS) <= (8 if is_held else 16)
    assert bench.sent("create", resource) <= 11, "1, 2, 4, ... 600 s"
    assert bench.status()["restarts"] == 0
    if is_held:
        bench.server.patch(resource, "default", name, {"metadata": {"finalizers": None}})
    else:
        bench.server.delete(resource, "default", name)
    await asyncio.sleep(620)
    assert len(bench.pods(bench.status()["attempt"])) == 8


@on_bench
async def test_job_in_a_namespace_that_is_being_deleted_costs_few_requests(bench: Bench) -> None:
    """Each pod that ends wakes the job. Seen: 7,040 creates of the next attempt's 100 pods, all refused."""
    await bench.run_job(numNodes=100)
    created, pods = bench.sent("create", names.PODS), bench.pods(1)
    bench.server.terminating.add("default")
    for pod in pods:
        bench.server.delete(names.PODS, "default", pod["metadata"]["name"])
    for pod in pods:
        bench.report(pod, failed(143))
        await asyncio.sleep(0.02)
    for pod in pods:
        bench.server.delete(names.PODS, "default", pod["metadata"]["name"], grace_seconds=0)
        await asyncio.sleep(0.02)
    await asyncio.sleep(30)
    assert not bench.status(), "the job is deleted after its pods"
    assert 0 < bench.sent("create", names.PODS) - created <= 200


@pytest.mark.parametrize("state", ["Pending", "Running", "Suspended", "Failed"])
@on_bench
async def test_no_reconcile_at_rest(bench: Bench, state: str) -> None:
    bench.submit(activeDeadlineSeconds=10_000_000, restartPolicy={"maxRestarts": 0})
    await asyncio.sleep(1)
    match state:
        case "Running":
            await bench.run_all()
        case "Suspended":
            spec = {"suspend": True, "activeDeadlineSeconds": 1}
            bench.server.patch(names.DDPJOBS, "default", "mnist", {"spec": spec})
        case "Failed":
            await bench.run_all()
            bench.report(bench.pods(1)[0], failed(1))
    await asyncio.sleep(30)
    before = bench.reconciles()
    assert before > 1
    await asyncio.sleep(3600)
    assert bench.reconciles() == before


@on_bench
async def test_backoff_after_an_outage_ends_with_the_first_success(bench: Bench) -> None:
    """Seen: a job whose status was refused for a minute took 30 s for each later conflict."""
    bench.submit()
    await asyncio.sleep(1)
    bench.refuse(Unavailable("connection refused"), "patch_status")
    bench.start(bench.pods(1))
    await asyncio.sleep(300)
    bench.refuse(None)
    await asyncio.sleep(40)
    assert bench.status()["state"] == "Running"
    bench.refuse(Unavailable("connection refused"), "patch_status", times=1)
    bench.report(bench.pods(1)[1], failed(1))
    await asyncio.sleep(1)
    assert bench.status()["attempt"] == 2


@on_bench
async def test_pod_lost_during_an_outage_is_not_created_again_beside_its_peer(bench: Bench) -> None:
    """The reply to the last create is lost, then no status can be written, and meanwhile a pod is lost."""

    def lose_reply(call: Call) -> Fault | None:
        if call.verb == "create" and call.name.endswith("-1-1"):
            bench.refuse(Unavailable("connection refused"), "patch_status")
            return lost_answer(call.verb)
        return None

    bench.rule = lose_reply
    bench.submit()
    await asyncio.sleep(5)
    first, second = sorted(bench.pods(1), key=lambda pod: str(pod["metadata"]["name"]))
    bench.report(first, running(podIP="192.0.2.1"))
    bench.server.delete(names.PODS, "default", second["metadata"]["name"], grace_seconds=0)
    bench.refuse(None)
    await asyncio.sleep(60)
    assert len(bench.pods(bench.status()["attempt"])) == 2
    made = [c.obj["metadata"]["name"] for c in bench.history() if c.type == "ADDED" and c.resource is names.PODS]
    assert len(made) == len(set(made)), made


@on_bench
async def test_refused_delete_is_forgotten_when_nothing_is_left_to_delete(bench: Bench) -> None:
    await bench.run_job()
    bench.refuse(Forbidden("denied by policy", code=403), "delete", names.PODS)
    survivor = bench.pods(1)[0]
    bench.report(bench.pods(1)[1], failed(1))
    await asyncio.sleep(3)
    bench.report(survivor, failed(77, cause="peer"))
    await asyncio.sleep(1)
    await bench.run_all(2)
    await asyncio.sleep(1000)
    (stalled,) = [c for c in bench.status()["conditions"] if c["type"] == "Stalled"]
    assert stalled["status"] == "False"


def slow_pods(bench: Bench, seconds: float) -> dict[str, float]:
    """Let each POST of a pod take so long; return the times at which the first requests of each kind are sent."""
    times: dict[str, float] = {}
    create, patch_status = bench.cluster.create, bench.cluster.patch_status

    async def slow_create(resource: Resource, namespace: str, body: Json) -> Json:
        times.setdefault(resource.kind, asyncio.get_running_loop().time())
        if resource is names.PODS:
            await asyncio.sleep(seconds)
        return await create(resource, namespace, body)

    async def timed_patch(resource: Resource, namespace: str, name: str, body: Json) -> Json:
        times.setdefault("status", asyncio.get_running_loop().time())
        return await patch_status(resource, namespace, name, body)

    bench.cluster.create = slow_create  # type: ignore[method-assign]
    bench.cluster.patch_status = timed_patch  # type: ignore[method-assign]
    return times


@pytest.mark.parametrize(("seconds", "waited"), [(0.02, 0.02), (5.0, RECORD_SECONDS)])
@on_bench
async def test_status_of_a_first_attempt_follows_its_pods_but_waits_little(
    bench: Bench, seconds: float, waited: float
) -> None:
    """Before the operator has written any status, the record comes first; so one job runs before."""
    bench.submit("first")
    await asyncio.sleep(5)
    times = slow_pods(bench, seconds)
    bench.submit(numNodes=8)
    await asyncio.sleep(seconds + 1)
    assert times["status"] - times["Pod"] == pytest.approx(waited, abs=0.001)
    assert times["Service"] - times["Pod"] == pytest.approx(seconds, abs=0.001)
    assert len(bench.pods(1)) == 8 + 2


@on_bench
async def test_large_job_is_rendered_while_it_is_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = 0

    def count(self: DesiredPods, index: int) -> Create:
        nonlocal rendered
        rendered += 1
        return read(self, index)

    read: Any = DesiredPods.__getitem__
    monkeypatch.setattr(DesiredPods, "__getitem__", count)
    bench.submit("first")
    await asyncio.sleep(5)
    slow_pods(bench, 1.0)
    before = rendered
    bench.submit(numNodes=500)
    await asyncio.sleep(0.5)
    assert 0 < rendered - before <= 100
    await asyncio.sleep(30)
    assert len(bench.pods(1)) == 500 + 2


@on_bench
async def test_service_without_labels_completes_the_attempt_after_a_restart_of_the_operator(bench: Bench) -> None:
    """No LIST returns it, so it is created again and adopted. Only then does the phase Creating end."""
    await bench.run_job(numNodes=1)
    await bench.end()
    (service,) = bench.cluster.store.all(names.SERVICES)
    labels = dict.fromkeys(service["metadata"]["labels"])
    bench.server.patch(names.SERVICES, "default", service["metadata"]["name"], {"metadata": {"labels": labels}})
    creating = bench.status()["currentAttempt"] | {"phase": "Creating", "allRunningTime": None}
    bench.server.patch_status(names.DDPJOBS, "default", "mnist", {"status": {"currentAttempt": creating}})
    await bench.begin()
    await asyncio.sleep(5)
    assert (bench.status()["state"], bench.status()["currentAttempt"]["phase"]) == ("Running", "Running")


@on_bench
async def test_refused_repair_of_a_service_stays_in_the_status_and_is_tried_again_after_an_edit(bench: Bench) -> None:
    await bench.run_job()
    bench.refuse(Forbidden("services is forbidden", code=403), "patch", names.SERVICES)
    (service,) = bench.cluster.store.all(names.SERVICES)
    edit = {"spec": {"publishNotReadyAddresses": False}}
    bench.server.patch(names.SERVICES, "default", service["metadata"]["name"], edit)
    await asyncio.sleep(1)
    for _ in range(300):
        await asyncio.sleep(0.2)
        assert condition(bench.status(), "Stalled").get("reason") == "ChangeRefused"
    await asyncio.sleep(1200)
    bench.refuse(None)
    bench.server.patch(names.DDPJOBS, "default", "mnist", {"spec": {"restartPolicy": {"maxRestarts": 7}}})
    await asyncio.sleep(2)
    (service,) = bench.cluster.store.all(names.SERVICES)
    assert service["spec"]["publishNotReadyAddresses"], "the edit ended a delay of up to ten minutes"


@on_bench
async def test_live_pods_are_listed_after_a_create_whose_effect_is_not_known(bench: Bench) -> None:
    bench.submit("first")  # before the operator has written a status, no create is sent beside one
    await asyncio.sleep(1)
    before = len(bench.calls)
    bench.refuse(Unauthorized("the token expired", code=401), "create", names.PODS, times=1)
    bench.submit(numNodes=3)
    await asyncio.sleep(5)
    assert len(bench.pods(1)) == 3 + 2
    calls = [(call.verb, call.namespace) for call in bench.calls[before:] if call.resource is names.PODS]
    assert ("list", "default") in calls, calls


@on_bench
async def test_job_whose_cached_status_lacked_fields_is_planned_again(bench: Bench) -> None:
    """It was read while the CRD was replaced, so the status patch changes nothing."""
    await bench.run_job()
    bench.server.patch(names.DDPJOBS, "default", "mnist", {"spec": {"restartPolicy": {"maxRestarts": 7}}})
    await asyncio.sleep(0.3)  # within the second in which status.time was written
    job = bench.server.get(names.DDPJOBS, "default", "mnist")
    assert job["status"].pop("observedGeneration") == 2
    before = bench.reconciles()
    bench.controllers[0].cache.put(names.DDPJOBS, job, same_version=True)
    await asyncio.sleep(10)
    assert bench.reconciles() == before + 2


@pytest.mark.parametrize(
    ("resource", "spec", "operators"),
    [
        (names.SERVICES, {"publishNotReadyAddresses": False}, 1),
        (names.SERVICES, {"publishNotReadyAddresses": False}, 2),
        (names.NETWORK_POLICIES, {"ingress": [{}]}, 1),
    ],
    ids=["Service", "Service-two-operators", "NetworkPolicy"],
)
@on_bench
async def test_object_that_another_program_edits_again_each_time_is_patched_ever_less_often(
    bench: Bench, resource: Resource, spec: Json, operators: int
) -> None:
    """An admission webhook spoils each version, so that each PATCH makes a new one, which the watches show first."""
    patch, patch_slowly = bench.server.patch, bench.cluster.patch
    patches: list[float] = []

    def is_whole() -> bool:
        (made,) = bench.cluster.store.all(resource)
        return all(made["spec"].get(key) != value for key, value in spec.items())

    def spoiled(kind: Resource, namespace: str, name: str, body: Json) -> Json:
        if kind is resource and len(patches) < 1000:
            patches.append(asyncio.get_running_loop().time())
            stamp = {"annotations": {"edit": str(len(patches))}}
            body = body | {"metadata": body["metadata"] | stamp, "spec": spec}
        return patch(kind, namespace, name, body)

    async def slow(kind: Resource, namespace: str, name: str, body: Json) -> Json:
        answer = await patch_slowly(kind, namespace, name, body)
        await asyncio.sleep(0.01)
        return answer

    for _ in range(1, operators):
        await bench.begin()
    await bench.run_job(networkPolicy="Isolated")
    bench.server.patch = spoiled  # type: ignore[method-assign]
    bench.cluster.patch = slow  # type: ignore[method-assign]
    (made,) = bench.cluster.store.all(resource)
    edited = asyncio.get_running_loop().time()
    patch(resource, "default", made["metadata"]["name"], {"spec": spec})
    await asyncio.sleep(1)
    assert patches[0] - edited < 0.1
    reconciles = bench.reconciles()
    await asyncio.sleep(10 * 3600)
    assert len(patches) <= operators * 75, "1, 2, 4, ... 600 s"
    assert bench.reconciles() - reconciles <= 3 * len(patches)

    bench.server.patch = patch  # type: ignore[method-assign]
    await asyncio.sleep(700)
    assert is_whole()
    await asyncio.sleep(700)
    patch(resource, "default", made["metadata"]["name"], {"spec": spec})
    await asyncio.sleep(1)
    assert is_whole(), "one more edit is repaired at once"
