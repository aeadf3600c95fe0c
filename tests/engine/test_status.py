"""The status: conditions, obstacles, progress, and events about transitions."""

import json
from datetime import timedelta

import pytest

from ddpjob.api import names
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import Problem
from tests.builders import NOW, World, a_job, a_running_world, a_started_world, ended, is_idle, running, unplaced


def test_all_nodes_running_causes_one_event_and_sets_every_field() -> None:
    world = a_started_world(a_job(nprocPerNode=2))
    world.run_all()
    made = world.reconcile()
    assert [note.reason for note in made.events] == ["Running"]
    assert world.status["state"] == "Running"
    assert world.status["nodesReady"] == "2/2"
    assert world.status["world"]["worldSize"] == 4
    assert world.status["world"]["masterAddress"] == "mnist-0a1b2-1-0.mnist-0a1b2.default.svc.cluster.local:29500"
    assert world.condition("Scheduled")["status"] == "True"
    assert world.condition("Reconciling")["status"] == "False"
    assert is_idle(world.reconcile())


def test_nodes_that_run_without_their_service_are_shown_as_starting() -> None:
    """The operator was killed before it created the Service, without which no rank finds rank 0."""
    world = World(a_job())
    world.reconcile(crash_after=4)
    world.run_all()
    world.service = None
    made = world.reconcile()
    assert world.condition("Running")["status"] == "False" and not made.events
    message = "2 of 2 nodes run, but the Service mnist-0a1b2 is not created yet"
    assert (world.condition("Running")["reason"], world.condition("Running")["message"]) == ("Starting", message)
    assert world.status["state"] == "Pending"
    made = world.reconcile()
    assert world.status["state"] == "Running" and [note.reason for note in made.events] == ["Running"]


def test_nodes_that_run_when_the_last_object_is_created_are_written_once() -> None:
    world = World(a_job())
    world.reconcile()
    world.run_all()
    made = world.reconcile()
    assert [note.reason for note in made.events] == ["Running"]
    assert world.status["currentAttempt"]["allRunningTime"] == timestamp(NOW)
    assert is_idle(world.reconcile())


def test_invalid_spec_is_reported_once() -> None:
    job = a_job(numNodes=0)
    world = World(job)
    made = world.reconcile()
    assert world.status["state"] == "Invalid"
    assert "spec.numNodes" in world.condition("Stalled")["message"]
    assert [note.type for note in made.events] == ["Warning"]
    assert is_idle(world.reconcile())


def test_refused_create_is_shown_with_the_servers_message() -> None:
    world = World(a_job())
    world.reconcile(crash_after=1)
    world.problems = (Problem("CreateRefused", names.PODS, "mnist-0a1b2-1-0", "exceeded quota: pods=1"),)
    made = world.reconcile()
    condition = world.condition("Running")
    assert (condition["reason"], condition["message"]) == ("CreateRefused", "exceeded quota: pods=1")
    assert [(n.reason, n.message) for n in made.events] == [("CreateRefused", "exceeded quota: pods=1")]
    world.problems = ()
    assert world.reconcile().requeue_after == pytest.approx(1)
    world.forward(1)
    assert world.reconcile().creates, "it is tried again"
    assert (world.status["attempt"], world.status["restarts"]) == (2, 0)


def test_a_name_conflict_is_shown_as_stalled() -> None:
    world = World(a_job())
    world.reconcile(crash_after=1)
    text = "pod mnist-0a1b2-1-0 belongs to another owner"
    world.problems = (Problem("NameConflict", names.PODS, "mnist-0a1b2-1-0", text),)
    for _ in range(2):
        made = world.reconcile()
        stalled = world.condition("Stalled")
        assert (stalled["status"], stalled["reason"], stalled["message"]) == ("True", "NameConflict", text)
        world.problems = ()
    assert is_idle(made), "said once"


@pytest.mark.parametrize(
    ("status", "condition", "reason", "text"),
    [
        (
            unplaced("0/3: no gpu"),
            "Scheduled", "Unschedulable", "0/3: no gpu",
        ),
        (
            {"phase": "Pending", "containerStatuses": [
                {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}]},
            "Running", "ImagePullBackOff", "no such image",
        ),
    ],
)  # fmt: skip
def test_obstacle_of_a_pod_is_quoted(status: dict, condition: str, reason: str, text: str) -> None:  # type: ignore[type-arg]
    world = a_started_world(a_job())
    world.pod(1)["status"] = status
    made = world.reconcile()
    assert world.condition(condition)["reason"] == reason
    assert text in world.condition(condition)["message"]
    assert reason in [note.reason for note in made.events]
    assert is_idle(world.reconcile())


