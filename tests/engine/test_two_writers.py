"""Two attempts of a job, or two jobs, never write the same files at the same time."""

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.times import parse_time, timestamp
from ddpjob.engine.desired import Job
from tests.builders import NOW, World, a_job, a_running_world, a_started_world, disrupted, ended, running
from tests.engine.queued import Queued

CHECKPOINT = {"claimName": "c", "mountPath": "/c"}
NOT_READY = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]


def a_saving_world(**spec: Any) -> World:
    """Return the running world of a plain script with a checkpoint volume, whose deleted pods save for a while."""
    world = a_running_world(a_job(**{"checkpoint": CHECKPOINT} | spec))
    world.lingering = True
    world.later(3600)
    return world


def edit(world: World, **spec: Any) -> None:
    world.job["spec"] |= spec
    world.job["metadata"]["generation"] += 1


def live(world: World) -> list[str]:
    """Return the attempts of the pods that have not ended."""
    over = ("Succeeded", "Failed")
    pods = (pod for pod in world.pods.values() if pod["status"]["phase"] not in over)
    return sorted({pod["metadata"]["labels"][names.LABEL_ATTEMPT] for pod in pods})


def settle_alone(world: World, first: str = "1") -> None:
    """Settle, and again after a crash of the operator at each write: pods of one attempt only ever live."""
    for crash_after in range(5):
        world.reconcile(crash_after=crash_after)
        assert live(world) == [first]
    world.settle()
    assert live(world) == [first]


def raise_grace(world: World, seconds: float) -> None:
    """Let the pods that are being deleted have a longer grace period than the spec, as an admission webhook does."""
    for pod in world.pods.values():
        if "deletionTimestamp" in pod["metadata"]:
            deadline = timestamp(world.now + timedelta(seconds=seconds))
            pod["metadata"] |= {"deletionTimestamp": deadline, "deletionGracePeriodSeconds": int(seconds)}


def end_pods(world: World) -> None:
    """End the pods that are being deleted, which the kubelet then removes, and settle."""
    world.pods = {name: pod for name, pod in world.pods.items() if "deletionTimestamp" not in pod["metadata"]}
    world.settle()


def be_not_ready(world: World) -> None:
    """Let all Kubernetes nodes miss their heartbeats; the pods there run on."""
    for pod in world.pods.values():
        pod["status"] |= {"conditions": NOT_READY}


def fail(world: World) -> None:
    world.show(1, ended(1, at=world.now, message="RuntimeError: boom"))
    world.forward(4)


def restart(world: World) -> None:
    """Let an attempt fail, its pods end, and the next one run."""
    fail(world)
    world.settle()
    end_pods(world)
    world.run_all_and_settle()


def suspend_and_resume(world: World) -> None:
    edit(world, suspend=True)
    world.settle()
    edit(world, suspend=False)


def ask_for_a_restart(world: World) -> None:
    edit(world, restartedAt="2026-03-01T13:00:00Z")


def drain(world: World) -> None:
    pod = world.set_pod(1, running(**disrupted("EvictionByEvictionAPI")))
    deadline = timestamp(world.now + timedelta(seconds=30))
    pod["metadata"] |= {"deletionTimestamp": deadline, "deletionGracePeriodSeconds": 30}


def resize(world: World) -> None:
    world.job["status"]["world"]["numNodes"] = 1
    world.job["status"]["world"]["worldSize"] = 1


def lose_the_status(world: World) -> None:
    """Delete the status, while one of two pods of attempt 1 has ended: the others cannot be adopted."""
    world.set_pod(1, ended(1, at=world.now))
    world.job["status"] = {}


WAYS = (fail, suspend_and_resume, ask_for_a_restart, drain, resize, lose_the_status)


@pytest.mark.parametrize("way", WAYS)
def test_the_next_attempt_waits_until_the_pods_of_the_last_one_have_ended(way: Callable[[World], None]) -> None:
    """With the grace of a webhook, and also if their Kubernetes nodes do not respond for a moment."""
    world = a_saving_world()
    be_not_ready(world)
    way(world)
    settle_alone(world)
    raise_grace(world, 600)
    world.forward(590)
    settle_alone(world)
    end_pods(world)
    assert live(world) == ["2"], "the end of the last pod starts the next attempt"


