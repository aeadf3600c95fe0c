"""The stories of a job that faults are injected into, by name. Each script acts as user, nodes and control plane."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.builders import ended, failed
from tests.engine.test_plain_scripts import BLOCK, PEER_LOST, VALUE_ERROR, log
from tests.simulator.kubelets import CULPRIT
from tests.simulator.simulation import KEY, Simulation, now
from tests.worlds.memory.faulty import Call
from tests.worlds.memory.store import Change

Script = Callable[[Simulation], Awaitable[None]]
FATES: dict[str, Script] = {}
SCENARIOS: dict[str, "Scenario"] = {}
STEPS_IN_RANDOM_STORY = 4
NOTICE_SECONDS = 60.0
"""For how long a pod that is about to go shows why: longer than any watch is late and any operator is down."""


@dataclass(frozen=True)
class Scenario:
    """A job and what happens to it.

    script: ends when the job is finished or deleted. spec: of the job. world: more options of ``Simulation``.
    compares: what faults must leave unchanged. "outcome": also the number of created and deleted objects; "story": only
    how the job ended; "nothing": the job is deleted at a time that depends on the faults.
    refused: requests that have no effect even without faults.
    is_variant: the same course as another scenario, by another setting: each write gets one kind of fault, not all.
    """

    script: Script
    spec: Json = field(default_factory=dict)
    compares: Literal["outcome", "story", "nothing"] = "outcome"
    refused: int = 0
    is_variant: bool = False
    world: Mapping[str, Any] = field(default_factory=dict)

    @property
    def full_spec(self) -> Json:
        return {"image": "trainer:1", "numNodes": 2, "restartPolicy": {"maxRestarts": 3}} | self.spec


def _scenario(name: str, **options: Any) -> Callable[[Script], Script]:
    """Register a scenario. options: the other fields of ``Scenario``."""

    def register(script: Script) -> Script:
        SCENARIOS[name] = Scenario(script, **options)
        return script

    return register


def _fate(
    name: str, *, is_random: bool = True, compares: Literal["outcome", "story"] = "outcome"
) -> Callable[[Script], Script]:
    """Register what ends an attempt. By itself it is a scenario too: the job is created, meets it, and succeeds.

    is_random: whether random stories contain it; what it leads to must not depend on the backoff between restarts.
    compares: as in ``Scenario``.
    """

    def register(fate: Script) -> Script:
        async def script(sim: Simulation) -> None:
            sim.create_job()
            await fate(sim)
            await succeed(sim)

        if is_random:
            FATES[name] = fate
        SCENARIOS[name] = Scenario(script, compares=compares)
        return fate

    return register


async def succeed(sim: Simulation) -> None:
    """All nodes of an attempt succeed."""
    pods = await sim.running_attempt()
    await sim.in_any_order(*(partial(sim.kubelets.report, pod, ended(0, at=now())) for pod in pods.values()))
    await sim.until("the job is finished", sim.is_finished)


async def random_story(sim: Simulation) -> None:
    """Some random fates one after the other, then success; the job may also use up its restarts."""
    sim.create_job()
    fates = [sim.chance.choice(sorted(FATES)) for _ in range(sim.chance.randrange(STEPS_IN_RANDOM_STORY))]
    for fate in fates:
        sim.log.append(f"{now():%H:%M:%S} {fate}")
        await FATES[fate](sim)
    await succeed(sim)
    if "ttlSecondsAfterFinished" in sim.spec:
        await sim.until("the job is gone", lambda: sim.job() is None)


_CLAIM = {"resources": {"requests": {"storage": "1Gi"}}, "accessModes": ["ReadWriteMany"]}
CHECKPOINT: Json = {"checkpoint": {"claimTemplate": {"spec": _CLAIM}}}


@_scenario("success", spec=CHECKPOINT)
async def _success(sim: Simulation) -> None:
    sim.create_job()
    await succeed(sim)


@_fate("rank-failure")
async def _rank_failure(sim: Simulation) -> None:
    """One rank fails, its peers report that they lost it."""
    await _fails(sim, failed(1, cause="own", at=now()))


@_fate("out-of-memory")
async def _out_of_memory(sim: Simulation) -> None:
    await _fails(sim, ended(137, reason="OOMKilled", at=now()))


@_fate("eviction")
async def _eviction(sim: Simulation) -> None:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    message = "The node was low on resource: memory."
    await _fails(sim, {"phase": "Failed", "reason": "Evicted", "message": message, "conditions": [condition]})


@_fate("rank-failure-without-report")
async def _rank_failure_without_report(sim: Simulation) -> None:
    """No pod reports a cause: torchrun ends with 1 on every node. Only the logs show the exception, on node 1."""
    logs = log(CULPRIT, VALUE_ERROR), log(0, PEER_LOST)
    await _fails(sim, _ended_under_torchrun(CULPRIT), peers=_ended_under_torchrun(0), logs=logs)


@_fate("node-loss")
async def _node_loss(sim: Simulation) -> None:
    """A node is removed with its pod; the peers notice that they lost it."""
    if pods := await sim.running_attempt():
        attempt = sim.attempt()
        peers = _reports_of_peers(sim, pods, failed(77, cause="peer", at=now()))
        await sim.in_any_order(partial(sim.kubelets.remove, pods[1]), *peers)
        await sim.next_attempt(attempt)


@_fate("unreachable-node")
async def _unreachable_node(sim: Simulation) -> None:
    """A node does not respond, so its pod is deleted but never stops. It responds again in the next attempt."""
    if pods := await sim.running_attempt():
        attempt = sim.attempt()
        sim.kubelets.cut_off(pods[1])
        sim.kubelets.mark_lost(pods[1])
        await sim.next_attempt(attempt)
        await sim.running_attempt()
        sim.kubelets.reconnect()


@_fate("pod-deletion")
async def _pod_deletion(sim: Simulation) -> None:
    """Somebody deletes a pod; all pods save a checkpoint before the next attempt starts."""
    if pods := await sim.running_attempt():
        attempt = sim.attempt()
        sim.server.delete(names.PODS, KEY.namespace, pods[1]["metadata"]["name"])
        await sim.next_attempt(attempt)


@_fate("node-loss-noticed-late")
async def _node_loss_noticed_late(sim: Simulation) -> None:
    """A node stops to respond, its peers report that they lost it, and the control plane notices 50 s later."""
    if pods := await sim.running_attempt():
        attempt = sim.attempt()
        sim.kubelets.cut_off(pods[1])
        await sim.in_any_order(*_reports_of_peers(sim, pods, failed(77, cause="peer", at=now())))
        await sim.next_attempt(attempt)
        await sim.pause(50.0)
        sim.kubelets.mark_lost(pods[1])
        await sim.pause(NOTICE_SECONDS)
        await sim.running_attempt()
        sim.kubelets.reconnect()


@_fate("suspension")
async def _suspension(sim: Simulation) -> None:
    await sim.running_attempt()
    if not sim.is_finished():
        sim.patch_job(suspend=True)
        await _resume(sim)


@_fate("suspension-beside-a-failure", is_random=False)
async def _suspension_beside_a_failure(sim: Simulation) -> None:
    """The user suspends the job just before the operator records the next attempt."""
    if pods := await sim.running_attempt():
        attempt = sim.attempt()
        sim.on_call(partial(_records_attempt, attempt + 1), partial(sim.patch_job, suspend=True))
        sim.kubelets.report(pods[1], failed(1, cause="own", at=now()))
        await sim.until("the user has suspended the job", lambda: _is_to_suspend(sim) or sim.is_finished())
        if not sim.is_finished():
            await _resume(sim)


@_fate("node-removed-after-success")
async def _node_removed_after_success(sim: Simulation) -> None:
    """A node succeeds and is removed while another still trains."""
    if pods := await sim.running_attempt():
        sim.kubelets.report(pods[0], ended(0, at=now()))
        await sim.until("the success is recorded", lambda: 0 in sim.status().get("succeededNodes", ()))
        sim.kubelets.remove(pods[0])
        await sim.pause(10.0)
        for node_rank in sorted(pods)[1:]:
            sim.kubelets.report(pods[node_rank], ended(0, at=now()))
        await sim.until("the job is finished", sim.is_finished)


@_scenario("restarts-used-up", spec={"restartPolicy": {"maxRestarts": 1}})
async def _restarts_used_up(sim: Simulation) -> None:
    sim.create_job()
    await _rank_failure(sim)
    await _rank_failure_without_report(sim)
    assert sim.is_finished()


@_scenario("refund-of-the-second-restart")
async def _refund_of_the_second_restart(sim: Simulation) -> None:
    """Of two restarts the second one does not count, because its node proves lost."""
    sim.create_job()
    await _rank_failure(sim)
    await _node_loss_noticed_late(sim)
    await succeed(sim)


@_scenario("reset-of-the-budget", spec={"restartPolicy": {"maxRestarts": 1}})
async def _reset_of_the_budget(sim: Simulation) -> None:
    """An attempt makes progress before it fails."""
    sim.create_job()
    await _rank_failure(sim)
    await sim.running_attempt()
    await sim.pause(700.0)
    await _rank_failure(sim)
    await succeed(sim)


@_scenario("deadline", spec={"activeDeadlineSeconds": 600})
async def _deadline(sim: Simulation) -> None:
    """The training takes longer than the job's deadline."""
    sim.create_job()
    await sim.running_attempt()
    await sim.until("the job is finished", sim.is_finished)


