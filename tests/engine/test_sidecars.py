"""Pods with containers beside the trainer: the trainer's end is the end of the pod, and its log is kept."""

from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.engine.actions import Change
from tests.builders import DELETING, World, a_job, a_running_world, ended, failed, is_idle, running

PROXY = {"name": "istio-proxy", "state": {"running": {}}}
LOG = "Traceback: bad batch"


def beside_a_proxy(status: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a pod whose proxy runs on after the trainer: its phase stays Running."""
    return status | {"phase": "Running", "containerStatuses": [*status["containerStatuses"], PROXY]}


def a_world_with_proxies(**spec: Any) -> World:
    world = a_running_world(a_job(**spec))
    for node_rank in (0, 1):
        pod = world.set_pod(node_rank, beside_a_proxy(running()))
        pod["spec"]["containers"] = [*pod["spec"]["containers"], {"name": "istio-proxy"}]
    world.settle()
    return world


def test_failed_pod_with_a_sidecar_stays_with_its_log_and_holds_no_resources() -> None:
    world = a_world_with_proxies()
    world.show(1, beside_a_proxy(ended(139, message=LOG)))
    (failure,) = world.status["failures"]
    assert failure["pod"] == "mnist-0a1b2-1-1" and failure["logTail"] == LOG and failure["pod"] in failure["next"]
    assert world.pods["mnist-0a1b2-1-1"]["status"]["phase"] == "Failed", "its sidecar has been stopped"
    assert "mnist-0a1b2-1-0" not in world.pods, "its trainer ran, so it was deleted"
    assert world.status["attempt"] == 2 and is_idle(world.reconcile())


@pytest.mark.parametrize(("retention", "kept"), [("LastAttempt", 2), ("None", 0)])
def test_successful_pods_with_sidecars_are_kept_as_the_user_wants(retention: str, kept: int) -> None:
    world = a_world_with_proxies(podRetention=retention)
    world.show_all(beside_a_proxy(ended(0)))
    assert world.status["state"] == "Succeeded" and world.status["nodes"]["succeeded"] == 2
    assert len(world.pods) == kept
    assert all(pod["status"]["phase"] == "Failed" for pod in world.pods.values()), "no sidecar runs"
    assert is_idle(world.reconcile())


def test_stop_of_a_sidecar_is_requested_once() -> None:
    world = a_world_with_proxies()
    for node_rank in (0, 1):
        world.set_pod(node_rank, beside_a_proxy(ended(0)))
    made = world.reconcile(crash_after=1)
    told = {"activeDeadlineSeconds": 1}
    metas = [pod["metadata"] for pod in world.pods.values()]
    assert made.changes == tuple(Change(names.PODS, meta["name"], meta["uid"], told) for meta in metas)
    assert not made.deletes
    for pod in world.pods.values():  # the kubelet has not stopped it yet
        pod["spec"] = pod["spec"] | {"activeDeadlineSeconds": 1}
    assert is_idle(world.reconcile())


def test_running_sidecar_does_not_delay_the_attempt_after_a_planned_loss() -> None:
    world = a_world_with_proxies()
    world.lingering = True
    world.pod(1)["metadata"] |= DELETING
    world.settle()
    world.show_all(beside_a_proxy(failed(75, outcome="stopped", message="saved")))
    assert world.status["attempt"] == 2


def test_pod_of_the_failed_attempt_is_deleted_after_the_next_one() -> None:
    world = a_world_with_proxies()
    world.show(1, beside_a_proxy(ended(139)))
    world.run_all_and_settle()
    world.set_pod(0, ended(139))
    world.settle_after_backoff()
    assert "mnist-0a1b2-1-1" not in world.pods and "mnist-0a1b2-2-0" in world.pods
