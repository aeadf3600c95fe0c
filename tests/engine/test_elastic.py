"""Jobs with minNodes: attempts of fewer nodes where not all can be placed, and of more when there is room again."""

from datetime import timedelta
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.exit_codes import RENDEZVOUS
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import Create, EngineSettings
from tests.builders import NOW, UID, World, a_job, a_started_world, ended, failed, is_idle, running

LIMIT = 300
REFUSED = {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}]}


def elastic(**spec: Any) -> World:
    return World(a_job(**{"numNodes": 3, "minNodes": 2} | spec))


def place(world: World, *ranks: int) -> None:
    """Let the pods of these nodes run; the others of the attempt find no Kubernetes node."""
    for rank in ranks:
        world.set_pod(rank, running(), node=f"worker-{rank}")
    for pod in world.pods.values():
        if not pod["spec"].get("nodeName"):
            pod["status"] = REFUSED
    world.settle()


def go(world: World, seconds: float) -> None:
    """Let time pass, with a plan at each time that the plans ask for."""
    end = world.now + timedelta(seconds=seconds)
    while world.now < end:
        made = world.reconcile()
        left = (end - world.now).total_seconds()
        if is_idle(made):
            world.forward(min(made.requeue_after or left, left))
    world.settle()


def smaller(**spec: Any) -> World:
    """Return a job whose third node found no place, and that now runs with two."""
    world = elastic(**spec)
    world.settle()
    place(world, 0, 1)
    go(world, LIMIT)
    place(world, 0, 1)
    return world


def attempt(world: World) -> dict[str, Any]:
    return dict(world.status["currentAttempt"])


def trainers(world: World) -> set[str]:
    return {name for name in world.pods if "-probe-" not in name}


def probes(world: World) -> list[str]:
    return sorted(name for name in world.pods if "-probe-" in name)


def answer(world: World, *nodes: str | None) -> None:
    """Let the scheduler place the probes on these nodes."""
    for name, node in zip(probes(world), nodes, strict=True):
        pod = world.pods[name]
        pod["status"] = ended(0) if node else REFUSED
        pod["spec"] = pod["spec"] | ({"nodeName": node} if node else {})


def pod_names(number: int, count: int) -> set[str]:
    return {names.pod_name("mnist", UID, number, rank) for rank in range(count)}


def variables(create: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in create["spec"]["containers"][0]["env"]}


def test_job_without_all_nodes_starts_with_those_that_were_placed() -> None:
    world = elastic(nprocPerNode=1)
    world.settle()
    place(world, 0, 1)
    go(world, LIMIT - 1)
    assert attempt(world)["number"] == 1 and "size" not in attempt(world)
    go(world, 1)
    assert attempt(world)["number"] == 2 and trainers(world) == pod_names(2, 2)
    place(world, 0, 1)
    status = world.status
    assert (status["restarts"], status["restartsCountedTowardsLimit"], status.get("failures")) == (0, 0, None)
    assert status["world"]["numNodes"] == status["world"]["worldSize"] == 2
    assert status["nodes"]["desired"] == 2 and status["nodesReady"] == "2/2 of 3"
    found = variables(world.pod(0))
    assert (found["NNODES"], found["PET_NNODES"], found["WORLD_SIZE"]) == ("2", "2", "2")


