"""A job from start to end: success, suspension, deadlines, TTL and edits."""

from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.engine.actions import EngineSettings
from tests.builders import UID, World, a_job, a_running_world, ended, failed, is_idle


def test_resume_after_suspend_starts_an_attempt_without_a_restart() -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0}))
    world.forward(100)
    world.suspend(True)
    assert world.status["state"] == "Suspended" and not world.pods
    assert world.status["activeSeconds"] == 100
    world.forward(1000)
    world.suspend(False)
    assert world.status["attempt"] == 2 and world.status["restarts"] == 0
    assert world.condition("Suspended")["status"] == "False"
    world.run_all_and_settle()
    assert world.status["state"] == "Running"


@pytest.mark.parametrize("size", [{"numNodes": 2}, {"numNodes": 4}, {"nprocPerNode": 2}])
@pytest.mark.parametrize("suspend", [False, True])
def test_size_changed_before_the_suspension_was_seen_ends_the_attempt(size: dict[str, Any], suspend: bool) -> None:
    """Two of three nodes have succeeded: with numNodes 2 the attempt would look complete."""
    world = a_running_world(a_job(numNodes=3, nprocPerNode=1))
    for rank in (0, 1):
        world.show(rank, ended(0))
    world.job["spec"] |= size | {"suspend": suspend}
    world.settle()
    if suspend:
        assert world.status["state"] == "Suspended" and world.status["attempt"] == 1
        return
    assert world.status["attempt"] == 2 and world.status["restarts"] == 0
    assert world.status["world"]["numNodes"] == world.job["spec"]["numNodes"]
    new = [pod for pod in world.pods.values() if pod["metadata"]["labels"][names.LABEL_ATTEMPT] == "2"]
    assert len(new) == world.job["spec"]["numNodes"]


def test_size_changed_before_all_pods_were_seen_is_not_taken_for_that_of_the_attempt() -> None:
    """The operator ended after the creates, and the job was suspended, edited and resumed before the next started."""
    world = World(a_job(nprocPerNode=2))
    world.reconcile()
    world.round = None
    world.run_all()
    world.job["spec"]["nprocPerNode"] = 4
    world.settle()
    assert world.status["attempt"] == 2 and world.status["world"]["nprocPerNode"] == 4


def test_size_changed_beside_a_held_template_counts_when_the_template_is_restored() -> None:
    world = a_running_world(a_job(nprocPerNode=2, template={"spec": {"dnsPolicy": "None"}}))
    world.job["spec"] |= {"nprocPerNode": 4, "template": {"spec": {"dnsPolicy": "Default"}}}
    world.settle()
    assert world.status["attempt"] == 1 and world.status["world"]["nprocPerNode"] == 2
    world.job["spec"] |= {"template": {"spec": {"dnsPolicy": "None"}}}
    world.settle()
    assert world.status["attempt"] == 2 and world.status["world"]["nprocPerNode"] == 4


def test_operator_that_counts_devices_in_another_way_does_not_restart_a_running_job() -> None:
    world = a_running_world(a_job())
    world.job["status"]["world"]["nprocPerNode"] = 8
    world.settle()
    assert world.status["state"] == "Running" and world.status["attempt"] == 1


@pytest.mark.parametrize(("retention", "kept"), [("None", 0), ("LastAttempt", 1), ("All", 1)])
def test_ended_pods_of_a_suspended_job_are_kept_as_its_pod_retention_says(retention: str, kept: int) -> None:
    world = a_running_world(a_job(podRetention=retention))
    world.show(1, ended(0))
    world.suspend(True)
    assert world.status["state"] == "Suspended" and len(world.pods) == kept


def test_active_deadline_does_not_include_suspensions() -> None:
    world = a_running_world(a_job(activeDeadlineSeconds=150))
    world.forward(100)
    world.suspend(True)
    world.forward(500)
    world.suspend(False)
    world.run_all_and_settle()
    world.forward(49)
    made = world.reconcile()
    assert made.requeue_after == pytest.approx(1)
    world.later(2)
    assert world.status["state"] == "Failed"
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    assert not world.pods


def test_ttl_deletes_a_finished_job_with_its_uid() -> None:
    world = a_running_world(a_job(numNodes=1, ttlSecondsAfterFinished=60))
    world.show(0, ended(0))
    assert world.reconcile().requeue_after == pytest.approx(60)
    world.forward(60)
    made = world.reconcile()
    assert [(d.resource, d.uid) for d in made.deletes] == [(names.DDPJOBS, UID)]


