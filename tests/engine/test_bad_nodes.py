"""A fact of one Kubernetes node ends no job that has trained: the next attempt starts, and the node is suspected."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from ddpjob.api.times import parse_time, timestamp
from tests.builders import World, a_job, a_running_world, a_started_world, disrupted, ended, failed, running, unplaced

Json = dict[str, Any]
DAY = 86_400
HOOK = "error running prestart hook #0: nvidia-container-cli: initialization error: nvml error: driver not loaded"


def drain(world: World, node_rank: int) -> None:
    """Drain the Kubernetes node of a pod, and start the next attempt."""
    deadline = timestamp(world.now + timedelta(seconds=30))
    pod = world.pod(node_rank)
    pod["metadata"] |= {"deletionTimestamp": deadline, "deletionGracePeriodSeconds": 30}
    pod["status"] |= disrupted("EvictionByEvictionAPI")
    world.settle()
    world.pods = {name: pod for name, pod in world.pods.items() if "deletionTimestamp" not in pod["metadata"]}
    world.settle_after_backoff()


def run_on_good_nodes(world: World, *except_for: int) -> None:
    for node_rank in range(world.job["spec"]["numNodes"]):
        if node_rank not in except_for:
            world.set_pod(node_rank, running(), node=f"good-{node_rank}")
    world.settle()


def trained_world(seconds: float = 30 * DAY, **spec: Any) -> World:
    """Return a job of four nodes that ran for so long, and whose second attempt gets a pod on another node."""
    world = a_started_world(a_job(numNodes=4, **spec))
    run_on_good_nodes(world)
    world.later(seconds)
    drain(world, 3)
    assert world.status["attempt"] == 2
    run_on_good_nodes(world, 3)
    return world


def start_error(world: World) -> Json:
    return ended(128, reason="StartError", message=HOOK, at=world.now)


def no_command(world: World) -> Json:
    return ended(127, at=world.now, started=world.now - timedelta(seconds=2), message="bash: torchrun: not found")


def seven_gpus(world: World) -> Json:
    return failed(71, at=world.now, kind="RanksImpossible", message="local rank 7 has no GPU: this node has 7")


def wrong_usage(world: World) -> Json:
    return failed(2, at=world.now, kind="UsageError", message="--data: no such directory")


def mismatch(world: World) -> Json:
    return failed(78, at=world.now, kind="ConfigMismatch", message="another PyTorch")


BROKEN = [start_error, no_command, seven_gpus, wrong_usage, mismatch]


@pytest.mark.parametrize("broken", BROKEN)
def test_one_bad_node_ends_no_job_that_has_trained(broken: Any) -> None:
    world = trained_world()
    world.show(3, broken(world), node="bad")
    world.later(11)
    assert world.status["attempt"] == 3 and world.status["state"] != "Failed"
    last = world.status["failures"][-1]
    assert (last["action"], last["counted"], last["nodeSuspected"], last["nodeName"]) == ("Restart", True, True, "bad")


def test_hour_of_training_that_only_the_ledger_shows_is_enough() -> None:
    """No operator ran while it trained, and the program reports nothing."""
    world = trained_world()
    del world.job["status"]["furthest"]
    world.show(3, wrong_usage(world), node="bad")
    world.later(11)
    assert world.status["failures"][-1]["action"] == "Restart"


@pytest.mark.parametrize("broken", BROKEN)
def test_failure_to_start_before_any_attempt_trained_is_final(broken: Any) -> None:
    world = a_started_world(a_job(numNodes=4))
    for node_rank in range(4):
        world.set_pod(node_rank, broken(world), node=f"node-{node_rank}")
    world.settle()
    assert world.status["state"] == "Failed" and world.status["failures"][-1]["action"] == "Fail"


@pytest.mark.parametrize("broken", [start_error, no_command, seven_gpus])
@pytest.mark.parametrize("good", [2, 4, 5])
def test_new_job_that_a_node_does_not_start_is_tried_on_up_to_four_nodes(broken: Any, good: int) -> None:
    """A node without a driver ends pods at once, so it has room for each new job of the cluster."""
    world = World(a_job(numNodes=1))
    began = world.now
    for number in range(1, good):
        while world.status.get("attempt") != number or world.status["currentAttempt"].get("ending"):
            world.settle()
            world.forward(1)
        world.show(0, broken(world), node=f"bad-{number}")
        assert world.status["state"] == ("Failed" if number == 4 else "Restarting")
    assert good < 5 or (world.now - began).total_seconds() <= 120
    names = [node["nodeName"] for node in world.status["avoidNodes"]]
    assert names == [f"bad-{number}" for number in range(1, min(good, 4))]


@pytest.mark.parametrize("broken", [start_error, no_command, seven_gpus])
def test_same_node_twice_within_an_hour_ends_a_new_job(broken: Any) -> None:
    """It has no other node."""
    world = a_started_world(a_job(numNodes=1))
    for _ in range(2):
        assert world.status["state"] != "Failed"
        world.set_pod(0, broken(world), node="only")
        world.settle_after_backoff()
    assert world.status["state"] == "Failed"


@pytest.mark.parametrize(
    "text",
    [
        'exec: "torchrun": executable file not found in $PATH: unknown',
        'exec: "./train.py": permission denied: unknown',
        "crun: executable file `torchrun` not found in $PATH: No such file or directory: OCI runtime error",
    ],
)
def test_command_that_the_image_does_not_contain_is_final(text: str) -> None:
    world = a_started_world(a_job(numNodes=1))
    message = f"failed to create containerd task: runc create failed: unable to start container process: {text}"
    world.show(0, ended(128, reason="StartError", message=message, at=world.now), node="any")
    assert world.status["state"] == "Failed"


@pytest.mark.parametrize(
    "text",
    [
        'exec: "/mnt/venv/bin/torchrun": stat /mnt/venv/bin/torchrun: no such file or directory: unknown',
        'exec: "python": stat python: input/output error: unknown',
        'exec: "nvidia-container-runtime": executable file not found in $PATH: unknown',
        HOOK,
    ],
)
def test_what_one_node_may_lack_is_tried_on_another_one(text: str) -> None:
    world = a_started_world(a_job(numNodes=1))
    status = ended(128, reason="StartError", message=f"failed to create task: {text}", at=world.now)
    world.show(0, status, node="bad")
    assert world.status["state"] == "Restarting"


def test_container_that_starts_on_another_node_contradicts_a_failure_to_start() -> None:
    world = a_started_world(a_job(numNodes=4))
    run_on_good_nodes(world, 3)
    world.show(3, start_error(world), node="bad")
    assert world.status["attempt"] == 2 and world.status["failures"][-1]["nodeSuspected"]


@pytest.mark.parametrize(
    ("other", "state"), [(None, "Failed"), (failed(77, cause="peer", kind="PeerLost"), "Restarting")]
)
def test_shell_that_runs_may_still_not_find_the_command(other: Json | None, state: str) -> None:
    """The shells of a job with a wrong command end one after the other."""
    world = a_started_world(a_job(numNodes=4))
    for _ in range(2):
        run_on_good_nodes(world, 3)
        if other is not None:
            world.set_pod(0, other, node="good-0")
        world.set_pod(3, no_command(world), node="bad")
        world.settle_after_backoff()
    assert world.status["state"] == state


FULL = (
    "0/9 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 8 Insufficient nvidia.com/gpu. "
    "preemption: 0/9 nodes are available: {small} Preemption is not helpful for scheduling, {full} No preemption "
    "victims found for incoming pod."
)
"""What the scheduler says if one node is avoided, some are too small, and others hold pods of the same priority."""


def wait_for_a_node(world: World, node_rank: int, full: int, length: int | None = None) -> None:
    """Let the scheduler find no Kubernetes node for a pod.

    full: nodes that would fit it, but for their pods. length: after how many characters its text is cut.
    """
    world.pod(node_rank)["status"] = unplaced(FULL.format(small=9 - full, full=full)[:length])
    world.settle()


ALONE = {"scheduling": {"partialGangSeconds": 0}}
"""No other job waits for the nodes that the pods hold."""


@pytest.mark.parametrize("full", [3, 4])
def test_broken_node_is_used_again_soon_only_if_no_other_node_may_get_room(full: int) -> None:
    """In a cluster that is full, a broken node alone has room. The job's own pods hold three nodes."""
    world = a_started_world(a_job(numNodes=4, **ALONE))
    run_on_good_nodes(world, 3)
    world.set_pod(3, start_error(world), node="bad")
    world.settle_after_backoff()
    attempt, until = world.status["attempt"], parse_time(world.status["avoidNodes"][0]["until"])
    run_on_good_nodes(world, 3)
    wait_for_a_node(world, 3, full)
    seconds = 31 if full == 3 else int((until - world.now).total_seconds())
    for passed in (seconds - 2, 3):
        assert world.status["attempt"] == attempt and world.status["avoidNodes"]
        world.later(passed)
    assert world.status["attempt"] == attempt + 1 and not world.status["avoidNodes"]