@_scenario("hang", spec={"progressDeadlineSeconds": 300})
async def _hang(sim: Simulation) -> None:
    """Rank 0 responds, but makes no step."""
    sim.create_job()
    await sim.running_attempt()
    await sim.next_attempt(sim.attempt())
    await succeed(sim)


@_scenario("startup-deadline", spec={"startupDeadlineSeconds": 120})
async def _startup_deadline(sim: Simulation) -> None:
    """The pods never start."""
    sim.create_job()
    await sim.until("the job is finished", sim.is_finished)


@_scenario("requested-restart")
async def _requested_restart(sim: Simulation) -> None:
    """The user sets spec.restartedAt."""
    sim.create_job()
    if await sim.running_attempt():
        attempt = sim.attempt()
        sim.patch_job(restartedAt="2026-03-01T12:30:00Z")
        await sim.next_attempt(attempt)
    await succeed(sim)


@_scenario("deletion-during-creation", compares="nothing", refused=2)
async def _deletion_during_creation(sim: Simulation) -> None:
    """The user deletes the job just before its second pod is created."""
    sim.create_job()
    sim.on_store(_is_pod, sim.delete_job)
    await sim.until("the job is gone", lambda: sim.job() is None)


@_scenario("time-to-live", spec={"ttlSecondsAfterFinished": 30})
async def _time_to_live(sim: Simulation) -> None:
    sim.create_job()
    await succeed(sim)
    done = now()
    await sim.until("the job is gone", lambda: sim.job() is None)
    assert (now() - done).total_seconds() >= 25, "the job was deleted before its time to live had passed"


