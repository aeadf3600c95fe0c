"""The client of a cluster: faults between it and a real API server, and the logs of pods."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpjob import Client, DDPJob, LogLine
from ddpjob.api import names
from ddpjob.api.backoff import Patience
from ddpjob.client import cluster, cluster_watch, connection
from ddpjob.errors import (
    DDPJobError,
    InvalidJobError,
    JobNotFoundError,
    NotAllowedError,
    UnavailableError,
    WaitTimeoutError,
)
from tests.api.specs import CLAIM
from tests.client.worlds import TIME, ClusterWorld
from tests.processes import eventually
from tests.worlds.fault_proxy import Fault, FaultProxy
from tests.worlds.kubelet import Kubelet

pytestmark = pytest.mark.apiserver


class Collected:
    """Collects the items of an iterator in a thread."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items: list[Any] = []
        self.error: Exception | None = None
        self._source = items
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for item in self._source:
                self.items.append(item)
        except Exception as error:
            self.error = error

    def until_end(self) -> list[Any]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.items


def is_watched(proxy: FaultProxy) -> bool:
    return any("watch=true" in seen.path.lower() for seen in proxy.seen)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_the_end_of_a_job_while_the_api_server_is_away_is_seen_once(
    world: ClusterWorld, proxy: FaultProxy, is_deleted: bool
) -> None:
    job = world.client.submit(world.job("mnist"))
    world.run(job)
    statuses = Collected(world.client.watch(job, timeout=60))
    eventually("the watch is open", lambda: is_watched(proxy))
    answers = itertools.cycle([Fault(), Fault(status=503), Fault(status=403, body="{}"), Fault(status=404, body="")])
    proxy.seen.clear()
    proxy.rule = lambda request: next(answers)
    proxy.cut()
    world.finish(job)
    if is_deleted:
        world.plane.request("DELETE", f"{names.DDPJOBS.path(world.namespace)}/mnist")
    eventually("every fault was seen", lambda: len(proxy.seen) >= 4)
    proxy.rule = lambda request: None
    assert [status.state for status in statuses.until_end()] == ["Running", "Succeeded"]


def test_a_watch_behind_the_history_reads_the_job(world: ClusterWorld) -> None:
    job = world.client.submit(world.job("mnist"))
    assert isinstance(world.client, cluster.ClusterClient)
    versions = cluster_watch.JobVersions(world.client.connection, job, world.client._key(job))
    versions._version = "1"  # before the API server started
    world.run(job)
    seen = next(versions.after_last(5))
    assert seen.state == "Running"
    world.finish(job)
    assert next(versions.after_last(5)).finished, "the watch continues behind what was read"


def test_a_watched_list_survives_an_api_server_that_is_away_and_says_so(world: ClusterWorld, proxy: FaultProxy) -> None:
    known = world.client.submit(world.job("known"))
    troubles: list[DDPJobError | None] = []
    lists = Collected(world.client.watch_list(on_trouble=troubles.append))
    eventually("the watch is open", lambda: is_watched(proxy))
    before = len(proxy.seen)
    assert before == 3, "after the submission, one list and one watch"
    gone = Fault(status=410, body='{"kind": "Status", "code": 410, "reason": "Expired"}')
    answers = itertools.cycle([Fault(), Fault(status=503), gone, Fault(status=404, body="")])
    proxy.rule = lambda request: next(answers)
    proxy.cut()
    world.plane.request("DELETE", f"{names.DDPJOBS.path(world.namespace)}/known")
    world.plane.request("POST", names.DDPJOBS.path(world.namespace), world.job("new").manifest)
    eventually("every fault was seen", lambda: len(proxy.seen) >= before + 6)
    assert troubles[0] is None and isinstance(troubles[-1], DDPJobError)
    proxy.rule = lambda request: None
    eventually("the list is current", lambda: [job.name for job in lists.items[-1]] == ["new"])
    assert troubles[-1] is None
    assert [[job.name for job in found] for found in lists.items if found] in (
        [["known"], ["new"]],
        [["known"], ["known", "new"], ["new"]],
    )
    assert known.uid == lists.items[0][0].uid