def test_late_progress_of_an_old_attempt_is_ignored() -> None:
    world = a_started_world(a_job(rendezvous={"progressPort": 3001}))
    world.run_all()
    made = world.reconcile()
    assert world.reconcile().poll == ("mnist-0a1b2-1-0", "127.0.0.1", 3001) and made.poll
    report = {"schema": 1, "seq": 4, "phase": "train", "epoch": 1, "totalEpochs": 2, "step": 30, "totalSteps": 120,
              "loss": 0.25, "samplesPerSecond": 1234.5, "checkpoint": {"step": 20, "path": "20.pt"}}  # fmt: skip
    world.report(report)
    assert world.status["progress"]["display"] == "25% 30/120"
    assert world.status["progress"]["loss"] == "0.25"
    assert world.status["checkpoint"]["path"] == "20.pt"
    world.fail(0)
    world.run_all_and_settle()
    world.progress = (report | {"step": 31}, "mnist-0a1b2-1-0")
    assert is_idle(world.reconcile())


def test_stall_that_the_launcher_reports_is_shown_until_it_ends() -> None:
    world = a_running_world(a_job())
    report = {"schema": 3, "phase": "train", "step": 30, "stall": None}
    world.report(report)
    assert world.condition("Running")["reason"] == "AllNodesRunning"
    world.progress = (
        report
        | {"stall": {"rank": 5, "step": 30, "where": 7, "message": "stalled: rank 5 (node 1) is in phase train"}},
        "mnist-0a1b2-1-0",
    )
    made = world.reconcile()
    assert world.status["stall"] == {"rank": 5, "step": 30}
    running = world.condition("Running")
    assert (running["status"], running["reason"]) == ("True", "TrainingStalled")
    assert "2 of 2 nodes run, but stalled: rank 5 (node 1)" in running["message"]
    assert [(note.type, note.reason) for note in made.events] == [("Warning", "TrainingStalled")]
    assert is_idle(world.reconcile())
    world.report(report | {"step": 31})
    assert "stall" not in world.status
    assert world.condition("Running")["reason"] == "AllNodesRunning"
    assert not world.status.get("failures")


def test_a_slow_rank_is_shown_until_the_launcher_withdraws_it_and_written_once() -> None:
    world = a_running_world(a_job())
    report = {"schema": 3, "phase": "train", "step": 30}
    world.report(report)
    slow = {"rank": 5, "node": 1, "part": "data", "seconds": 0.0197, "stepSeconds": 0.029, "message": "slow: rank 5"}
    world.progress = (report | {"slow": slow}, "mnist-0a1b2-1-0")
    made = world.reconcile()
    found = world.status["slow"]
    assert found == {"since": found["since"], "rank": 5, "part": "data", "seconds": "0.0197", "stepSeconds": "0.029"}
    running = world.condition("Running")
    assert (running["status"], running["reason"]) == ("True", "TrainingSlow")
    assert "but slow: rank 5: use more workers" in running["message"]
    assert [(note.type, note.reason) for note in made.events] == [("Warning", "TrainingSlow")]
    world.forward(30)
    world.progress = (report | {"slow": slow | {"seconds": 0.02}}, "mnist-0a1b2-1-0")
    assert is_idle(world.reconcile()), "times that change a little are not written"
    world.report(report | {"step": 31, "slow": slow | {"part": "a part of a later release"}})
    assert world.status["slow"]["since"] > found["since"]
    world.report(report | {"step": 32, "slow": None})
    assert "slow" not in world.status
    assert world.condition("Running")["reason"] == "AllNodesRunning"