@_scenario("time-to-live-of-a-replaced-job", compares="story", spec={"ttlSecondsAfterFinished": 30})
async def _time_to_live_of_a_replaced_job(sim: Simulation) -> None:
    """The user deletes the job and creates another of its name just before the operator deletes it."""
    sim.create_job()
    uid = (sim.job() or {})["metadata"]["uid"]

    def replace() -> None:
        if sim.job() is not None:
            sim.delete_job()
        sim.create_job()

    sim.on_call(lambda call: call.verb == "delete" and call.resource is names.DDPJOBS, replace)
    await succeed(sim)
    await sim.until("the job is replaced", lambda: _uid(sim) not in (uid, None))
    new = _uid(sim)
    await sim.pause(10.0)
    assert _uid(sim) == new, "a job was deleted in place of its namesake"
    await succeed(sim)


@_scenario("name-conflict", refused=1)
async def _name_conflict(sim: Simulation) -> None:
    """A pod that does not belong to the job has the name of one."""
    job = sim.create_job()
    name = names.pod_name(KEY.name, job["metadata"]["uid"], 1, 1)
    pod = {"metadata": {"name": name}, "spec": {"containers": [{"name": "web", "image": "web:1"}]}}
    foreign = sim.server.create(names.PODS, KEY.namespace, pod)
    await succeed(sim)
    kept = sim.store.get(names.PODS, KEY.namespace, name)
    assert kept is not None, "a pod that does not belong to the job was deleted"
    assert kept["metadata"]["uid"] == foreign["metadata"]["uid"]
    sim.kubelets.remove(foreign)


