"""What a client does, with real processes of this machine and with a real API server alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ddpjob import Client, DDPJob
from ddpjob.api.status import DDPJobStatus
from ddpjob.errors import (
    DDPJobError,
    InvalidJobError,
    JobExistsError,
    JobNotFoundError,
    WaitTimeoutError,
)
from tests.client.worlds import ClusterWorld, LocalWorld, World


@pytest.fixture(params=["local", pytest.param("cluster", marks=pytest.mark.apiserver)])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Provide a client and what makes its jobs run; jobs that a failed test left are deleted."""
    made: World
    if request.param == "local":
        made = LocalWorld(tmp_path)
    else:
        made = ClusterWorld(request.getfixturevalue("control_plane"), request.getfixturevalue("namespace"))
    with made.client:
        yield made
        for job in made.client.list():
            with suppress(DDPJobError):
                made.client.delete(job)


def is_running(status: DDPJobStatus) -> bool:
    return status.state == "Running"


def test_life_of_a_job_that_is_suspended_resumed_and_restarted(world: World) -> None:
    client, job = world.client, world.job("mnist")
    made = client.submit(job)
    assert made.uid
    assert made.spec.command == job.spec.command
    with pytest.raises(JobExistsError, match="mnist already"):
        client.submit(job)
    world.run(made)
    first = client.get("mnist")
    assert [found.uid for found in client.list()] == [first.uid] == [made.uid]

    client.suspend(first)
    world.stop(first)
    assert client.get("mnist").spec.suspend
    client.resume("mnist")
    world.run(first)
    assert not client.get("mnist").spec.suspend
    restarted = client.restart("mnist")
    assert restarted.spec.restarted_at
    world.run(first)
    assert client.get("mnist").status.attempt == 3

    seen = []
    for status in client.watch("mnist", timeout=60):
        if not seen:
            world.finish(first)
        seen.append(status)
    assert seen[0].state == "Running"
    assert [status.is_true("Finished") for status in seen] == [False] * (len(seen) - 1) + [True]
    ended = client.wait("mnist", timeout=1)
    assert (ended.succeeded, ended.state, ended.status) == (True, "Succeeded", seen[-1])
    assert [status.state for status in client.watch(ended)] == ["Succeeded"], "the final status, once"
    for change in (client.suspend, client.resume, client.restart):
        with pytest.raises(DDPJobError, match="mnist has finished: it succeeded"):
            change("mnist")

    client.delete(ended)
    assert client.list() == []
    for call in (client.get, client.delete, client.wait, client.suspend):
        with pytest.raises(JobNotFoundError, match="no job mnist"):
            call("mnist")


def test_a_job_of_the_same_name_is_not_taken_for_the_deleted_one(world: World, tmp_path: Path) -> None:
    client = world.client
    old = client.submit(world.job("mnist"))
    followed = client.logs(old, follow=True)
    client.delete(old)
    new = client.submit(world.job("mnist"))
    assert list(followed) == [], "they end with the job"
    acts = (
        client.suspend,
        client.resume,
        client.restart,
        lambda job: client.change(job, {"restartPolicy": {"maxRestarts": 7}}),
        lambda job: client.wait(job, timeout=60),
        client.pods,
        client.delete,
        lambda job: next(client.logs(job)),
        client.explain,
        client.timeline,
        client.checkpoints,
        lambda job: client.pull(job, tmp_path / "pulled"),
        client.ranks,
        lambda job: client.bundle(job, tmp_path / "bundle.zip"),
    )
    for act in acts:
        with pytest.raises(JobNotFoundError, match="there is another of this name"):
            act(old)
    assert client.get(old).uid == new.uid
    assert not client.get(old).spec.suspend
    client.delete(new)
    with pytest.raises(JobNotFoundError, match="no job mnist"):
        client.pods(new)


def test_a_wait_ends_with_its_time_and_when_the_job_is_deleted(world: World) -> None:
    client, job = world.client, world.job("mnist")
    client.submit(job)
    world.run(job)
    assert client.wait(job, until=is_running, timeout=30).state == "Running"
    with pytest.raises(WaitTimeoutError, match=r"mnist is Running after 0\.2 s"):
        client.wait(job, timeout=0.2)
    statuses = client.watch(job, timeout=60)
    next(statuses)
    deletion = threading.Timer(0.1, client.delete, [job])
    deletion.start()
    with pytest.raises(JobNotFoundError, match="mnist was deleted"):
        list(statuses)
    deletion.join()


