"""The story of a job: what status, pods and Events say is listed once, in the order in which it happened."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ddpjob.api import names
from ddpjob.api.times import timestamp
from ddpjob.client.job import DDPJob
from ddpjob.client.timeline import JobEvent, job_pods, local_events, timeline
from tests.builders import NOW, World, a_job, a_running_world, ended, failed


def a_restarted_world() -> World:
    """Return a job whose node 1 failed after a minute, and that runs again in the same second."""
    made = a_job()
    made["metadata"]["creationTimestamp"] = timestamp(NOW)
    world = a_running_world(made)
    world.forward(60)
    world.set_pod(1, failed(1, at=world.now, kind="ValueError", exception="ValueError", message="sample 17 is bad"))
    world.settle()
    world.run_all()
    world.settle()
    return world


def sent(world: World) -> list[dict[str, Any]]:
    """Return the Events that the operator has sent; those of the last minute have the time of the last plan."""
    about = {"kind": "DDPJob", "name": "mnist"}
    notes = [note for plan in world.plans for note in plan.events]
    late = next(number for number, note in enumerate(notes) if note.reason == "Restarting")
    return [
        {
            "metadata": {}, "involvedObject": about, "reportingComponent": "ddpjob-operator", "type": note.type,
            "reason": note.reason, "message": note.message,
            "lastTimestamp": timestamp(world.now if number >= late else NOW),
        }
        for number, note in enumerate(notes)
    ]  # fmt: skip


def story(world: World, events: list[dict[str, Any]]) -> list[JobEvent]:
    for pod in world.pods.values():
        pod["metadata"].setdefault("creationTimestamp", timestamp(world.now))
    return timeline(DDPJob.from_manifest(world.job), world.pods.values(), events)


def of_job(found: list[JobEvent]) -> list[tuple[str, int | None]]:
    return [(entry.reason, entry.attempt) for entry in found if entry.kind == "DDPJob"]


COURSE = [("Submitted", None), ("Started", 1), ("Restarting", 1), ("Started", 2), ("Running", 2)]


def test_the_status_alone_tells_the_decisions_in_their_order() -> None:
    found = story(a_restarted_world(), [])
    assert of_job(found) == COURSE
    restart = next(entry for entry in found if entry.reason == "Restarting")
    assert (restart.type, restart.source) == ("Warning", "operator")
    assert "ValueError" in restart.message


def test_what_an_event_says_too_is_listed_once_with_the_words_of_the_event() -> None:
    world = a_restarted_world()
    found = story(world, sent(world))
    assert of_job(found) == [*COURSE[:2], ("Running", None), *COURSE[2:]], "the status forgets when attempt 1 ran"
    assert "restart 1 of" in next(entry.message for entry in found if entry.reason == "Restarting")


def test_two_restarts_within_seconds_are_two() -> None:
    world = a_restarted_world()
    world.set_pod(0, failed(1, at=world.now, kind="OSError", message="disk"))
    world.settle()
    found = story(world, sent(world))
    assert [a for reason, a in of_job(found) if reason == "Restarting"] == [1, 2]
    assert len([entry for entry in found if entry.reason == "Started" and entry.kind == "DDPJob"]) >= 2


def test_pods_scheduler_and_kubelet_stand_where_they_belong() -> None:
    world = a_running_world(a_job())
    pod = world.pod(1)
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(NOW)}
    start, end = NOW + timedelta(seconds=5), NOW + timedelta(seconds=90)
    pod["status"] = ended(3, at=end, started=start, message="no report") | {"conditions": [condition]}
    name = pod["metadata"]["name"]
    about = {"kind": "Pod", "name": name}
    pulled = {"metadata": {}, "involvedObject": about, "source": {"component": "kubelet"}, "reason": "Pulled"}
    pulled |= {"type": "Normal", "message": "image", "lastTimestamp": timestamp(NOW + timedelta(seconds=4)), "count": 3}
    scheduled = pulled | {"reason": "Scheduled", "source": {"component": "default-scheduler"}, "count": None}
    scheduled |= {"lastTimestamp": None, "eventTime": "2026-03-01T12:00:00.345678Z"}
    gone = pulled | {"involvedObject": {"kind": "Pod", "name": f"{name[:-3]}9-0"}}
    found = [entry for entry in story(world, [gone, scheduled, pulled]) if entry.kind == "Pod" and entry.node_rank == 1]
    assert [(entry.source, entry.reason, entry.count) for entry in found] == [
        ("operator", "PodCreated", 1), ("scheduler", "Scheduled", 1), ("kubelet", "Pulled", 3),
        ("kubelet", "Started", 1), ("kubelet", "Ended", 1),
    ]  # fmt: skip
    assert (found[-1].type, found[-1].message) == ("Warning", "exit code 3, Error, no report")
    assert [entry.attempt for entry in story(world, [gone]) if entry.name.endswith("9-0")] == [9]


def test_pods_are_sorted_by_attempt_and_node_with_why_they_wait() -> None:
    world = a_restarted_world()
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    world.set_pod(0, {"phase": "Pending", "containerStatuses": [{"name": "trainer", "state": {"waiting": waiting}}]})
    found = job_pods(world.pods.values())
    assert [(pod.attempt, pod.node_rank) for pod in found] == [(2, 0), (2, 1), (1, 1)]
    assert (found[0].state, found[0].reason, found[0].message) == ("pending", "ImagePullBackOff", "no such image")
    assert (found[2].exit_code, found[2].message) == (1, "sample 17 is bad")


def test_lines_that_are_no_events_are_left_out() -> None:
    lines = ["2026-03-01T12:00:00Z Normal Started: attempt 1 starts: now", "", "half a li", "x Normal Started: y"]
    (event,) = local_events(DDPJob.from_manifest(a_job()), lines)
    assert (event["type"], event["reason"], event["message"]) == ("Normal", "Started", "attempt 1 starts: now")
    assert event["involvedObject"] == {"kind": names.DDPJOBS.kind, "name": "mnist"}