def test_a_timeline_has_the_pods_of_the_job_and_the_events_of_pods_that_are_gone(
    world: ClusterWorld, proxy: FaultProxy
) -> None:
    checkpoint = {"mountPath": "/checkpoints", "claimTemplate": CLAIM}
    job = world.client.submit(DDPJob("mnist", image="none", command=["train"], checkpoint=checkpoint))
    core = f"/api/v1/namespaces/{world.namespace}"
    labels = {names.LABEL_JOB_UID: job.uid, names.LABEL_ATTEMPT: "2", names.LABEL_NODE_RANK: "0"}
    pod = names.pod_name("mnist", str(job.uid), 2, 0)
    spec = {"containers": [{"name": names.TRAINER_CONTAINER, "image": "none"}]}
    world.plane.request("POST", f"{core}/pods", {"metadata": {"name": pod, "labels": labels}, "spec": spec})
    world.plane.request("POST", f"{core}/pods", {"metadata": {"name": "another"}, "spec": spec})
    about = (
        ("DDPJob", "mnist", job.uid, "Started"),
        ("Pod", names.pod_name("mnist", str(job.uid), 1, 0), "gone", "FailedScheduling"),
        ("Pod", "another", "other", "Pulled"),
        ("PersistentVolumeClaim", names.claim_name("mnist"), "claim", "ProvisioningFailed"),
        ("DDPJob", "mnist", "of an earlier job", "Failed"),
    )
    for number, (kind, name, uid, reason) in enumerate(about):
        involved = {"kind": kind, "name": name, "uid": uid, "namespace": world.namespace}
        times = {"firstTimestamp": TIME, "lastTimestamp": TIME, "count": number + 1}
        body = {"metadata": {"name": f"event-{number}"}, "involvedObject": involved, "reason": reason, **times}
        world.plane.request("POST", f"{core}/events", body | {"type": "Warning", "message": "why"})
    proxy.seen.clear()
    found = world.client.timeline(job)
    assert {(entry.kind, entry.reason, entry.attempt, entry.count) for entry in found.events} == {
        ("DDPJob", "Started", None, 1),
        ("Pod", "FailedScheduling", 1, 2),
        ("PersistentVolumeClaim", "ProvisioningFailed", None, 4),
    }
    assert [(one.name, one.attempt, one.state) for one in found.pods] == [(pod, 2, "pending")]
    assert world.client.pods("mnist") == found.pods
    assert sum("/pods" in seen.path for seen in proxy.seen) == 2, "each call lists the pods once"


def test_requests_are_repeated_only_if_that_is_safe(world: ClusterWorld, proxy: FaultProxy) -> None:
    proxy.once("POST", "ddpjobs", Fault(after_commit=True))
    with pytest.raises(UnavailableError, match="may have been carried out"):
        world.client.submit(world.job("mnist"))
    posts = [seen for seen in proxy.seen if seen.method == "POST"]
    assert len(posts) == 1
    proxy.once("GET", "ddpjobs", Fault(status=503), times=2)
    assert world.client.get("mnist").name == "mnist"
    proxy.once("DELETE", "ddpjobs", Fault(status=429))
    world.client.delete("mnist")
    assert world.client.list() == []


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (Fault(status=401), UnavailableError, "credentials"),
        (Fault(status=403), NotAllowedError, "roles view and edit"),
        (Fault(status=404, body="404 page not found"), UnavailableError, "does not serve DDPJobs"),
        (Fault(status=500), UnavailableError, "does not answer"),
    ],
)
def test_an_error_says_what_to_do(
    world: ClusterWorld, proxy: FaultProxy, fault: Fault, kind: type[Exception], text: str
) -> None:
    assert isinstance(world.client, cluster.ClusterClient)
    if fault.status == 500:  # tries again until then
        world.client.connection.timeout = 1.0
    proxy.rule = lambda request: fault
    with pytest.raises(kind, match=text) as raised:
        world.client.get("mnist")
    assert [line.split(":")[0] for line in str(raised.value).splitlines()[1:]] == ["hint", "next"]


@pytest.mark.parametrize("body", ["<html>Sign in</html>", '{"error": "login"}', "[]", ""])
def test_an_answer_of_a_proxy_in_place_of_the_api_server_is_an_error(
    world: ClusterWorld, proxy: FaultProxy, body: str
) -> None:
    job = world.client.submit(world.job("mnist"))
    proxy.rule = lambda request: Fault(status=200, body=body)
    client = world.client
    calls = [
        client.list,
        lambda: client.get("mnist"),
        lambda: client.suspend("mnist"),
        lambda: client.explain(job),
        lambda: client.submit(world.job("other")),
        lambda: client.delete("mnist"),
    ]
    for call in calls:
        with pytest.raises(UnavailableError, match="not from an API server"):
            call()
    proxy.rule = lambda request: Fault(status=200, body=body) if "watch=true" in request.path_qs else None
    watch = client.watch(job, timeout=0.5)
    next(watch)
    with pytest.raises(WaitTimeoutError):  # it may end soon, so that a watch survives it
        next(watch)


def test_a_name_that_would_be_another_path_is_refused(world: ClusterWorld, proxy: FaultProxy) -> None:
    for name in ("", ".", "..", "a/b"):
        with pytest.raises(InvalidJobError, match="not a name of a DDPJob"):
            world.client.delete(name)
    assert isinstance(world.client, cluster.ClusterClient)
    world.client.namespace = ".."
    with pytest.raises(InvalidJobError, match="not a name of a Namespace"):
        world.client.delete("mnist")
    world.client.namespace = world.namespace
    with pytest.raises(JobNotFoundError, match=r"a\?x=y#z"):
        world.client.delete("a?x=y#z")
    assert {(seen.method, seen.path.count("/")) for seen in proxy.seen} == {("DELETE", 7)}


