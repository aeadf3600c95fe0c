"""Jobs with files on a real API server: what is created, what a failure leaves, and with which rights."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpjob import Client, DDPJob
from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.client import cluster_submit
from ddpjob.errors import DDPJobError, InvalidJobError, JobExistsError, NotAllowedError, UnavailableError
from tests.client.test_workdir_files import grow
from tests.client.test_workdir_job import PACKAGE, job
from tests.client.worlds import ClusterWorld
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy

pytestmark = pytest.mark.apiserver
ROLES = Path(__file__).parents[2] / "manifests" / "rbac.yaml"


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return grow(tmp_path / "work", PACKAGE)


def secrets(world: ClusterWorld) -> list[Json]:
    found = world.plane.request("GET", f"/{names.SECRETS.path(world.namespace)}")["items"]
    return [item for item in found if item["metadata"]["name"] != "kube-root-ca.crt"]


def owners(secret: Json) -> list[str]:
    return [owner["uid"] for owner in secret["metadata"].get("ownerReferences") or ()]


def is_without_owner(secret: Json) -> bool:
    return names.LABEL_WORKDIR in secret["metadata"]["labels"] and not owners(secret)


def crash_before(world: ClusterWorld, proxy: FaultProxy, method: str, plural: str, work: Path) -> None:
    """Submit, and let neither this request nor any after it have an effect."""
    is_over = False

    def rule(request: Any) -> Fault | None:
        nonlocal is_over
        is_over = is_over or (request.method == method and f"/{plural}" in request.path)
        return Fault(status=403) if is_over else None

    proxy.rule = rule
    with pytest.raises(NotAllowedError):
        world.client.submit(job(), workdir=work)
    proxy.rule = lambda request: None


def test_a_job_owns_its_files_which_the_api_server_never_lets_change(world: ClusterWorld, work: Path) -> None:
    made = world.client.submit(job(), workdir=work)
    (secret,) = secrets(world)
    assert owners(secret) == [made.uid]
    assert secret["immutable"]
    assert names.LABEL_WORKDIR not in secret["metadata"]["labels"]
    assert secret["metadata"]["name"] in made.to_yaml()
    with pytest.raises(JobExistsError, match="there is a job tiny already") as raised:
        world.client.submit(job(), workdir=work)
    assert raised.value.hint and raised.value.next_step
    (work / "train.py").write_text("changed")
    with pytest.raises(JobExistsError):
        world.client.submit(job(), workdir=work)
    assert secrets(world) == [secret], "what was made for a refused job is taken back"


def test_a_dry_run_asks_for_the_admission_and_creates_nothing(world: ClusterWorld, work: Path) -> None:
    checked = world.client.submit(job(), workdir=work, dry_run=True)
    assert checked.manifest["spec"]["restartPolicy"]["maxTotalRestarts"] == 100, "a default of the server"
    assert (secrets(world), world.client.list()) == ([], [])
    with pytest.raises(InvalidJobError, match="the cluster refuses it"):
        world.client.submit(DDPJob("tiny", labels={"team": "not valid!"}, image="x"), dry_run=True)


def test_a_refused_job_takes_its_files_back(world: ClusterWorld, work: Path) -> None:
    with pytest.raises(InvalidJobError, match="the cluster refuses it"):
        world.client.submit(DDPJob("tiny", labels={"team": "not valid!"}, image="x"), workdir=work)
    assert (secrets(world), world.client.list()) == ([], [])


def test_a_job_without_its_files_is_taken_back(world: ClusterWorld, proxy: FaultProxy, work: Path) -> None:
    proxy.once("PATCH", "secrets", Fault(status=403))
    with pytest.raises(NotAllowedError):
        world.client.submit(job(), workdir=work)
    assert (secrets(world), world.client.list()) == ([], [])


def test_a_crash_before_the_job_leaves_files_that_the_next_submission_uses(
    world: ClusterWorld, proxy: FaultProxy, work: Path
) -> None:
    crash_before(world, proxy, "POST", "ddpjobs", work)
    (left,) = secrets(world)
    assert is_without_owner(left)
    assert world.client.list() == []
    made = world.client.submit(job(), workdir=work)
    (used,) = secrets(world)
    assert (used["metadata"]["uid"], owners(used)) == (left["metadata"]["uid"], [made.uid])


def test_what_crashes_left_is_dealt_with_by_a_later_submission(
    world: ClusterWorld, proxy: FaultProxy, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash_before(world, proxy, "PATCH", "secrets", work)
    kept = world.client.get("tiny")
    (other,) = secrets(world)
    metadata = {"name": "gone-workdir-1", "labels": other["metadata"]["labels"] | {names.LABEL_JOB_NAME: "gone"}}
    path = f"/{names.SECRETS.path(world.namespace)}"
    world.plane.request("POST", path, {"metadata": metadata})
    (work / "more.py").touch()
    world.client.submit(DDPJob("new", image="x"), workdir=work)
    assert len(secrets(world)) == 3, "another submission may be under way"
    monkeypatch.setattr(cluster_submit, "_LEFT_AFTER", timedelta(seconds=-5))
    world.client.submit(DDPJob("newer", image="x"), workdir=work)
    found = {secret["metadata"]["labels"][names.LABEL_JOB_NAME]: secret for secret in secrets(world)}
    assert sorted(found) == ["new", "newer", "tiny"]
    assert owners(found["tiny"]) == [kept.uid]
    assert not any(is_without_owner(secret) for secret in found.values())


def test_a_lost_answer_leaves_the_files_because_the_job_may_need_them(
    world: ClusterWorld, proxy: FaultProxy, work: Path
) -> None:
    proxy.once("POST", "ddpjobs", Fault(after_commit=True))
    with pytest.raises(UnavailableError, match="may have been carried out"):
        world.client.submit(job(), workdir=work)
    (secret,) = secrets(world)
    assert secret["metadata"]["name"] in world.client.get("tiny").to_yaml()


def test_files_that_another_submission_takes_back_meanwhile_are_created_again(
    world: ClusterWorld, proxy: FaultProxy, work: Path
) -> None:
    def rule(request: Any) -> None:
        if request.method == "POST" and "/ddpjobs" in request.path:
            (secret,) = secrets(world)
            path = f"/{names.SECRETS.path(world.namespace)}/{secret['metadata']['name']}"
            world.plane.request("DELETE", path)

    proxy.rule = rule
    made = world.client.submit(job(), workdir=work)
    (secret,) = secrets(world)
    assert owners(secret) == [made.uid]
    assert not is_without_owner(secret)


def test_files_of_a_deleted_job_are_not_used_again(world: ClusterWorld, work: Path) -> None:
    first = world.client.submit(job(), workdir=work)
    world.client.delete(first)
    (before,) = secrets(world)  # no garbage collector has seen it yet
    second = world.client.submit(job(), workdir=work)
    (after,) = secrets(world)
    assert before["metadata"]["uid"] != after["metadata"]["uid"]
    assert owners(after) == [second.uid]


def test_a_foreign_secret_of_the_name_is_refused(world: ClusterWorld, work: Path) -> None:
    world.client.submit(job(), workdir=work)
    (made,) = secrets(world)
    world.client.delete("tiny")
    path = f"/{names.SECRETS.path(world.namespace)}"
    world.plane.request("DELETE", f"{path}/{made['metadata']['name']}")
    world.plane.request("POST", path, {"metadata": {"name": made["metadata"]["name"]}})
    with pytest.raises(InvalidJobError, match="which is not of this job"):
        world.client.submit(job(), workdir=work)
    assert world.client.list() == []


def test_of_two_submissions_at_once_one_job_with_its_files_is_left(world: ClusterWorld, work: Path) -> None:
    clients = [ClusterWorld(world.plane, world.namespace).client for _ in range(4)]
    made: list[DDPJob] = []

    def submit(client: Client) -> None:
        try:
            made.append(client.submit(job(), workdir=work))
        except DDPJobError as error:
            assert isinstance(error, JobExistsError)

    threads = [threading.Thread(target=submit, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = made
    (secret,) = secrets(world)
    assert owners(secret) == [winner.uid]


@pytest.mark.parametrize("role", ["edit", "view"])
def test_edit_submits_with_files_and_view_is_refused_in_one_line(
    control_plane: ControlPlane, namespace: str, work: Path, role: str
) -> None:
    # Kubernetes' own rules of these roles, which a controller adds up in a whole cluster, and the chart's.
    wanted = ["view"] if role == "view" else ["view", "edit"]
    rules = [rule for name in wanted for rule in _chart_rules(name)]
    roles = [f"system:aggregate-to-{name}" for name in wanted]
    with ClusterWorld(control_plane, namespace).user(*rules, roles=roles) as client:
        if role == "edit":
            made = client.submit(job(), workdir=work)
            client.submit(DDPJob("other", image="x"))
            assert client.get("tiny").uid == made.uid
            return
        for workdir, what in ((None, "ddpjobs"), (work, "secrets")):
            with pytest.raises(NotAllowedError, match=f'cannot create resource "{what}"') as raised:
                client.submit(job(), workdir=workdir)
            assert "\n" not in raised.value.error
        assert client.list() == []


def _chart_rules(role: str) -> list[Json]:
    documents = yaml.safe_load_all(ROLES.read_text())
    (rules,) = [item["rules"] for item in documents if item and item["metadata"]["name"].endswith(f"-{role}")]
    return list(rules)