def test_parameters_that_differ_are_shown_until_the_launcher_withdraws_it_and_written_once() -> None:
    world = a_running_world(a_job())
    report = {"schema": 3, "phase": "train", "step": 30}
    world.report(report)
    diverged = {
        "rank": 2, "node": 0, "step": 25, "agreedStep": 20, "tensor": "fc.weight", "cause": "settings",
        "message": "replicas diverged: fc.weight",
    }  # fmt: skip
    world.progress = (report | {"diverged": diverged}, "mnist-0a1b2-1-0")
    made = world.reconcile()
    found = world.status["diverged"]
    assert found == {
        "since": found["since"], "rank": 2, "step": 25, "agreedStep": 20, "tensor": "fc.weight", "cause": "settings",
    }  # fmt: skip
    running = world.condition("Running")
    assert (running["status"], running["reason"]) == ("True", "ReplicasDiverged")
    assert "but replicas diverged: fc.weight: set learning rate" in running["message"]
    assert [(note.type, note.reason) for note in made.events] == [("Warning", "ReplicasDiverged")]
    world.forward(30)
    world.progress = (report | {"diverged": diverged}, "mnist-0a1b2-1-0")
    assert is_idle(world.reconcile())
    world.progress = None  # an operator that has just started
    events = [note.reason for _ in range(3) for note in world.reconcile().events]
    assert world.status["diverged"] == found
    assert world.condition("Running")["reason"] == "ReplicasDiverged"
    world.progress = (report | {"diverged": diverged}, "mnist-0a1b2-1-0")
    events += [note.reason for note in world.reconcile().events]
    assert world.status["diverged"] == found and not events
    world.report(report | {"step": 31, "diverged": diverged | {"cause": "of a later release", "rank": None}})
    assert world.status["diverged"]["since"] == found["since"]
    world.report(report | {"step": 32, "diverged": {"step": "x"}})
    assert "diverged" not in world.status
    assert world.condition("Running")["reason"] == "AllNodesRunning"


def test_a_loss_that_is_not_finite_is_shown_after_three_reports_and_until_it_is_finite() -> None:
    world = a_running_world(a_job())
    report = {"schema": 3, "phase": "train", "step": 10, "loss": "NaN"}
    for number, step in enumerate((10, 10, 20), start=1):
        world.report(report | {"step": step})
        world.forward(10)
        assert world.status["lossNotFinite"]["reports"] == (2 if step == 20 else 1), number
        assert world.condition("Running")["reason"] == "AllNodesRunning"
    world.report(report | {"step": 25, "loss": None})
    world.report(report | {"step": 30, "loss": "-Infinity"})
    assert world.status["lossNotFinite"]["step"] == 10
    running = world.condition("Running")
    assert (running["status"], running["reason"]) == ("True", "LossNotFinite")
    assert "not finite since step 10" in running["message"]
    assert not world.status.get("failures")
    world.report(report | {"step": 40, "loss": 0.5})
    assert "lossNotFinite" not in world.status
    assert world.condition("Running")["reason"] == "AllNodesRunning"


def test_one_loss_that_later_reports_keep_is_counted_once() -> None:
    world = a_running_world(a_job())
    for step in (100, 101, 102, 103):
        world.report({"schema": 3, "phase": "train", "step": step, "loss": "NaN", "lossStep": 100})
    found = world.status["lossNotFinite"]
    assert (found["step"], found["lastStep"], found["reports"]) == (100, 100, 1)
    assert world.condition("Running")["reason"] == "AllNodesRunning"
    for step in (110, 120):
        world.report({"schema": 3, "phase": "train", "step": step + 1, "loss": "NaN", "lossStep": step})
    assert world.status["lossNotFinite"] == found | {"lastStep": 120, "reports": 3}
    assert world.condition("Running")["reason"] == "LossNotFinite"


def test_the_time_of_a_loss_that_is_not_finite_is_that_of_the_first_until_the_training_is_before_it() -> None:
    world = a_running_world(a_job())
    report = {"schema": 3, "phase": "train", "loss": "NaN"}
    for step in (10, 20):
        world.report(report | {"step": step})
        world.forward(10)
        assert world.status["lossNotFinite"]["since"] == timestamp(NOW)
    world.report(report | {"step": 10})
    assert world.status["lossNotFinite"] == {"since": timestamp(NOW), "step": 10, "lastStep": 20, "reports": 2}
    world.report(report | {"step": 9})  # the ranks were started again
    now = timestamp(NOW + timedelta(seconds=20))
    assert world.status["lossNotFinite"] == {"since": now, "step": 9, "lastStep": 9, "reports": 1}