def test_a_wait_for_full_nodes_ends_only_if_the_scheduler_counts_none_for_30_s() -> None:
    """Seen: a text that was cut before the count, once, and the job went back to the broken node."""
    world = a_started_world(a_job(numNodes=4, **ALONE))
    run_on_good_nodes(world, 3)
    world.set_pod(3, start_error(world), node="bad")
    world.settle_after_backoff()
    attempt = world.status["attempt"]
    run_on_good_nodes(world, 3)
    for _ in range(3):
        wait_for_a_node(world, 3, full=8)
        world.later(300)
        wait_for_a_node(world, 3, full=8, length=100)
        world.later(29)
        assert world.status["attempt"] == attempt and world.status["avoidNodes"]
    world.later(2)
    assert world.status["attempt"] == attempt + 1 and not world.status["avoidNodes"]


@pytest.mark.parametrize("has_trained", [False, True])
def test_one_broken_node_ends_no_job_of_a_full_cluster(has_trained: bool) -> None:
    """Its room is all that is free, for many hours: each failure after the first says nothing new about the job."""
    world = trained_world(**ALONE) if has_trained else World(a_job(numNodes=4, **ALONE))
    world.settle()
    for _ in range(20):
        run_on_good_nodes(world, 3)
        world.set_pod(3, start_error(world), node="bad")
        world.settle_after_backoff()
        run_on_good_nodes(world, 3)
        wait_for_a_node(world, 3, full=8)
        world.later(3601)
    assert world.status["state"] != "Failed" and world.status["restartsCountedTowardsLimit"] == 1