@pytest.mark.parametrize("way", WAYS)
def test_a_pod_that_never_ends_delays_the_next_attempt_to_its_own_deadline_and_a_margin(
    way: Callable[[World], None],
) -> None:
    world = a_saving_world()
    be_not_ready(world)
    way(world)
    world.settle()
    raise_grace(world, 600)
    world.later(11)
    assert world.reconcile().requeue_after == pytest.approx(594)
    world.forward(593)
    settle_alone(world)
    world.later(1)
    assert live(world) == ["1", "2"]


@pytest.mark.parametrize(("spec", "verdict"), [({}, "PartiallyScheduled"), ({"minNodes": 1}, "NodesUnavailable")])
def test_attempts_that_do_not_get_all_pods_end_before_the_next_one(spec: dict[str, Any], verdict: str) -> None:
    world = World(a_job(checkpoint=CHECKPOINT, scheduling={"partialGangSeconds": 60}, **spec))
    world.lingering = True
    world.settle()
    world.show(0, running())
    world.forward(300)
    settle_alone(world)
    assert world.status["currentAttempt"]["ending"]["verdict"] == verdict
    world.forward(600)
    raise_grace(world, 600)
    settle_alone(world)
    end_pods(world)
    assert live(world) == ["2"]


def test_abandoned_attempt_ends_before_the_next_one() -> None:
    world = World(a_job(checkpoint=CHECKPOINT))
    world.lingering = True
    world.reconcile(crash_after=2)
    assert len(world.pods) == 1, "the second pod is not created yet"
    world.set_pod(0, running())
    settle_alone(world)
    assert world.status["currentAttempt"]["ending"]["verdict"] == "PodLost"
    end_pods(world)
    assert live(world) == ["2"]


def test_attempt_after_a_restored_status_waits_for_the_pods_that_it_does_not_know() -> None:
    world = a_saving_world()
    backup = copy.deepcopy(world.status)
    restart(world)
    world.job["status"] = backup
    settle_alone(world, "2")
    assert world.status["currentAttempt"]["ending"]["verdict"] == "UnknownAttempt"
    end_pods(world)
    assert live(world) == ["3"]


def test_a_job_evicted_from_its_queue_starts_again_after_its_pods_have_ended() -> None:
    world = Queued(checkpoint=CHECKPOINT)
    world.starts()
    world.lingering = True
    be_not_ready(world)
    world.evicts()
    settle_alone(world)
    assert world.conditions()["QuotaReserved"][0] == "True", "the pods on nodes that do not respond may run"
    end_pods(world)
    assert world.conditions()["QuotaReserved"][0] == "False"
    world.admits()
    world.settle()
    assert live(world) == ["2"]


def test_quota_of_pods_on_lost_nodes_is_released_at_their_deadline() -> None:
    world = Queued(numNodes=1)
    world.starts()
    world.lingering = True
    be_not_ready(world)
    world.evicts()
    world.settle()
    assert world.reconcile().requeue_after == pytest.approx(35)
    world.later(35)
    assert world.conditions()["QuotaReserved"][0] == "False"


def test_quota_of_a_finished_job_is_released_at_the_deadline_of_a_pod_on_a_lost_node() -> None:
    world = Queued(successPolicy="NodeZero", ttlSecondsAfterFinished=3600)
    world.starts()
    world.lingering = True
    world.set_pod(0, ended(0))
    world.show(1, running(conditions=NOT_READY))
    assert world.status["state"] == "Succeeded" and world.reconcile().requeue_after == pytest.approx(35)
    assert "Finished" not in world.conditions()
    world.later(35)
    assert world.conditions()["Finished"][0] == "True"


def test_status_names_pod_node_and_time_that_are_waited_for() -> None:
    world = a_saving_world()
    fail(world)
    world.settle()
    assert world.condition("Running")["reason"] == "Error", "most pods end at once"
    world.later(10)
    found = world.condition("Running")
    assert found["reason"] == "EarlierPodsRun" and world.status["state"] == "Restarting"
    until = timestamp(parse_time(world.pod(0)["metadata"]["deletionTimestamp"]) + timedelta(seconds=5))
    for part in (world.pod(0)["metadata"]["name"], "Kubernetes node worker", until):
        assert part in found["message"]
    assert world.condition("Restarting")["reason"] == "Error"


def test_delay_of_a_restart_is_no_wait_for_pods() -> None:
    """The reason of the failure is shown while nothing but the delay is left."""
    world = a_saving_world()
    restart(world)
    fail(world)
    world.settle()
    end_pods(world)
    assert world.status["attempt"] == 2 and world.condition("Running")["reason"] == "Error"


