"""A webhook injects an ordinary sidecar into every pod of a namespace, as Istio does. The sidecar never ends by itself.

Istio and Linkerd obey the label and the annotation with which the operator asks for no sidecar; this webhook does not.
"""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.e2e import injection_server
from tests.e2e.jobs import CONTAINER_SECURITY, POD_SECURITY, shell_job, sleeping_pod
from tests.e2e.kubectl import Kubectl, until
from tests.e2e.trials import Trial, Trials, Wait
from tests.kind.images import OPERATOR_TAG, TRAINER_TAG

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

NAME = "injector"
PORT = 8443
SIDECAR = {
    "name": "istio-proxy",
    "image": TRAINER_TAG,
    "command": ["sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait"],
    "securityContext": CONTAINER_SECURITY,
}
FAIL_ONCE = """
[ $DDPJOB_ATTEMPT$NODE_RANK != 11 ] || { echo "bad batch"; exit 3; }
[ $DDPJOB_ATTEMPT != 1 ] || exec sleep 600
echo trained
"""


@dataclass(frozen=True)
class Injected:
    """A finished job, its pods and the logs of their trainers when all sidecars had stopped."""

    job: Json
    pods: dict[str, Json]
    logs: dict[str, str]
    advice: str
    """What the command printed that ``next`` of the failure names, if there is a failure."""

    def attempt(self, number: int) -> list[str]:
        """Return the names of the pods of one attempt, by node_rank."""
        return sorted(n for n, p in self.pods.items() if p["metadata"]["labels"][names.LABEL_ATTEMPT] == str(number))


def injected(trial: Trial) -> dict[str, Injected]:
    """Run a job that succeeds, one whose node 1 fails once, and one that keeps no pods."""
    jobs = [
        shell_job("succeeds", "echo trained", numNodes=2),
        shell_job("fails-once", FAIL_ONCE, numNodes=2),
        shell_job("keeps-none", "echo trained", podRetention="None"),
    ]
    with injecting(trial.kubectl):
        trial.kubectl.apply(*jobs)
        return {name: ended(trial, name) for name in (job["metadata"]["name"] for job in jobs)}


TRIALS = Trials.of(1, injected)._replace(has_claim=False)


def ended(trial: Trial, name: str) -> Injected:
    trial.namespace.until_finished(name)
    selector = f"--selector={names.LABEL_JOB_NAME}={name}"

    def look() -> tuple[list[Json]] | None:
        pods = trial.kubectl.objects("pods", selector)
        return (pods,) if all(len(ends(pod)) == 2 for pod in pods) else None

    pods = until(f"all sidecars of {name} have stopped", look, seconds=60)[0]
    found = {pod["metadata"]["name"]: pod for pod in pods}
    logs = {pod: trial.kubectl("logs", pod, f"--container={names.TRAINER_CONTAINER}") for pod in found}
    job = trial.namespace.job(name)
    advice = [trial.kubectl(*shlex.split(failure["next"])[1:]) for failure in job["status"].get("failures", ())]
    return Injected(job, found, logs, "".join(advice))


def ends(pod: Json) -> dict[str, Json]:
    """Return how the containers ended that have ended."""
    states = {status["name"]: status["state"] for status in pod["status"].get("containerStatuses", ())}
    return {name: state["terminated"] for name, state in states.items() if "terminated" in state}


@contextmanager
def injecting(kubectl: Kubectl) -> Iterator[None]:
    """Run the webhook in a pod, for all pods of the namespace that are created from now on."""
    with tempfile.TemporaryDirectory(prefix="ddpjob-e2e-") as folder:
        certificate, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=injector"]
        made += ["-addext", f"subjectAltName=DNS:{NAME}.{kubectl.namespace}.svc", "-keyout", str(key)]
        subprocess.run([*made, "-out", str(certificate)], check=True, capture_output=True, timeout=60)
        program = Path(injection_server.__file__)
        kubectl.apply(*server([program, certificate, key]))
        hook = configuration(kubectl.namespace, certificate)
    kubectl.wait_for("condition=Ready", f"pod/{NAME}", 90)
    kubectl.apply(hook)
    try:
        probe = json.dumps(sleeping_pod("probe"))
        dry_run = ("create", "--dry-run=server", "--output=name", "--filename=-")
        until("the webhook answers", lambda: kubectl(*dry_run, stdin=probe), seconds=30)
        yield
    finally:
        kubectl("delete", "mutatingwebhookconfiguration", hook["metadata"]["name"], "--wait=false")


