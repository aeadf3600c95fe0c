"""The Events and the pods of a job."""

from __future__ import annotations

from datetime import timedelta

from ddpjob.api import names
from ddpjob.api.times import timestamp
from ddpjob.client.job import DDPJob
from ddpjob.client.snapshot import Snapshot
from ddpjob.client.timeline import job_pods, local_events, timeline_of
from tests.builders import NOW, SETTINGS, World, a_job, a_running_world, failed


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


def test_events_are_sorted_by_time_with_who_sent_them_and_the_node_of_a_pod() -> None:
    world = a_running_world(a_job())
    name = world.pod(1)["metadata"]["name"]
    about = {"kind": "Pod", "name": name}
    pulled = {"metadata": {}, "involvedObject": about, "source": {"component": "kubelet"}, "reason": "Pulled"}
    pulled |= {"type": "Normal", "message": "image", "lastTimestamp": timestamp(NOW + timedelta(seconds=4)), "count": 3}
    scheduled = pulled | {"reason": "Scheduled", "source": {"component": "default-scheduler"}, "count": None}
    scheduled |= {"lastTimestamp": None, "eventTime": "2026-03-01T12:00:00.345678Z"}
    gone = pulled | {"involvedObject": {"kind": "Pod", "name": f"{name[:-3]}9-0"}}
    without_time = pulled | {"lastTimestamp": None}
    seen = Snapshot(job=world.job, now=NOW, settings=SETTINGS, events=[gone, scheduled, without_time, pulled])
    found = timeline_of(seen, "here").events
    assert [(entry.source, entry.reason, entry.count, entry.attempt, entry.node_rank) for entry in found] == [
        ("scheduler", "Scheduled", 1, 1, 1), ("kubelet", "Pulled", 3, 9, 0), ("kubelet", "Pulled", 3, 1, 1),
    ]  # fmt: skip


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