@pytest.mark.parametrize("way", [fail, drain])
def test_a_pod_that_cannot_be_deleted_is_waited_for_without_limit(way: Callable[[World], None]) -> None:
    """Nothing ends it, so it writes on."""
    world = a_saving_world()
    way(world)
    world.settle()
    world.pod(0)["metadata"].pop("deletionTimestamp")
    world.forward(100_000)
    world.reconcile(crash_after=1)
    assert live(world) == ["1"] and "nothing has deleted it" in world.condition("Running")["message"]


def test_a_clock_that_was_set_back_delays_no_attempt_for_longer_than_any_grace_period() -> None:
    world = a_saving_world()
    fail(world)
    world.settle()
    world.later(-365 * 86_400)
    assert world.status["attempt"] == 2


def test_the_decision_to_start_reads_the_pods_from_a_list() -> None:
    """The cached status may be newer than the cached pods."""
    world = a_saving_world()
    fail(world)
    world.settle()
    kept, world.pods = world.pods, {}
    cached = world.observed(live=False)
    world.pods = kept

    def observed(*, live: bool) -> Any:
        return World.observed(world, live=True) if live else cached

    world.observed = observed  # type: ignore[method-assign]
    world.settle()
    assert live(world) == ["1"]


FENCED = {"fenced": True}


def report_progress(world: World) -> None:
    world.report({"step": 5} | FENCED)
    world.progress = None  # of rank 0, which then failed


@pytest.mark.parametrize(
    ("given", "message", "learn", "is_waiting"),
    [
        (None, {}, None, True),
        (True, {}, None, False),
        (None, FENCED, None, False),
        (None, {}, report_progress, False),
        (False, FENCED, report_progress, True),
    ],
    ids=["unknown", "spec", "end", "progress", "spec before reports"],
)
def test_fenced_program_is_restarted_beside_pods_that_save(
    given: bool | None, message: dict[str, Any], learn: Callable[[World], None] | None, is_waiting: bool
) -> None:
    world = a_saving_world(checkpoint=CHECKPOINT | ({} if given is None else {"fenced": given}))
    if learn:
        learn(world)
        assert world.status["currentAttempt"]["fenced"] is True
    world.fail(1, 1, at=world.now, **message)
    assert live(world) == (["1"] if is_waiting else ["1", "2"])
    assert "fenced" not in world.status["currentAttempt"] or is_waiting, "each attempt reports for itself"


def test_report_of_a_failed_pod_counts_although_a_user_deletes_the_pod_before_the_restart() -> None:
    world = a_saving_world()
    for attempt in (1, 2):
        world.fail(1, 1, at=world.now, **FENCED)
        if attempt == 1:
            end_pods(world)
            world.run_all_and_settle()
    assert live(world) == ["2"], "the second restart has a delay"
    del world.pods[world.pod(1)["metadata"]["name"]]
    world.later(15)
    assert live(world) == ["2", "3"]


@pytest.mark.parametrize("spec", [{}, {"checkpoint": CHECKPOINT | FENCED}])
def test_planned_loss_of_a_fenced_program_waits_for_pods_that_save_except_on_lost_nodes(spec: dict[str, Any]) -> None:
    world = a_saving_world(**{"checkpoint": None} | spec)
    drain(world)
    world.settle()
    raise_grace(world, 600)
    world.forward(590)
    settle_alone(world)
    be_not_ready(world)
    world.settle()
    assert live(world) == ["1", "2"]


def template(volume: dict[str, Any], **mount: Any) -> dict[str, Any]:
    mounts = [{"name": "v", "mountPath": "/v"} | mount]
    container = {"name": "trainer", "volumeMounts": mounts}
    return {"template": {"spec": {"containers": [container], "volumes": [{"name": "v"} | volume]}}}