def test_job_keeps_its_size_while_its_own_old_pods_save() -> None:
    """Without a checkpoint volume no attempt waits for the old pods."""
    world = elastic(template={"spec": {"terminationGracePeriodSeconds": 600}})
    world.settle()
    place(world, 0, 1, 2)
    world.lingering = True
    world.set_pod(2, failed(1), node="worker-2")
    go(world, 15)
    number = attempt(world)["number"]
    old = [pod for pod in world.pods.values() if "deletionTimestamp" in pod["metadata"]]
    assert number == 2 and old
    for pod in old:
        pod["metadata"]["deletionTimestamp"] = timestamp(world.now + timedelta(seconds=600))
    place(world, 0, 1)
    go(world, LIMIT * 1.9)
    assert attempt(world)["number"] == number and not attempt(world).keys() & {"ending", "partialSince"}
    for pod in old:
        del world.pods[pod["metadata"]["name"]]
    go(world, LIMIT - 1)
    assert attempt(world)["number"] == number and "ending" not in attempt(world), "the scheduler may place them now"
    go(world, 2)
    assert attempt(world)["ending"]["verdict"] == "NodesUnavailable" and attempt(world)["nextSize"]["nodes"] == 2


def test_running_smaller_is_shown_with_since_when_and_what_follows() -> None:
    world = smaller()
    found = world.condition("Running")
    assert (found["status"], found["reason"]) == ("True", "RunningSmaller")
    since, then = timestamp(NOW + timedelta(seconds=LIMIT)), timestamp(NOW + timedelta(seconds=LIMIT + 600))
    for part in ("2 of 2 nodes run", "numNodes is 3", since, then):
        assert part in found["message"]
    assert attempt(world)["size"] == {"nodes": 2, "smallerSince": since, "shrunkTime": since}


@pytest.mark.parametrize(
    ("spec", "placed"),
    [
        ({"minNodes": None}, (0, 1)),
        ({"minNodes": 3}, (0, 1)),
        ({}, (0,)),
        ({}, ()),
        ({"scheduling": {"partialGangSeconds": 600}}, (0, 1)),
    ],
)
def test_job_keeps_its_size(spec: dict[str, Any], placed: tuple[int, ...]) -> None:
    given = {key: value for key, value in ({"numNodes": 3, "minNodes": 2} | spec).items() if value}
    world = a_started_world(a_job(**given))
    place(world, *placed)
    go(world, LIMIT + 10)
    assert attempt(world)["number"] == 1 and trainers(world) == pod_names(1, 3)


def test_gang_scheduler_that_places_none_gets_a_group_of_min_nodes() -> None:
    world = elastic()
    world.settings = EngineSettings(gang_scheduler="volcano")
    world.settle()
    place(world)
    go(world, LIMIT)
    assert trainers(world) == pod_names(2, 2)
    (group,) = world.groups[names.VOLCANO_GROUPS].values()
    assert group["spec"]["minMember"] == 2


def test_probes_ask_for_the_room_of_a_pod_and_end_at_once() -> None:
    world = smaller(
        resources={"limits": {"nvidia.com/gpu": 8}},
        env=[{"name": "TOKEN", "value": "secret"}],
        checkpoint={"claimName": "c"},
        template={"spec": {"nodeSelector": {"pool": "gpu"}, "containers": [{"name": "log", "image": "log:1"}]}},
    )
    go(world, 599)
    assert probes(world) == []
    go(world, 2)
    assert probes(world) == [names.probe_name("mnist", UID, 2, 2)]
    probe, pod = world.pods[probes(world)[0]], world.pod(0)
    kept = ("nodeSelector", "tolerations", "affinity", "volumes", "securityContext", "restartPolicy")
    assert [probe["spec"].get(key) for key in kept] == [pod["spec"].get(key) for key in kept]
    for asked, real in zip(probe["spec"]["containers"], pod["spec"]["containers"], strict=True):
        same = ("name", "image", "resources", "securityContext", "ports")
        assert [asked.get(key) for key in same] == [real.get(key) for key in same]
        assert asked["command"] == ["true"] and "secret" not in str(asked) and "volumeMounts" not in asked
    assert names.LABEL_ATTEMPT not in probe["metadata"]["labels"]
    assert probe["metadata"]["ownerReferences"] == pod["metadata"]["ownerReferences"]


