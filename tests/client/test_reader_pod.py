"""The pod that reads a volume: what it asks for, and on a real API server who may create it and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpjob import Client, DDPJob
from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.pod_view import pod_view
from ddpjob.client.connection import ApiConnection
from ddpjob.client.volume.reader_pod import LABEL_READER_OF, PodReader, hopeless, node_for, reader_pod
from ddpjob.engine.desired import Job
from ddpjob.errors import DDPJobError, InvalidJobError, JobNotFoundError, NotAllowedError, UnavailableError
from tests.builders import a_job
from tests.processes import die_with_parent, eventually
from tests.worlds.control_plane import ApiError, ControlPlane

RBAC = Path(__file__).parents[2] / "manifests" / "rbac.yaml"
CLAIM = "trained"


def pod_of(node: str | None = None, **spec: Any) -> Json:
    job = a_job(**{"checkpoint": {"claimName": CLAIM, "mountPath": "/saved", "subPath": "a/b"}} | spec)
    return reader_pod(Job.of(job), "reader-1", node)


def claim(*modes: str) -> Json:
    return {"metadata": {"name": CLAIM}, "spec": {"accessModes": [*modes]}}


def user(node: str, phase: str = "Running", name: str = CLAIM) -> Json:
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": name}}, {"name": "e", "emptyDir": {}}]
    return {"metadata": {"name": "p"}, "spec": {"nodeName": node, "volumes": volumes}, "status": {"phase": phase}}


def test_the_pod_has_the_volume_image_and_ids_of_the_job_and_nothing_else_of_it() -> None:
    template = {
        "metadata": {"labels": {"team": "a", "kueue.x-k8s.io/queue-name": "q"}},
        "spec": {"nodeSelector": {"pool": "gpu"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    }
    pod = pod_of(
        image="trainer:2",
        imagePullSecrets=[{"name": "registry"}],
        podSecurity={"runAsUser": 1234, "fsGroup": 567},
        resources={"limits": {"nvidia.com/gpu": 8}},
        data={"claimName": "data"},
        template=template,
    )
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert container["volumeMounts"] == [
        {"name": "ddpjob-checkpoint", "mountPath": "/saved", "subPath": "a/b", "readOnly": True}
    ]
    assert [volume["persistentVolumeClaim"] for volume in spec["volumes"]] == [{"claimName": CLAIM}]
    assert (container["image"], spec["imagePullSecrets"]) == ("trainer:2", [{"name": "registry"}])
    assert {key: spec["securityContext"][key] for key in ("runAsUser", "fsGroup", "runAsNonRoot")} == {
        "runAsUser": 1234,
        "fsGroup": 567,
        "runAsNonRoot": True,
    }
    assert (spec["nodeSelector"], spec["tolerations"][-1]) == ({"pool": "gpu"}, {"key": "gpu", "operator": "Exists"})
    assert spec["automountServiceAccountToken"] is False
    assert "gpu" not in str(container["resources"])
    assert set(pod["metadata"]["labels"]) & {*names.SELECTORS.values(), "team", "kueue.x-k8s.io/queue-name"} == set()
    assert not pod["metadata"]["ownerReferences"][0].get("controller")


@pytest.mark.parametrize("security", [{"profile": "Unset"}, {"profile": "Baseline", "runAsUser": 0}, {}])
def test_the_pod_is_never_root(security: Json) -> None:
    context = pod_of(podSecurity=security)["spec"]["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (1000, True)
    assert ("fsGroup" in context) == (not security), "the owner of files is changed only where the job changes it"


def test_a_claim_of_one_machine_is_read_on_the_machine_that_holds_it() -> None:
    others = [user("a", "Succeeded"), user("b", name="another")]
    assert node_for(claim("ReadWriteOnce"), [*others, user("c")]) == "c"
    assert node_for(claim("ReadWriteOnce"), others) is None
    assert node_for(claim("ReadWriteMany"), [user("c")]) is None
    with pytest.raises(UnavailableError, match="in use by the pod p"):
        node_for(claim("ReadWriteOncePod"), [user("c")])
    (term,) = pod_of("c")["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["c"]}]}


class Place:
    """A namespace with Pod Security restricted, and a job in it with a bound claim."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane, self.namespace = plane, namespace
        self.kubeconfig = plane.kubeconfig(name=namespace, namespace=namespace)
        plane.request(
            "PATCH",
            f"/api/v1/namespaces/{namespace}",
            {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}},
        )
        with Client.cluster(kubeconfig=self.kubeconfig) as client:
            job = DDPJob("mnist", image="trainer:1", command=["train"], checkpoint={"claim_name": CLAIM})
            self.job = client.submit(job)
            client.submit(DDPJob("none", image="trainer:1", command=["train"]))

    def make_claim(self, phase: str = "Bound") -> None:
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        path = f"/{names.CLAIMS.path(self.namespace)}"
        self.plane.request("POST", path, {"metadata": {"name": CLAIM}, "spec": spec})
        self.plane.request("PATCH", f"{path}/{CLAIM}/status", {"status": {"phase": phase}})

    def pods(self) -> list[Json]:
        found: list[Json] = self.plane.request("GET", f"/{names.PODS.path(self.namespace)}")["items"]
        return found

    def pod(self) -> Json:
        """Wait for the only pod."""
        return eventually("the pod is created", self.pods)[0]

    def set_status(self, status: Json) -> None:
        self.plane.request(
            "PATCH", f"/{names.PODS.path(self.namespace)}/{self.pod()['metadata']['name']}/status", {"status": status}
        )

    def token(self, role: str) -> Path:
        """Return a kubeconfig with the rights of view or edit, as the chart extends them."""
        for item in yaml.safe_load_all(RBAC.read_text(encoding="utf-8")):
            if item["metadata"]["name"] == f"ddpjob-{role}":
                try:
                    self.plane.request("POST", "/apis/rbac.authorization.k8s.io/v1/clusterroles", item)
                except ApiError as error:
                    assert error.status == 409
        token = self.plane.service_account(self.namespace, role)
        for name in {f"system:aggregate-to-{role}", "system:aggregate-to-view", f"ddpjob-{role}"}:
            body = {
                "metadata": {"name": f"{role}-{name}".replace(":", "-")},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
                "subjects": [{"kind": "ServiceAccount", "name": role, "namespace": self.namespace}],
            }
            path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{self.namespace}/rolebindings"
            self.plane.request("POST", path, body)
        return self.plane.kubeconfig(token, name=f"{role}-{self.namespace}", namespace=self.namespace)