@pytest.mark.parametrize(
    ("spec", "writes"),
    [
        ({}, False),
        ({"checkpoint": CHECKPOINT}, True),
        ({"data": {"claimName": "c"}}, False),
        (template({"persistentVolumeClaim": {"claimName": "c"}}), True),
        (template({"persistentVolumeClaim": {"claimName": "c", "readOnly": True}}), False),
        (template({"persistentVolumeClaim": {"claimName": "c"}}, readOnly=True), False),
        (template({"nfs": {"server": "s", "path": "/"}}), True),
        (template({"hostPath": {"path": "/scratch"}}), True),
        (template({"csi": {"driver": "gcsfuse.csi.storage.gke.io"}}), True),
        (template({"csi": {"driver": "secrets-store.csi.k8s.io", "readOnly": True}}), False),
        (template({"emptyDir": {}}), False),
        (template({"ephemeral": {"volumeClaimTemplate": {}}}), False),
        (template({"configMap": {"name": "c"}}), False),
        ({"template": {"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]}}}, False),
    ],
)
def test_volumes_that_pods_of_two_attempts_can_write(spec: dict[str, Any], writes: bool) -> None:
    assert Job.of(a_job(**spec)).writes_volume is writes


def a_first_attempt(pod: dict[str, Any], **metadata: Any) -> World:
    """Return the world of a new job beside a pod of another one."""
    world = World(a_job(checkpoint=CHECKPOINT))
    world.job["metadata"]["creationTimestamp"] = timestamp(NOW)
    labels = {names.LABEL_JOB_NAME: "mnist", names.LABEL_JOB_UID: "99999"}
    meta = {"name": "mnist-99999-1-0", "uid": "old", "labels": labels} | metadata
    world.former.append({"metadata": meta, "spec": {"nodeName": "worker"}, "status": pod})
    return world


def test_first_attempt_waits_without_limit_for_pods_that_nothing_deletes() -> None:
    """``kubectl delete --cascade=orphan``: the pods of the deleted job have no owner, and run on."""
    world = a_first_attempt(running())
    world.settle()
    world.later(86_400)
    found = world.condition("Running")
    assert not world.pods and found["reason"] == "FormerPodsRun"
    assert f"kubectl delete pod -n default -l {names.LABEL_JOB_UID}=99999" in found["message"]
    world.former.clear()
    world.settle()
    assert live(world) == ["1"]


def test_pods_of_another_job_are_waited_for_to_their_own_deadline() -> None:
    deadline = timestamp(NOW + timedelta(seconds=600))
    world = a_first_attempt(running(), deletionTimestamp=deadline)
    world.settle()
    assert world.reconcile().requeue_after == pytest.approx(605)
    assert timestamp(NOW + timedelta(seconds=605)) in world.condition("Running")["message"]
    world.later(605)
    assert live(world) == ["1"]


def test_another_job_on_the_same_claim_and_directory_is_named_and_nothing_follows() -> None:
    world = a_saving_world()
    world.sharing = ["other"]
    assert [note.reason for note in world.reconcile().events] == ["VolumeShared"]
    world.settle()
    found = world.condition("Running")
    assert (found["status"], found["reason"]) == ("True", "VolumeShared")
    assert "the job other" in found["message"] and "checkpoint.subPath" in found["message"]
    world.sharing = []
    world.settle()
    assert world.condition("Running")["reason"] == "AllNodesRunning"
    assert world.status["attempt"] == 1


def test_in_local_mode_the_next_attempt_waits_without_a_volume_too() -> None:
    """The processes of all attempts have the files of one machine."""
    world = World(a_job())
    world.settings = replace(world.settings, is_local=True)
    world.settle()
    world.run_all_and_settle()
    world.lingering = True
    world.set_pod(1, ended(1, at=world.now))
    settle_alone(world)
    world.forward(11)
    settle_alone(world)
    end_pods(world)
    assert live(world) == ["2"]


def test_first_attempt_of_a_job_that_waited_for_days_follows_the_pods_of_a_deleted_job() -> None:
    """The wait ended a day after the creation: a job that a queue resumed later began beside pods that save."""
    world = World(a_job(checkpoint=CHECKPOINT, suspend=True))
    world.job["metadata"]["creationTimestamp"] = timestamp(NOW)
    world.settle()
    world.forward(2 * 86_400)
    pod = a_started_world(a_job("former"))
    pod.set_pod(0, running())
    former = pod.pod(0)
    former["metadata"] |= {"deletionTimestamp": timestamp(world.now + timedelta(seconds=600))}
    world.former = [former]
    edit(world, suspend=False)
    world.settle()
    assert not world.pods and world.condition("Running")["reason"] == "FormerPodsRun"
    world.later(605)
    assert len(world.pods) == 2


def test_pods_whose_deletion_was_refused_for_days_are_waited_for_once_they_are_deleted() -> None:
    world = a_saving_world()
    world.show(1, ended(1, at=world.now))
    world.forward(11)
    settle_alone(world)
    del world.pod(0)["metadata"]["deletionTimestamp"]
    world.forward(2 * 86_400)
    settle_alone(world)
    assert parse_time(world.pod(0)["metadata"]["deletionTimestamp"]) > world.now