@_scenario("quota", compares="story")
async def _quota(sim: Simulation) -> None:
    """A quota allows one of two pods, until the operator has given up the second attempt."""
    sim.quota = 1
    sim.on_store(partial(_closes_attempt, 2), partial(setattr, sim, "quota", None))
    sim.create_job()
    await succeed(sim)


@_scenario("avoided-node", is_variant=True)
async def _avoided_node(sim: Simulation) -> None:
    """Two crashes on one node: the next attempt runs on another."""
    sim.create_job()
    await _crashes_twice(sim)
    await sim.running_attempt()
    assert _node_of(sim, 1) == "spare-1", "the pod runs on the node to avoid"
    await succeed(sim)


@_scenario("avoided-node-is-the-only-one", is_variant=True, compares="story")
async def _avoided_node_is_the_only_one(sim: Simulation) -> None:
    """Two crashes on one node, and no other fits: after half a minute it is used again."""
    sim.kubelets.has_spares = False
    sim.create_job()
    await _crashes_twice(sim)
    await sim.running_attempt()
    assert _node_of(sim, 1) == "worker-1", "the pod does not run on the only node"
    await succeed(sim)


@_scenario("retention-of-all-pods", is_variant=True, spec={"podRetention": "All"})
async def _retention_of_all_pods(sim: Simulation) -> None:
    """Two attempts fail; the pods that ended by themselves are all kept."""
    sim.create_job()
    kept = []
    for _ in range(2):
        kept.append(names.pod_name(KEY.name, str(_uid(sim)), sim.attempt() or 1, 1))
        await _rank_failure(sim)
        await sim.running_attempt()
    await succeed(sim)
    await sim.pause(NOTICE_SECONDS)
    assert all(sim.store.get(names.PODS, KEY.namespace, name) for name in kept), "a pod to keep was deleted"


@_scenario("isolated", is_variant=True, spec={"networkPolicy": "Isolated"})
async def _isolated(sim: Simulation) -> None:
    """An attempt fails; while the next one runs, a user deletes the NetworkPolicy. The last attempt succeeds."""
    sim.create_job()
    await _rank_failure(sim)
    await sim.running_attempt()
    (policy,) = sim.store.all(names.NETWORK_POLICIES)
    sim.server.delete(names.NETWORK_POLICIES, KEY.namespace, policy["metadata"]["name"])
    await sim.until("the policy is there again", lambda: any(True for _ in sim.store.all(names.NETWORK_POLICIES)))
    await succeed(sim)


@_fate("late-secret")
async def _late_secret(sim: Simulation) -> None:
    """A Secret is missing for less time than the operator waits for it."""
    await sim.until("all pods exist", lambda: sim.is_complete() or sim.is_finished())
    if not sim.is_finished():
        pod = sim.pods()[1]
        sim.kubelets.refuse(pod, "CreateContainerConfigError")
        await sim.pause(30.0)
        sim.kubelets.start(pod)


@_fate("applied-again", compares="story")
async def _applied_again(sim: Simulation) -> None:
    """The user deletes the job and applies it again while its pods still stop."""
    if await sim.running_attempt():
        sim.delete_job()
        sim.create_job()


@_fate("edited-service")
async def _edited_service(sim: Simulation) -> None:
    """The user edits the Service of a running job, so that no rank finds another, until the operator restores it."""
    if await sim.running_attempt():
        (service,) = sim.store.all(names.SERVICES)
        edit = {"selector": {"app": "web"}, "publishNotReadyAddresses": False}
        sim.server.patch(names.SERVICES, KEY.namespace, service["metadata"]["name"], {"spec": edit})
        await sim.until("the Service is restored", lambda: sim.is_finished() or _is_whole(sim, service))