@pytest.fixture
def place(control_plane: ControlPlane, namespace: str) -> Place:
    return Place(control_plane, namespace)


class Reading:
    """Lists the volume in a thread."""

    def __init__(self, place: Place, kubeconfig: Path | None = None) -> None:
        self.waits: list[str] = []
        self._error: DDPJobError | None = None
        connection = ApiConnection(None, kubeconfig or place.kubeconfig, 20)
        self.reader = PodReader(connection, place.job, lambda now: self.waits.append(now.waiting))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self.reader:
                list(self.reader.output("list"))
        except DDPJobError as error:
            self._error = error

    def error(self) -> DDPJobError:
        self._thread.join(60)
        assert self._error is not None
        return self._error


UNSCHEDULABLE = "0/2 nodes are available: 2 node(s) had volume node affinity conflict."
WAITING = {"name": "trainer", "image": "", "imageID": "", "ready": False, "restartCount": 0}


@pytest.mark.apiserver
def test_a_pod_that_no_node_takes_is_an_error_in_the_words_of_the_scheduler(place: Place) -> None:
    place.make_claim()
    reading = Reading(place)
    labels = place.pod()["metadata"]["labels"]
    assert labels[LABEL_READER_OF] == place.job.uid
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNSCHEDULABLE}
    place.set_status({"conditions": [condition]})
    eventually("it is shown while it waits", lambda: any(UNSCHEDULABLE in text for text in reading.waits))
    reading.reader.start_seconds = 0
    assert UNSCHEDULABLE in reading.error().error
    assert place.pods() == [], "deleted at the end"


@pytest.mark.apiserver
def test_an_image_that_cannot_be_pulled_ends_the_wait_and_a_viewer_learns_what_lacks(
    place: Place,
) -> None:
    place.make_claim()
    waits: list[str | None] = []
    edit, view = place.token("edit"), place.token("view")
    with pytest.raises(NotAllowedError, match="cannot create resource") as refused:
        Client.cluster(kubeconfig=view).pull("mnist", on_progress=lambda progress: waits.append(progress.waiting))
    assert not [text for text in waits if text and "deleted" in text], "there was no pod"
    assert "edit" in refused.value.hint
    assert "\n" not in refused.value.error
    assert not place.pods()
    reading = Reading(place, edit)
    waiting = {"reason": "ImagePullBackOff", "message": "manifest unknown"}
    place.pod()
    place.set_status({"containerStatuses": [WAITING | {"state": {"waiting": waiting}}]})
    assert "does not start: ImagePullBackOff: manifest unknown" in reading.error().error
    assert place.pods() == []


@pytest.mark.parametrize(
    ("reason", "message", "error"),
    [
        ("RegistryUnavailable", "no route to host", "RegistryUnavailable: no route to host"),
        ("SignatureValidationFailed", "", "does not start: SignatureValidationFailed"),
        ("CreateContainerConfigError", 'secret "keys" not found', "does not start: CreateContainerConfigError"),
        ("CreateContainerConfigError", "failed to sync secret cache: timed out waiting", ""),
        ("ContainerCreating", "", ""),
    ],
)
def test_a_reader_pod_is_given_up_for_what_a_job_is_explained_with(reason: str, message: str, error: str) -> None:
    """Seen: the wait for an image of a registry that is away, and an end for a Secret that the kubelet reads later."""
    state = {"waiting": {"reason": reason, "message": message}}
    status = {"containerStatuses": [WAITING | {"state": state}]}
    found = hopeless(pod_view({"metadata": {"name": "p", "uid": "u"}, "status": status}), "mnist")
    assert error in str(found) if error else found is None


@pytest.mark.apiserver
def test_a_job_without_a_volume_and_a_claim_that_is_gone_or_empty_need_no_pod(place: Place) -> None:
    with Client.cluster(kubeconfig=place.kubeconfig) as client:
        with pytest.raises(InvalidJobError, match="none has no volume"):
            client.checkpoints("none")
        with pytest.raises(UnavailableError, match=f"claim {CLAIM} of mnist is absent"):
            client.checkpoints("mnist")
        place.make_claim("Pending")
        with pytest.raises(UnavailableError, match="is Pending, so it holds nothing"):
            client.pull("mnist")
        with pytest.raises(JobNotFoundError):
            client.pull("another")
    assert not place.pods()


@pytest.mark.apiserver
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_command_deletes_its_pod(place: Place, tmp_path: Path, number: signal.Signals) -> None:
    place.make_claim()
    environment = os.environ | {"KUBECONFIG": str(place.kubeconfig), "DDPJOB_STATE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "ddpjob.cli.main", "pull", "mnist", "--to", str(tmp_path / "here")]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, preexec_fn=die_with_parent) as process:  # noqa: PLW1509
        place.pod()
        process.send_signal(number)
        assert process.wait(60) == 130
    assert place.pods() == []