def configuration(namespace: str, certificate: Path) -> Json:
    """Return the MutatingWebhookConfiguration for the pods of a namespace."""
    service = {"namespace": namespace, "name": NAME}
    hook = {
        "name": "injector.test.ddpjob.dev",
        "clientConfig": {"service": service, "caBundle": base64.b64encode(certificate.read_bytes()).decode()},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "timeoutSeconds": 10,
    }
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"}
    return kind | {"metadata": {"name": f"injector-{namespace}"}, "webhooks": [hook]}


def server(files: list[Path]) -> list[Json]:
    """Return a Secret with the files, the pod that runs the first of them, and its Service."""
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}}
    secret["stringData"] = {file.name: file.read_text() for file in files}
    program, certificate, key = (f"/injector/{file.name}" for file in files)
    container = {
        "name": NAME,
        "image": OPERATOR_TAG,
        "command": ["python3", program, str(PORT), certificate, key, json.dumps(SIDECAR)],
        "securityContext": CONTAINER_SECURITY,
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": NAME, "mountPath": "/injector"}],
    }
    spec = {
        "terminationGracePeriodSeconds": 1,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": [{"name": NAME, "secret": {"secretName": NAME}}],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME, "labels": {"app": NAME}}, "spec": spec}
    ports = {"selector": {"app": NAME}, "ports": [{"port": 443, "targetPort": PORT}]}
    return [secret, pod, {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": ports}]


@pytest.fixture
def jobs(outcome: Wait) -> dict[str, Injected]:
    ended: dict[str, Injected] = outcome(injected)
    return ended


def test_pods_ask_for_no_sidecar_and_end_with_their_trainer_although_one_is_injected(jobs: dict[str, Injected]) -> None:
    done = jobs["succeeds"]
    assert (done.job["status"]["state"], done.job["status"]["restarts"]) == ("Succeeded", 0)
    assert len(done.pods) == 2
    for name, pod in done.pods.items():
        asked = pod["metadata"]["labels"] | pod["metadata"]["annotations"]
        assert (asked["sidecar.istio.io/inject"], asked["linkerd.io/inject"]) == ("false", "disabled")
        assert [container["name"] for container in pod["spec"]["containers"]] == ["trainer", "istio-proxy"]
        assert ends(pod)["trainer"]["exitCode"] == 0
        assert pod["status"]["reason"] == "DeadlineExceeded", "the kubelet stops the sidecar of a pod that is kept"
        assert done.logs[name] == "trained\n"


def test_failed_pod_beside_a_sidecar_keeps_its_log_and_the_next_attempt_succeeds(
    jobs: dict[str, Injected],
) -> None:
    done = jobs["fails-once"]
    status = done.job["status"]
    assert (status["state"], status["attempt"], status["restarts"]) == ("Succeeded", 2, 1)
    (failure,) = status["failures"]
    assert (failure["nodeRank"], failure["exitCode"], failure["logTail"].strip()) == (1, 3, "bad batch")
    assert done.attempt(1) == [failure["pod"]], "only the failed pod of the former attempt is kept"
    assert failure["next"].startswith(f"kubectl logs {failure['pod']}")
    assert done.advice == done.logs[failure["pod"]] == "bad batch\n"
    assert [done.logs[pod] for pod in done.attempt(2)] == ["trained\n"] * 2


def test_job_that_keeps_no_pods_has_none_although_their_sidecars_ran(jobs: dict[str, Injected]) -> None:
    done = jobs["keeps-none"]
    assert (done.job["status"]["state"], done.pods) == ("Succeeded", {})