def test_job_grows_from_a_checkpoint_when_its_probes_are_placed() -> None:
    world = smaller()
    world.lingering = True
    go(world, 601)
    answer(world, "worker-9")
    made = world.reconcile()
    assert {delete.name for delete in made.deletes} >= pod_names(2, 2), "SIGTERM lets the pods save a checkpoint"
    assert world.condition("Reconciling")["reason"] == "NodesAvailable"
    assert "drainUntil" in attempt(world)["ending"]
    world.settle()
    assert attempt(world)["number"] == 2, "the next attempt waits for the pods that save"
    world.pods = {}
    world.settle()
    assert attempt(world)["number"] == 3 and trainers(world) == pod_names(3, 3) and not probes(world)
    place(world, 0, 1, 2)
    assert world.status["world"]["numNodes"] == 3 and world.status["nodesReady"] == "3/3"
    assert world.condition("Running")["reason"] == "AllNodesRunning"
    assert world.status["restarts"] == 0
    assert attempt(world)["size"].keys() == {"nodes", "shrunkTime", "grownTime"}


def test_job_grows_by_the_probes_that_were_placed_in_a_minute() -> None:
    world = smaller(numNodes=4)
    go(world, 600)
    answer(world, "worker-9", None)
    go(world, 58)
    assert attempt(world)["number"] == 2
    go(world, 3)
    assert trainers(world) == pod_names(3, 3) and not probes(world)


@pytest.mark.parametrize("is_lost", [False, True])
def test_probes_that_find_no_room_are_deleted_and_ask_again_after_ten_minutes(is_lost: bool) -> None:
    """One that is being deleted, perhaps on a lost node, shows no room."""
    world = smaller()
    go(world, 600)
    answer(world, "lost" if is_lost else None)
    if is_lost:
        deleting = {"deletionTimestamp": timestamp(world.now), "deletionGracePeriodSeconds": 30}
        world.pods[probes(world)[0]]["metadata"] |= deleting
    go(world, 100)
    assert attempt(world)["number"] == 2
    if is_lost:
        return
    assert not probes(world)
    go(world, 499)
    assert not probes(world)
    go(world, 2)
    assert len(probes(world)) == 1


def test_plan_that_sees_all_nodes_run_returns_to_ask_for_room() -> None:
    world = elastic()
    world.settle()
    place(world, 0, 1)
    go(world, LIMIT)
    world.forward(500)
    for rank in range(2):
        world.set_pod(rank, running())
    made = world.reconcile()
    assert "allRunningTime" in attempt(world), "no other plan follows by itself"
    assert made.requeue_after is not None and made.requeue_after <= 100


def test_a_refused_probe_is_no_problem_of_the_job() -> None:
    world = smaller()
    go(world, 599)
    while not (made := world.reconcile()).creates:
        world.forward(1)
    (probe,) = [create for phase in made.creates for create in phase]
    assert isinstance(probe, Create) and probe.optional and made.creates_attempt is None
    assert made.requeue_after == 60, "no pod's event follows, and the job asks again ten minutes later"


@pytest.mark.parametrize("end", ["loss", "suspend", "success"])
def test_probes_are_deleted_with_the_attempt_that_asked_and_a_resumed_job_has_all_nodes(end: str) -> None:
    world = smaller()
    go(world, 601)
    assert probes(world)
    if end == "loss":
        del world.pods[names.pod_name("mnist", UID, 2, 1)]
    elif end == "suspend":
        world.job["spec"]["suspend"] = True
    else:
        world.set_pod(0, ended(0))
        world.set_pod(1, ended(0))
    world.settle()
    assert not probes(world)
    if end == "suspend":
        world.suspend(False)
        assert trainers(world) == pod_names(3, 3)


def test_growth_that_is_not_placed_doubles_the_time_to_the_next() -> None:
    world = smaller()
    waits = []
    for _ in range(3):
        start = world.now
        while not probes(world):
            go(world, 10)
        waits.append((world.now - start).total_seconds())
        answer(world, "worker-9")
        world.settle()
        place(world, 0, 1)
        go(world, LIMIT + 1)
        place(world, 0, 1)
        assert world.status["world"]["numNodes"] == 2
    assert waits == [pytest.approx(wait, abs=20) for wait in (600, 1200, 2400)]