def test_pause_is_written_when_it_is_reported_and_when_it_ends_and_not_while_it_lasts() -> None:
    world = a_running_world(a_job())
    report = {"schema": 3, "phase": "train", "step": 30, "ageSeconds": 0.5, "pause": None}
    world.report(report)
    world.forward(12)
    world.progress = (report | {"ageSeconds": 12.0, "pause": {"stepSeconds": 0.0512}}, "mnist-0a1b2-1-0")
    made = world.reconcile()
    assert world.status["pause"] == {"since": timestamp(NOW), "stepSeconds": "0.0512"}
    assert not made.events and made.requeue_after is None, "nothing follows from it"
    assert world.condition("Running")["reason"] == "AllNodesRunning"
    for _ in range(3):
        world.forward(10)
        world.progress = (report | {"ageSeconds": 22.5, "pause": {"stepSeconds": 0.0512}}, "mnist-0a1b2-1-0")
        assert is_idle(world.reconcile())
    world.progress = None
    assert is_idle(world.reconcile()), "an operator that has just started has no answer yet"
    world.report(report | {"step": 31})
    assert "pause" not in world.status


def test_pause_of_another_step_has_its_own_time_and_the_end_of_an_attempt_ends_it() -> None:
    world = a_running_world(a_job())
    for step in (30, 50):
        world.forward(100)
        world.report({"step": step, "ageSeconds": 20.0, "pause": {"stepSeconds": 1.0}})
        assert world.status["pause"]["since"] == timestamp(world.now - timedelta(seconds=20))
    world.fail(0)
    assert "pause" not in world.status


def test_last_progress_is_read_from_the_termination_message() -> None:
    world = a_running_world(a_job(numNodes=1))
    message = json.dumps({
        "schema": 1, "outcome": "succeeded", "code": 0, "accuracy": 0.9912345,
        "progress": {"step": 470, "totalSteps": 470, "loss": 0.01}, "checkpoint": {"step": 470, "path": "470.pt"},
        "resumedFrom": {"step": 200, "path": "200.pt"},
    })  # fmt: skip
    world.set_pod(0, ended(0, message=message))
    made = world.reconcile()
    assert world.status["progress"]["accuracy"] == "0.991235"
    assert world.status["progress"]["percent"] == 100
    assert world.status["checkpoint"]["resumedFromStep"] == 200
    assert "ResumedFromCheckpoint" in [note.reason for note in made.events]


@pytest.mark.parametrize("message", ["", "Traceback ...", "{", "[1]", '{"progress": 3}', '{"progress": {"step": "x"}}'])
def test_trainer_without_a_json_report_succeeds(message: str) -> None:
    world = a_running_world(a_job(numNodes=1))
    world.show(0, ended(0, message=message))
    assert world.status["state"] == "Succeeded"


def not_ready(world: World, *ranks: int) -> str:
    """Let the Kubernetes nodes of these pods send no heartbeats from now on, and return that time."""
    since = timestamp(world.now)
    marked = [{"type": "Ready", "status": "False", "lastTransitionTime": since}]
    for rank in ranks:
        world.set_pod(rank, running(conditions=[*marked, {"type": "ContainersReady", "status": "True"}]), node="gpu-7")
    return since


@pytest.mark.parametrize("nodes", [1, 4])
def test_node_that_does_not_respond_is_named_and_nothing_follows(nodes: int) -> None:
    """The control plane does not delete its pods: they tolerate it, or the whole zone is silent."""
    world = a_running_world(a_job(numNodes=nodes))
    world.forward(600)
    since = not_ready(world, nodes - 1)
    world.settle()
    world.forward(7 * 86_400)
    assert world.settle() == 0
    found = world.condition("Running")
    assert (found["status"], found["reason"]) == ("True", "NodeNotResponding")
    for part in ("Kubernetes node gpu-7", f"node_rank {nodes - 1}", f"since {since}", "kubectl delete node gpu-7"):
        assert part in found["message"]
    assert (world.status["state"], world.status["attempt"]) == ("Running", 1)
    assert [note.reason for made in world.plans for note in made.events].count("NodeNotResponding") == 1
    world.run_all_and_settle()
    assert world.condition("Running")["reason"] == "AllNodesRunning"