@pytest.mark.parametrize("is_local", [False, True])
def test_limit_of_restarts_holds_for_a_job_whose_only_node_does_not_start_it(is_local: bool) -> None:
    """It goes back after 30 s, because no other node fits."""
    world = a_running_world(a_job(numNodes=1, restartPolicy={"maxRestarts": 2}))
    world.settings = replace(world.settings, is_local=is_local)
    world.forward(3600)
    for _ in range(3):
        world.settle()
        world.set_pod(0, no_command(world), node="only")
        world.settle_after_backoff()
        if world.status["state"] != "Failed":
            wait_for_a_node(world, 0, full=0)
            world.later(31)
    assert world.status["state"] == "Failed" and world.condition("Failed")["reason"] == "MaxRestartsExceeded"


def test_node_that_did_not_start_a_job_before_is_avoided_at_its_next_failure() -> None:
    world = a_running_world(a_job(numNodes=1))
    world.forward(3600)
    for _ in range(4):
        world.settle()
        world.set_pod(0, start_error(world), node="bad")
        world.settle_after_backoff()
        world.forward(3601)
    world.show(0, start_error(world), node="bad")
    assert [node["nodeName"] for node in world.status["avoidNodes"]] == ["bad"]


def test_device_that_fails_each_hour_in_a_full_cluster_uses_no_restart_up() -> None:
    world = a_running_world(a_job(numNodes=1))
    world.forward(3600)
    for _ in range(20):
        world.settle()
        world.set_pod(0, failed(1, kind="DeviceFailed", at=world.now, message="ECC"), node="dying")
        world.settle_after_backoff()
        wait_for_a_node(world, 0, full=8)
        world.forward(3601)
    world.settle()
    assert world.status["state"] != "Failed" and world.status["restartsCountedTowardsLimit"] <= 2