def test_a_list_is_whole_also_if_the_server_forgets_the_place(
    world: ClusterWorld, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_PAGE", 2)
    for number in range(5):
        world.client.submit(world.job(f"job-{number}"))
    expected = [f"job-{number}" for number in range(5)]
    assert [job.name for job in world.client.list()] == expected
    assert len([seen for seen in proxy.seen if seen.method == "GET"]) == 3
    proxy.rule = lambda request: Fault(status=410) if "continue=" in request.path_qs else None
    assert [job.name for job in world.client.list()] == expected
    assert {job.namespace for job in world.client.list(all_namespaces=True)} >= {world.namespace}


def test_only_the_claim_of_the_job_is_deleted_with_it(world: ClusterWorld) -> None:
    path = f"/api/v1/namespaces/{world.namespace}/persistentvolumeclaims"
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    for name, owner in (("mine", "mine"), ("other", "somebody")):
        metadata = {"name": names.claim_name(name), "labels": {names.LABEL_JOB_NAME: owner}}
        world.plane.request("POST", path, {"metadata": metadata, "spec": spec})
        world.client.submit(world.job(name))
        world.client.delete(name, volume=True)
    claims = world.plane.request("GET", path)["items"]
    kept = [c["metadata"]["name"] for c in claims if not c["metadata"].get("deletionTimestamp")]
    assert kept == [names.claim_name("other")]


def test_what_cannot_run_on_a_cluster_is_refused_before_it_is_sent(world: ClusterWorld, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(InvalidJobError, match="no image"):
        world.client.submit(DDPJob.from_script(script))
    secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: key}\n---\n"
    with pytest.raises(InvalidJobError, match="also holds Secret key"):
        world.client.submit(DDPJob.from_yaml(secret + world.job("mnist").to_yaml()))
    with pytest.raises(InvalidJobError, match="no namespace nowhere"):
        world.client.submit(DDPJob("mnist", namespace="nowhere", image="none"))
    with pytest.raises(UnavailableError, match="no cluster to connect to"):
        Client.cluster(kubeconfig=tmp_path / "missing")


def test_logs_have_each_line_once_through_lost_connections_and_restarts(world: ClusterWorld, proxy: FaultProxy) -> None:
    expected = []
    with Kubelet(world.plane, world.namespace) as kubelet:
        job = world.client.submit(world.job("mnist"))
        lines = Collected(world.client.logs(job, follow=True))
        for attempt in (1, 2, 3):
            pod = kubelet.start(job, attempt)
            world.run(job)
            for number in range(24):
                text = f"line {number // 2}" if number % 7 else ""
                kubelet.print(pod, f"{text}\n")
                expected.append(LogLine(0, None, attempt, text))
                if number in (5, 6, 17):
                    eventually("the lines are there", lambda: len(lines.items) >= len(expected))
                    proxy.cut("/log")
            proxy.cut("/log")
            kubelet.print(pod, "[n0r3] the end without a line feed")
            expected.append(LogLine(0, 3, attempt, "[n0r3] the end without a line feed"))
            kubelet.end(pod)
        world.finish(job)
        assert len(lines.until_end()) == len(expected)
        for attempt in (1, 2, 3):  # those of two attempts may alternate
            assert [x for x in lines.items if x.attempt == attempt] == [x for x in expected if x.attempt == attempt]
        assert list(world.client.logs(job, tail=2)) == expected[-2:]
        assert list(world.client.logs(job, attempt=1, tail=1)) == expected[24:25]
        assert list(world.client.logs(job, ranks={3})) == expected[-1:]
        recent = list(world.client.logs(job, since=1.5))
        assert expected[-len(recent) :] == recent and 4 < len(recent) < 25, "of the last two seconds"
    with pytest.raises(UnavailableError, match="no pods of attempt 9") as refused:
        list(world.client.logs(job, attempt=9))
    assert refused.value.next_step.startswith(f"ddpjob why mnist --namespace {world.namespace} ")


def test_patience_with_an_error_ends_and_begins_again_after_a_success() -> None:
    away, patience = connection.RequestError("away", 503, {}), Patience(0.0)
    assert connection.pause_after(away, patience) is not None
    assert connection.pause_after(away, patience) is None
    patience.reset()
    assert connection.pause_after(away, patience) is not None
    assert connection.pause_after(connection.RequestError("wrong", 422, {}), Patience()) is None


def test_the_delays_of_a_patience_double_and_a_stricter_time_ends_it_earlier() -> None:
    patience = Patience(300.0)
    assert [patience.delay(now) for now in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert patience.delay(61.0, 60.0) is None
    assert patience.delay(300.0) == 5.0
    assert patience.delay(300.5) is None