def test_a_list_is_watched_and_has_the_same_object_of_a_job_that_has_not_changed(world: World) -> None:
    client, job = world.client, world.job("mnist")
    first = client.submit(world.job("first"))
    world.run(first)
    lists = client.watch_list()
    [known] = next(lists)
    assert (known.name, known.state) == ("first", "Running")
    client.submit(job)
    world.run(job)
    found = next(found for found in lists if len(found) == 2 and found[1].state == "Running")
    assert [each.name for each in found] == ["first", "mnist"]
    assert found[0] is known
    client.delete(job)
    assert next(found for found in lists if len(found) == 1) == [known]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("team=a", ["one", "two"]),
        ("team==a, stage = test", ["one"]),
        ("ddpjob.dev/mine=", ["three"]),
        ("team=none", []),
        ("team=a,team=b", []),
    ],
)
def test_labels_select_jobs_here_as_on_a_cluster(labelled: Client, selector: str, expected: list[str]) -> None:
    assert sorted(expected) == [job.name for job in labelled.list(label_selector=selector)]


@pytest.mark.parametrize("selector", ["team=a b", "a in b", "=a", "a,,b"])
def test_a_text_that_is_no_selector_is_refused(labelled: Client, selector: str) -> None:
    with pytest.raises(DDPJobError):
        labelled.list(label_selector=selector)


@pytest.fixture
def labelled(world: World) -> Client:
    """Provide three suspended jobs with labels."""
    for name, labels in (
        ("one", {"team": "a", "stage": "test"}),
        ("two", {"team": "a", "stage": "prod"}),
        ("three", {"team": "b", "ddpjob.dev/mine": ""}),
    ):
        world.client.submit(DDPJob(name, image="none", command=["true"], labels=labels, suspend=True))
    return world.client


def test_what_is_no_job_reaches_none(world: World) -> None:
    client = world.client
    client.submit(DDPJob("mnist", image="none", command=["true"], suspend=True))
    for nothing in (None, ""):
        for call in (client.get, client.delete, client.suspend, client.wait):
            with pytest.raises(InvalidJobError, match="not a name of a DDPJob"):
                call(nothing)  # type: ignore[arg-type]
    assert [job.name for job in client.list()] == ["mnist"]


def test_fields_that_may_change_change_and_others_are_refused(world: World) -> None:
    client = world.client
    made = client.submit(DDPJob("mnist", image="none", command=["true"], suspend=True, active_deadline_seconds=60))
    if isinstance(world, LocalWorld):
        client.wait(made, until=lambda status: status.state == "Suspended", timeout=60)
    patch = {"restartPolicy": {"maxRestarts": 7}, "numNodes": 2, "activeDeadlineSeconds": None}
    changed = client.change("mnist", patch).spec
    assert (changed.restart_policy.max_restarts, changed.num_nodes, changed.active_deadline_seconds) == (7, 2, None)
    assert client.get("mnist").spec == changed
    for wrong in ({"command": ["false"]}, {"restartPolicy": {"maxRestart": 1}}, {"numNodes": 0}):
        with pytest.raises(InvalidJobError, match=r"command|maxRestart|numNodes"):
            client.change("mnist", wrong)
    assert client.get("mnist").spec == changed
    if not isinstance(world, LocalWorld):
        return
    running = client.submit(world.job("running"))
    world.run(running)
    with pytest.raises(DDPJobError, match="changes only while it is suspended"):
        client.change("running", {"restartPolicy": {"maxRestarts": 7}})


def test_a_refused_job_names_each_field(world: World) -> None:
    manifest = world.job("mnist").manifest
    wrong = DDPJob.from_manifest(manifest | {"spec": manifest["spec"] | {"numNodes": 0, "image": "a b"}})
    with pytest.raises(InvalidJobError, match=r"spec\.image.*spec\.numNodes|spec\.numNodes.*spec\.image"):
        world.client.submit(wrong)
    assert world.client.list() == []


def test_a_job_is_explained_from_its_start_to_its_failure(world: World) -> None:
    client, job = world.client, world.job("mnist")
    with pytest.raises(JobNotFoundError):
        client.explain("mnist")
    client.submit(job)
    world.run(job)
    found = client.explain("mnist")
    assert (found.job, found.stage, found.state, found.is_abnormal) == ("mnist", "FirstStep", "Running", False)
    client.suspend("mnist")
    world.stop(job)
    found = client.explain("mnist")
    assert (found.stage, found.is_abnormal, found.evidence[0].field) == ("Suspended", False, "spec.suspend")
    client.resume("mnist")
    world.run(job)
    world.fail(job)
    failed = client.wait("mnist", timeout=60)
    found = client.explain(failed)
    assert (found.stage, found.reason, found.attempt, found.node_rank) == ("Crash", "Error", 2, 0)
    assert (found.exit_code, found.confidence, found.is_abnormal) == (3, "Medium", True)
    assert found.evidence[0].field == "status.failures[0].message"
    assert found.next
    happened = client.timeline(failed).events
    assert [entry.time for entry in happened] == sorted(entry.time for entry in happened)
    with pytest.raises(JobNotFoundError):
        client.timeline("another")
    with pytest.raises(JobNotFoundError):
        client.pods("another")