def test_ttl_deletes_nothing_in_local_mode() -> None:
    world = a_running_world(a_job(numNodes=1, ttlSecondsAfterFinished=0))
    world.set_pod(0, ended(0))
    world.settings = EngineSettings(is_local=True)
    world.settle()
    world.forward(60)
    made = world.reconcile()
    assert world.status["state"] == "Succeeded"
    assert is_idle(made) and made.requeue_after is None


def test_terminating_job_is_left_to_the_garbage_collector() -> None:
    job = a_job()
    job["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    assert is_idle(World(job).reconcile())


def test_a_changed_template_holds_restarts_until_it_is_undone() -> None:
    world = a_running_world(a_job(template={"spec": {"containers": [{"name": "trainer", "tty": False}]}}))
    world.job["spec"]["template"]["spec"]["containers"][0]["tty"] = True
    world.settle()
    assert world.status["state"] == "Running" and world.condition("Stalled")["reason"] == "SpecChanged"
    world.fail(0)
    assert world.status["attempt"] == 1
    assert world.condition("Stalled")["reason"] == "SpecChanged"
    assert [pod["metadata"]["name"] for pod in world.pods.values()] == ["mnist-0a1b2-1-0"], "the survivor is stopped"
    assert [f["attempt"] for f in world.status["failures"]] == [1]
    world.job["spec"]["template"]["spec"]["containers"][0]["tty"] = False
    world.settle()
    assert world.status["attempt"] == 2 and world.status["restarts"] == 1


def test_an_attempt_whose_template_is_changed_still_gets_its_service() -> None:
    """The operator was killed before it created the Service. A single node trains without it."""
    claim = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}
    checkpoint = {"mountPath": "/ckpt", "claimTemplate": claim}
    world = World(a_job(numNodes=1, startupDeadlineSeconds=60, checkpoint=checkpoint))
    world.reconcile(crash_after=3)
    assert world.pods and world.service is None
    world.run_all()
    world.claim = None
    world.job["spec"]["template"] = {"spec": {"dnsPolicy": "None"}}
    world.settle()
    assert world.service is not None and world.claim is None, "the claim is not made from a changed claimTemplate"
    assert world.status["state"] == "Running" and world.condition("Stalled")["reason"] == "SpecChanged"
    world.later(61)
    assert world.status["state"] == "Running", "no deadline of the start runs"


def test_finished_job_stays_finished_if_its_spec_becomes_invalid() -> None:
    world = a_running_world(a_job(numNodes=1))
    world.show(0, ended(0))
    world.job["spec"]["numNodes"] = 0
    assert is_idle(world.reconcile())
    assert world.status["state"] == "Succeeded"


def test_deadline_applies_while_the_template_is_changed() -> None:
    world = a_running_world(a_job(activeDeadlineSeconds=100, template={"spec": {"dnsPolicy": "None"}}))
    world.job["spec"]["template"]["spec"]["dnsPolicy"] = "Default"
    world.settle()
    assert world.reconcile().requeue_after is not None
    world.later(101)
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"


def test_new_attempt_drops_speed_and_resume_point_of_the_old_one() -> None:
    world = a_running_world(a_job())
    report = {"step": 300, "totalSteps": 470, "samplesPerSecond": 9.0, "stepsPerSecond": 2.5, "etaSeconds": 5,
              "loss": 0.5, "checkpoint": {"step": 250, "path": "250.pt"},
              "resumedFrom": {"step": 100, "path": "100.pt"}}  # fmt: skip
    world.report(report)
    assert world.status["checkpoint"]["resumedFromStep"] == 100
    world.set_pod(0, failed(1))
    world.reconcile()
    assert not {"etaSeconds", "samplesPerSecond", "stepsPerSecond"} & set(world.status["progress"])
    assert world.status["progress"]["step"] == 300
    assert "resumedFromStep" not in world.status["checkpoint"] and world.status["checkpoint"]["step"] == 250


def test_failure_of_a_job_with_fields_of_a_later_release_restarts_it() -> None:
    """The CRD of that release was applied: its defaults put them into every stored job."""
    world = a_running_world(a_job(template={"spec": {"dnsPolicy": "None"}}))
    world.job["spec"] |= {"compression": "none", "rendezvous": {"port": 29500, "backend": {"name": "static"}}}
    world.fail(0)
    assert (world.status["attempt"], world.status["restarts"]) == (2, 1)
