"""The commands on a real API server, with the rights of the chart's roles `view` and `edit`, and which place they take.

The test acts as the operator and the kubelet. The roles of the chart extend the roles of Kubernetes by aggregation,
which the control plane of the tests has no controller for: users are bound to the parts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ddpjob import DDPJob
from ddpjob.api import names
from tests.cli.program import ROOT, Done, Program, shell_job
from tests.client.worlds import ClusterWorld
from tests.processes import eventually
from tests.worlds.control_plane import ApiError, ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy
from tests.worlds.kubelet import Kubelet

pytestmark = pytest.mark.apiserver
ROLES = {
    "viewer": ("ddpjob-view", "system:aggregate-to-view"),
    "editor": ("ddpjob-view", "ddpjob-edit", "system:aggregate-to-view", "system:aggregate-to-edit"),
    "reader": ("ddpjob-view",),
    "stranger": (),
}
CHANGES = (["suspend", "mnist"], ["resume", "mnist"], ["restart", "mnist"], ["delete", "mnist", "--volumes"])


@pytest.fixture
def world(control_plane: ControlPlane, namespace: str) -> Iterator[ClusterWorld]:
    rbac = yaml.safe_load_all((ROOT / "manifests" / "rbac.yaml").read_text(encoding="utf-8"))
    for role in rbac:
        if role["kind"] == "ClusterRole" and role["metadata"]["name"] in ROLES["editor"]:
            _create(control_plane, "clusterroles", role)
    made = ClusterWorld(control_plane, namespace)
    with made.client:
        yield made


def _create(plane: ControlPlane, plural: str, body: dict[str, object]) -> None:
    try:
        plane.request("POST", f"/apis/rbac.authorization.k8s.io/v1/{plural}", body)
    except ApiError as error:
        if error.status != 409:
            raise


def user(ddpjob: Program, world: ClusterWorld, role: str, server: str = "") -> Program:
    """Return the program with the kubeconfig of a user who has a role in the namespace of the test."""
    token = world.plane.service_account(world.namespace, role)
    for number, part in enumerate(ROLES[role]):
        subject = {"kind": "ServiceAccount", "name": role, "namespace": world.namespace}
        ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": part}
        binding = {"metadata": {"name": f"{role}-{number}"}, "subjects": [subject], "roleRef": ref}
        _create(world.plane, f"namespaces/{world.namespace}/rolebindings", binding)
    name = f"{world.namespace}-{role}"
    config = world.plane.kubeconfig(token, name=name, server=server, namespace=world.namespace)
    return Program(ddpjob.folder, ddpjob.environment | {"KUBECONFIG": str(config)})


def a_running_job(world: ClusterWorld, kubelet: Kubelet) -> DDPJob:
    job = world.client.submit(world.job("mnist"))
    pod = kubelet.start(job, 1)
    for number in range(5):
        kubelet.print(pod, f"line {number}\n")
    world.run(job)
    return job


def is_forbidden(done: Done) -> bool:
    """Return whether a command said in three lines what the user may not do."""
    lines = done.err.splitlines()
    assert [line[:7] for line in lines] == ["error: ", "hint:  ", "next:  "], done
    return done.code == 1 and lines[0].startswith("error: not allowed: ddpjobs") and done.out == ""


def reads_everything(run: Program, world: ClusterWorld) -> None:
    """Check the commands that only read."""
    where = f"cluster {world.plane.server}, namespace {world.namespace}"
    listed = run("get")
    assert (listed.code, listed.err) == (0, f"jobs on {where}:\n")
    assert listed.out.splitlines()[1].split()[:2] == ["mnist", "Running"]
    assert json.loads(run("get", "mnist", "-o", "json").out)["status"]["state"] == "Running"
    assert where in run("get", "mnist").out
    logs = run("logs", "mnist", "--tail", "2")
    assert (logs.out.splitlines(), logs.err) == (["line 3", "line 4"], f"logs of mnist on {where}:\n")
    assert run("get", "mnist", "-o", "table").err == f"job on {where}:\n"
    done = run("describe", "mnist")
    assert (done.code, done.err) == (0, "") and where in done.out, done
    found = json.loads(run("why", "mnist", "-o", "json").out)
    assert found["stage"] in ("Running", "FirstStep")
    assert [text for text in found.get("unread", []) if "Deployment" not in text] == []
    done = run("wait", "mnist", "--for", "running")
    assert (done.code, done.out) == (0, f"mnist is Running ({where})\n")
    assert run("wait", "mnist", "--timeout", "0.2").code == 101
    assert run("wait", "other").code == 103


def test_a_user_with_the_role_view_reads_everything_and_changes_nothing(ddpjob: Program, world: ClusterWorld) -> None:
    viewer = user(ddpjob, world, "viewer")
    with Kubelet(world.plane, world.namespace) as kubelet:
        job = a_running_job(world, kubelet)
        reads_everything(viewer, world)
        for command in CHANGES:
            assert is_forbidden(viewer(*command)), command
    assert world.client.get("mnist").manifest["spec"] == job.manifest["spec"]
    assert is_forbidden(viewer("get", "-A")), "the role is that of one namespace"


def test_a_user_with_the_role_edit_reads_and_changes_everything(ddpjob: Program, world: ClusterWorld) -> None:
    editor = user(ddpjob, world, "editor")
    claims = f"/{names.CLAIMS.path(world.namespace)}"
    claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": names.claim_name("mnist"), "labels": {names.LABEL_JOB_NAME: "mnist"}}
    with Kubelet(world.plane, world.namespace) as kubelet:
        job = a_running_job(world, kubelet)
        world.plane.request("POST", claims, {"metadata": metadata, "spec": claim})
        reads_everything(editor, world)
        where = f"(cluster {world.plane.server}, namespace {world.namespace})"
        for command, done in zip(CHANGES, ("suspended", "resumed", "restarted", "deleted"), strict=True):
            if done == "resumed":
                world.stop(job)
                assert editor("wait", "mnist").code == 102
            assert editor(*command).out == f"mnist {done} {where}\n"
            if done == "suspended":
                assert world.client.get("mnist").spec.suspend
            if done == "restarted":
                assert world.client.get("mnist").spec.restarted_at
    assert world.client.list() == []
    kept = [
        item for item in world.plane.request("GET", claims)["items"] if not item["metadata"].get("deletionTimestamp")
    ]
    assert kept == []


def test_a_kubeconfig_that_checks_no_certificate_prints_no_warning(ddpjob: Program, world: ClusterWorld) -> None:
    config = yaml.safe_load(Path(user(ddpjob, world, "viewer").environment["KUBECONFIG"]).read_text())
    for entry in config["clusters"]:
        entry["cluster"] = {"server": entry["cluster"]["server"], "insecure-skip-tls-verify": True}
    path = ddpjob.folder / "insecure"
    path.write_text(yaml.safe_dump(config))
    world.client.submit(world.job("there"))
    done = ddpjob("get", env={"KUBECONFIG": str(path)})
    assert (done.code, done.err) == (0, f"jobs on cluster {world.plane.server}, namespace {world.namespace}:\n")


def test_a_user_without_rights_is_told_so_by_each_command(ddpjob: Program, world: ClusterWorld) -> None:
    stranger = user(ddpjob, world, "stranger")
    world.client.submit(world.job("mnist"))
    reading = (["get", "mnist"], ["logs", "mnist"], ["why", "mnist"], ["wait", "mnist"])
    for command in (*reading, *CHANGES, ["get", "--context", f"{world.namespace}-stranger"]):
        assert is_forbidden(stranger(*command)), command


def test_without_the_right_to_read_pods_describe_has_what_the_status_says(ddpjob: Program, world: ClusterWorld) -> None:
    reader = user(ddpjob, world, "reader")
    world.run(world.client.submit(world.job("mnist")))
    done = reader("describe", "mnist", "-o", "json")
    found = json.loads(done.out)
    assert (found["events"], found["pods"]) == ([], [])
    unread = [f"{kind} could not be read: you may not read this" for kind in ("pods", "events")]
    assert (done.code, sorted(found["unread"])) == (0, sorted(unread))
    assert done.err.splitlines() == [f"error: {text}" for text in found["unread"]]


def test_jobs_are_listed_of_the_cluster_if_it_serves_them_and_else_of_this_machine(
    ddpjob: Program, world: ClusterWorld
) -> None:
    assert ddpjob("run", ddpjob.write(shell_job("here", "true"))).code == 0
    world.client.submit(world.job("there"))
    with FaultProxy(world.plane) as proxy:
        viewer = user(ddpjob, world, "viewer", server=proxy.server)
        assert _names(viewer("get", "-o", "name")) == ["there"]
        assert _names(viewer("get", "--local", "-o", "name")) == ["here"]
        assert viewer("get", "--local").err == "jobs on this machine:\n"
        none = viewer("get", "-l", "team=none").err
        assert none.startswith("no jobs on cluster ")
        assert none.endswith(f", namespace {world.namespace}; ddpjob submit creates a job\n")
        assert _names(viewer("get", "--context", f"{world.namespace}-viewer", "-o", "name")) == ["there"]
        assert viewer("get", "here").code == viewer("get", "there").code == 0
        proxy.rule = lambda request: Fault(status=404, body="404 page not found")
        without = viewer("get", "-o", "name")
        assert (without.code, _names(without), without.err) == (0, ["here"], ""), "no CustomResourceDefinition"
        proxy.rule = lambda request: Fault(status=503)
        away = viewer("get", "-o", "name")
        assert (away.code, _names(away)) == (1, ["here"])
        assert away.err.splitlines()[2] == "next:  --local lists the jobs of this machine alone"
    contradiction = viewer("get", "--local", "--context", "any")
    assert "one place" in contradiction.is_refused()[1]


def test_listing_jobs_is_one_request_and_imports_no_model_but_the_status(ddpjob: Program, world: ClusterWorld) -> None:
    """Other modules would take CPU time at each start of ``ddpjob get``."""
    world.client.submit(world.job("there"))
    code = "import sys; from ddpjob.cli.main import main; main(['get']); print(*sys.modules)"
    with FaultProxy(world.plane) as proxy:
        environment = user(ddpjob, world, "viewer", server=proxy.server).environment
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    [request] = proxy.seen
    assert request.path.partition("?")[0] == f"/apis/ddpjob.dev/v1alpha1/namespaces/{world.namespace}/ddpjobs"
    *table, last = done.stdout.splitlines()
    assert table[1].startswith("there")
    modules = set(last.split())
    parts = ("ddpjob.api.", "ddpjob.client.", "ddpjob.engine", "ddpjob.local", "ddpjob_operator", "ddpplot")
    assert {name for name in modules if name.startswith(parts)} == {
        *(
            f"ddpjob.api.{name}"
            for name in (
                "backoff",
                "exit_codes",
                "failure",
                "limits",
                "model",
                "names",
                "objects",
                "status",
                "text",
                "time_spent",
                "times",
            )
        ),
        *(f"ddpjob.client.{name}" for name in ("base", "cluster", "connection", "job", "log_lines")),
    }
    assert not {"aiohttp", "asyncio", "kubernetes.client.models.v1_pod", "numpy", "plotext"} & modules


@pytest.mark.soak
def test_a_shell_completes_the_jobs_of_the_cluster(ddpjob: Program, world: ClusterWorld) -> None:
    assert ddpjob("run", ddpjob.write(shell_job("here", "true"))).code == 0
    job = world.client.submit(DDPJob("there", image="none", command=["train"], num_nodes=2))
    world.run(job)
    viewer = user(ddpjob, world, "viewer")
    asked = {"_DDPJOB_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}

    def completed(line: str) -> list[str]:
        done = viewer(env=asked | {"_TYPER_COMPLETE_ARGS": line})
        assert done.err == ""
        return done.out.splitlines()

    def in_time(line: str, *expected: str) -> None:
        """Wait, because a busy machine may not answer within the time that a completion has."""
        eventually(f"{line!r} is completed", lambda: completed(line) == list(expected), timeout=300)

    in_time("ddpjob logs ", "here", "there")
    in_time("ddpjob logs --local ", "here")
    in_time(f"ddpjob logs --context {world.namespace}-viewer ", "there")


def _names(done: Done) -> list[str]:
    return [line.rpartition("/")[2] for line in done.out.splitlines()]
