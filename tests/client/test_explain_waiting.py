"""The verdict on pods that wait, by the texts of schedulers, autoscalers, kubelets and registries."""

from __future__ import annotations

from datetime import timedelta

import pytest

from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from tests.builders import NOW, World, running
from tests.client.situations import unschedulable, waits_for
from tests.client.test_explain import pending, started, why
from tests.engine.test_two_writers import a_first_attempt

NO_GPU = (
    "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: 3 No preemption "
    "victims found for incoming pod."
)
NOT_COMPATIBLE = (
    'Failed to schedule pod, incompatible with nodepool "default", daemonset overhead={"cpu":"150m","pods":"4"}, no '
    'instance type satisfied resources {"cpu":"150m","nvidia.com/gpu":"8","pods":"5"} and requirements '
    "karpenter.sh/capacity-type In [on-demand], karpenter.sh/nodepool In [default] (no instance type which had enough "
    "resources and the required offering met the scheduling requirements)"
)


def event(pod: Json, reason: str, message: str, *, age: float = 5, component: str = "kubelet", now: World) -> Json:
    """Return an event about a pod, which was last seen so many seconds ago."""
    is_warning = reason.startswith("Failed")
    return {
        "metadata": {}, "involvedObject": {"kind": "Pod", "name": pod["metadata"]["name"]},
        "type": "Warning" if is_warning else "Normal", "reason": reason, "message": message,
        "lastTimestamp": timestamp(now.now - timedelta(seconds=age)), "source": {"component": component},
        "reportingComponent": component,
    }  # fmt: skip


TRIGGERED = ("TriggeredScaleUp", "pod triggered scale-up: [{gpu-pool 1->3 (max: 10)}]", "cluster-autoscaler")


def test_a_node_that_an_autoscaler_adds_is_waited_for_until_it_is_late() -> None:
    reason, message, component = TRIGGERED
    world = started()
    pods = [pending(world, rank, **unschedulable(NO_GPU)) for rank in (0, 1)]
    found = why(world, events=[event(pods[0], reason, message, age=1000, component=component, now=world)])
    assert (found.stage, found.reason, found.is_abnormal) == ("Placement", reason, True)
    unread = why(world, unread={"events": "events could not be read: you may not read this"})
    assert (unread.reason, unread.confidence) == ("Resource", "Medium"), "a node may be on its way"
    partial = started()
    pod = pending(partial, 1, **unschedulable(NO_GPU))
    pending(partial, 0, node="worker")
    partial.forward(10)
    partial.settle()
    assert why(partial).reason == "PartiallyScheduled"
    found = why(partial, events=[event(pod, reason, message, component=component, now=partial)])
    assert (found.reason, found.is_abnormal, found.node_rank) == (reason, False, 1)


def test_of_the_events_of_autoscalers_a_refusal_decides() -> None:
    world = started()
    pods = [pending(world, rank, **unschedulable(NO_GPU)) for rank in (0, 1)]
    events = [
        event(pods[0], *TRIGGERED[:2], age=2, component=TRIGGERED[2], now=world),
        event(pods[1], "Nominated", "-", age=60, component="karpenter", now=world),
        event(pods[1], "FailedScheduling", NOT_COMPATIBLE, age=40, component="karpenter", now=world),
        event(pods[1], "FailedScheduling", NO_GPU, age=1, component="default-scheduler", now=world),
    ]
    found = why(world, events=events)
    assert (found.stage, found.reason, found.is_abnormal) == ("Placement", "Resource", True)
    assert NOT_COMPATIBLE in found.sentence
    assert found.hint == "no node group or node pool has machines that fit what the pods ask for"


CONFIGMAP = (
    'MountVolume.SetUp failed for volume "code" : failed to sync configmap cache: timed out waiting for the condition'
)
PULLING = ("Pulling", 'Pulling image "trainer:1"')


def test_a_node_that_pulls_its_image_does_not_hide_the_warning_of_another() -> None:
    world = started()
    conditions = [{"type": "PodReadyToStartContainers", "status": "False"}]
    pods = [pending(world, n, node="worker", startTime=timestamp(NOW), conditions=conditions) for n in (0, 1)]
    world.forward(60)
    world.settle()
    events = [event(pods[0], *PULLING, now=world), event(pods[1], "FailedMount", CONFIGMAP, now=world)]
    found = why(world, events=events)
    assert (found.reason, found.node_rank, found.is_abnormal) == ("FailedMount", 1, True)
    assert why(world, events=events[:1]).reason == "Pulling"


@pytest.mark.parametrize("is_readable", [False, True])
def test_a_first_attempt_that_waits_for_pods_of_a_deleted_job(is_readable: bool) -> None:
    """Seen: "all nodes have run for 0 s", and a command about a pod of attempt 0."""
    world = a_first_attempt(running())
    world.settle()
    found = why(world) if is_readable else why(world, pods=None, unread={"pods": "-"})
    assert (found.stage, found.reason, found.is_abnormal) == ("Starting", "FormerPodsRun", True)
    assert "pod mnist-99999-1-0 of another job on Kubernetes node worker may still save" in found.sentence
    assert found.next == "kubectl delete pod -n default -l ddpjob.dev/job-uid=99999"


@pytest.mark.parametrize("cause", ["no such host", "no space left on device"])
def test_the_advice_about_an_image_names_no_placeholder_without_the_pods(cause: str) -> None:
    world = started()
    message = f'failed to pull and unpack image "trainer:1": {cause}'
    pending(world, node="worker", **waits_for("ImagePullBackOff", message))
    found = why(world, pods=None, unread={"pods": "-"})
    assert (found.stage, found.reason) == ("Image", "ImagePullBackOff")
    assert "NODE" in str(found.next) and "{" not in str(found.next)