@_scenario("failing-creates", is_variant=True, compares="story", world={"create_errors": 0.5}, spec={"numNodes": 8})
async def _failing_creates(sim: Simulation) -> None:
    """For half a minute half of the creates fail, and each pod starts as soon as it exists."""
    sim.create_job()
    for _ in range(60):
        for pod in sim.pods().values():
            sim.kubelets.start(pod)
        await sim.pause(0.5)
    is_disturbed = sim.operators > 1 or sim.watch != "prompt" or bool(sim.log)
    assert is_disturbed or (sim.attempt() == 1 and sim.is_running()), "the attempt was abandoned"
    sim.create_errors = 0.0
    await succeed(sim)


@_scenario("ordinary-sidecars", is_variant=True, world={"sidecar": "ordinary", "skewed": True})
async def _ordinary_sidecars(sim: Simulation) -> None:
    """A failure, and a success after it; the pods of both attempts stay, and no container runs in them."""
    sim.create_job()
    await _rank_failure(sim)
    await succeed(sim)
    await sim.until("no container runs", lambda: not sim.active_pods())
    failed_pod = sim.status()["failures"][-1]["pod"]
    kept = {pod["metadata"]["name"] for pod in sim.store.all(names.PODS)}
    assert failed_pod in kept and len(sim.pods()) == 2, "a pod to keep was deleted"


def _ended_under_torchrun(rank: int) -> Json:
    """Return the status of a pod that ended now; the part of its log in it begins after the exception."""
    return ended(1, message=BLOCK.format(rank=rank, code=1), at=now())


async def _crashes_twice(sim: Simulation) -> None:
    """Native code crashes on node 1 in two attempts."""
    for _ in range(2):
        await _fails(sim, ended(139, at=now()))


async def _fails(
    sim: Simulation, failure: Json, peers: Json | None = None, logs: tuple[str, str] | None = None
) -> None:
    """Node 1 fails, and the others lose their peer. logs: of node 1, and of each other node."""
    if pods := await sim.running_attempt():
        attempt = sim.attempt()
        await _see_step(sim)
        if logs is not None:
            sim.kubelets.write_logs(pods, *logs)
        lost = peers or failed(77, cause="peer", at=now())
        await sim.in_any_order(partial(sim.kubelets.report, pods[1], failure), *_reports_of_peers(sim, pods, lost))
        await sim.next_attempt(attempt)


async def _see_step(sim: Simulation) -> None:
    """Wait until the step is seen. In the next attempt it would be its progress, and set the restarts back."""
    attempt = sim.attempt()
    await sim.until("the step is seen", lambda: "furthest" in sim.status() or sim.attempt() != attempt)


def _reports_of_peers(sim: Simulation, pods: dict[int, Json], status: Json) -> list[Callable[[], None]]:
    return [partial(sim.kubelets.report, pod, status) for node_rank, pod in sorted(pods.items()) if node_rank != 1]


async def _resume(sim: Simulation) -> None:
    await sim.until(
        "the job is suspended",
        lambda: (sim.status().get("state") == "Suspended" and not sim.active_pods()) or sim.is_finished(),
    )
    if sim.job() is not None:
        sim.patch_job(suspend=False)


def _node_of(sim: Simulation, node_rank: int) -> str:
    return str(sim.pods()[node_rank]["spec"].get("nodeName"))


def _is_whole(sim: Simulation, service: Json) -> bool:
    found = sim.store.get(names.SERVICES, KEY.namespace, service["metadata"]["name"])
    return found is not None and found["spec"] == service["spec"]


def _uid(sim: Simulation) -> str | None:
    job = sim.job()
    return None if job is None else str(job["metadata"]["uid"])


def _is_to_suspend(sim: Simulation) -> bool:
    return bool((sim.job() or {"spec": {}})["spec"].get("suspend"))


def _is_pod(change: Change) -> bool:
    return change.resource is names.PODS


def _records_attempt(number: int, call: Call) -> bool:
    return call.verb == "patch_status" and call.body is not None and call.body["status"].get("attempt") == number


def _closes_attempt(number: int, change: Change) -> bool:
    status = change.obj.get("status") or {}
    ending = (status.get("currentAttempt") or {}).get("ending") or {}
    return change.resource is names.DDPJOBS and status.get("attempt") == number and "verdict" in ending