@pytest.mark.parametrize("broken", BROKEN)
def test_advice_for_a_job_that_restarts_does_not_ask_to_create_it_again(broken: Any) -> None:
    """All nodes show the failure: a volume or a Secret is away, and the job goes on when it is back."""
    world = trained_world()
    for node_rank in range(4):
        world.set_pod(node_rank, broken(world), node=f"node-{node_rank}")
    world.settle()
    last = world.status["failures"][-1]
    assert last["action"] == "Restart" and "nodeSuspected" not in last
    assert last["next"].startswith("kubectl describe pod ") and "a volume or service of all its nodes" in last["hint"]


@pytest.mark.parametrize("seconds", [59, 60])
def test_job_without_reports_has_trained_when_all_its_pods_ran_for_a_minute(seconds: int) -> None:
    world = trained_world(seconds)
    for node_rank in range(4):
        world.set_pod(node_rank, start_error(world), node=f"node-{node_rank}")
    world.settle()
    assert (world.status["state"] == "Failed") == (seconds < 60)


def test_program_that_reports_step_0_for_a_minute_has_not_trained() -> None:
    """It loads data: an error at its first step follows from the program, however long that takes."""
    world = a_started_world(a_job(numNodes=1))
    world.run_all()
    world.report({"step": 0, "phase": "start"})
    world.later(600)
    drain(world, 0)
    world.show(0, wrong_usage(world))
    assert world.status["state"] == "Failed"


def refused(world: World, reason: str = "CreateContainerConfigError") -> Json:
    waiting = {"reason": reason, "message": 'secret "wandb" not found'}
    states = [{"name": "trainer", "state": {"waiting": waiting}}]
    return {"phase": "Pending", "startTime": timestamp(world.now), "containerStatuses": states}


@pytest.mark.parametrize("reason", ["CreateContainerConfigError", "InvalidImageName"])
def test_container_refused_for_a_minute_on_one_node_restarts_a_job_that_has_trained(reason: str) -> None:
    world = trained_world()
    world.show(3, refused(world, reason), node="bad")
    world.later(59)
    assert world.status["attempt"] == 2
    world.forward(1)
    world.settle_after_backoff()
    last = world.status["failures"][-1]
    assert world.status["attempt"] == 3 and (last["reason"], last["nodeSuspected"]) == (reason, True)


@pytest.mark.parametrize("reason", ["CreateContainerConfigError", "InvalidImageName"])
def test_job_that_has_trained_waits_half_an_hour_for_a_secret_that_all_its_pods_miss(reason: str) -> None:
    world = trained_world()
    for node_rank in range(4):
        world.set_pod(node_rank, refused(world, reason), node=f"node-{node_rank}")
    world.settle()
    world.later(1799)
    assert world.status["attempt"] == 2 and len(world.status["failures"]) == 1
    world.later(1)
    last = world.status["failures"][-1]
    assert (last["reason"], last["action"], last["counted"]) == (reason, "Restart", True)
    assert "nodeSuspected" not in last, "all nodes show it"


def test_loss_that_is_not_finite_restarts_the_job_once() -> None:
    """A GPU that computes wrong values gives the same report as a training that diverges."""
    world = a_running_world(a_job(numNodes=1))
    for state in ("Running", "Failed"):
        world.set_pod(0, failed(79, kind="NotFinite", message="loss is nan", at=world.now))
        world.settle_after_backoff()
        if state == "Running":
            world.run_all_and_settle()
        assert world.status["state"] == state