def test_job_gets_smaller_only_once_in_ten_minutes() -> None:
    world = elastic(numNodes=4, minNodes=1)
    world.settle()
    place(world, 0, 1, 2)
    go(world, LIMIT)
    start = world.now
    place(world, 0, 1)
    go(world, 590)
    assert world.status["world"]["numNodes"] == 3
    go(world, 11)
    assert world.status["world"]["numNodes"] == 2 and (world.now - start).total_seconds() < 610


@pytest.mark.parametrize("least", [None, 3])
def test_min_nodes_above_the_size_ends_a_smaller_attempt(least: int | None) -> None:
    world = smaller()
    world.job["spec"]["minNodes"] = least
    world.settle()
    assert trainers(world) == pod_names(3, 3)


def test_an_edit_of_the_size_throws_no_end_away() -> None:
    world = smaller()
    for rank in range(2):
        world.set_pod(rank, ended(0))
    world.job["spec"]["minNodes"] = 3
    world.settle()
    assert world.status["state"] == "Succeeded"


def test_failure_beside_an_edit_of_the_size_is_counted() -> None:
    world = smaller()
    world.set_pod(1, ended(1))
    world.job["spec"]["minNodes"] = 3
    go(world, 60)
    assert [failure["nodeRank"] for failure in world.status["failures"]] == [1]
    assert trainers(world) >= pod_names(3, 3)


@pytest.mark.parametrize("size", ["edited", "room"])
def test_no_attempt_ends_for_another_size_while_none_could_follow(size: str) -> None:
    world = smaller()
    if size == "edited":
        world.job["spec"]["minNodes"] = 3
    else:
        go(world, 600)
        answer(world, "worker-9")
    container = {"name": "trainer", "env": [{"name": "CHANGED", "value": "1"}]}
    world.job["spec"]["template"] = {"spec": {"containers": [container]}}
    world.job["metadata"]["generation"] = 2
    go(world, 61)
    assert attempt(world)["number"] == 2 and trainers(world) == pod_names(2, 2)


def test_job_gets_smaller_when_its_pods_do_not_wait_as_long_as_the_limit() -> None:
    world = elastic(rendezvous={"timeoutSeconds": 60})
    world.settle()
    for number in range(1, 5):  # with the delays between them, the fourth ends after the limit
        assert attempt(world)["number"] == number and "size" not in attempt(world)
        place(world, 0, 1)
        go(world, 60)
        for rank in (0, 1):
            world.set_pod(rank, failed(RENDEZVOUS, at=world.now), node=f"worker-{rank}")
        go(world, 40)
    assert attempt(world)["size"]["nodes"] == 2 and trainers(world) == pod_names(5, 2)
    assert world.status["restartsCountedTowardsLimit"] == 0


def test_probes_in_the_same_room_one_after_the_other_count_once() -> None:
    world = smaller(numNodes=4)
    go(world, 600)
    first, second = probes(world)
    times = [world.now + timedelta(seconds=seconds) for seconds in range(4)]
    for name, started, finished in ((first, times[0], times[1]), (second, times[1], times[3])):
        world.pods[name]["status"] = ended(0, started=started, at=finished)
        world.pods[name]["spec"] = world.pods[name]["spec"] | {"nodeName": "worker-9"}
    go(world, 61)
    assert trainers(world) == pod_names(3, 3)


def test_label_of_probes_hides_no_pod_of_an_attempt() -> None:
    world = smaller()
    world.pod(0)["metadata"]["labels"][names.LABEL_PROBE] = ""
    world.settle()
    assert attempt(world)["number"] == 2 and trainers(world) == pod_names(2, 2)
