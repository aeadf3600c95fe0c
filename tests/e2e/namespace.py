"""One namespace per test, and its state for the report of a failed test."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ddpjob.api.objects import Json
from tests.e2e.installation import Installation
from tests.e2e.jobs import JOB_KIND
from tests.e2e.kubectl import Kubectl, until
from tests.kind.cluster import Cluster
from tests.kind.command import CommandError

CLAIM = "trainings"
"""The name of the claim that exists before the job."""
DELETE_SECONDS = 120.0

live: list[JobNamespace] = []
"""Namespaces that exist at this moment, for the report of a failed test."""
_going: list[str] = []


@dataclass(frozen=True)
class JobNamespace:
    """The namespace of one test."""

    kubectl: Kubectl
    cluster: Cluster

    @cached_property
    def volume(self) -> Path:
        """The folder on this machine of the claim that exists before the job."""
        return self.folder_of(CLAIM)

    def folder_of(self, claim: str) -> Path:
        """Wait until a claim is bound, and return the folder of its volume on this machine."""

        def look() -> Path | None:
            volume = self.kubectl.object("persistentvolumeclaim", claim)["spec"].get("volumeName")
            return self.cluster.folder_of(self.kubectl.object("persistentvolume", volume)) if volume else None

        return until(f"claim {claim} is bound", look, seconds=300)

    def job(self, name: str) -> Json:
        """Return the DDPJob as stored."""
        return self.kubectl.object(JOB_KIND, name)

    def status(self, name: str) -> Json:
        """Return the job's status; {} before the first reconcile."""
        status: Json = self.job(name).get("status", {})
        return status

    def pods(self) -> list[Json]:
        """Return all pods of the namespace."""
        return self.kubectl.objects("pods")

    def until_step(self, name: str, least: int, *, checkpoint: int = 0) -> Json:
        """Wait until the status has at least this step and checkpoint, and return the status."""

        def look() -> Json | None:
            status = self.status(name)
            step = status.get("progress", {}).get("step", 0)
            saved = status.get("checkpoint", {}).get("step", 0)
            return status if step >= least and saved >= checkpoint else None

        return until(f"{name} at step {least} with a checkpoint of step {checkpoint}", look, seconds=300)

    def until_finished(self, name: str) -> Json:
        """Wait with ``kubectl wait``, as documented, and return the status."""
        self.kubectl.wait_for("condition=Finished", f"ddp/{name}", 600)
        return self.status(name)

    def describe(self) -> str:
        """Return the output of the commands that show why a test failed."""
        commands = [
            ("get", "ddp,pods,services,pvc", "--output=wide"),
            ("describe", "ddp"),
            ("describe", "pods"),
            ("logs", "--selector=ddpjob.dev/job-name", "--prefix", "--tail=60", "--all-containers"),
            ("get", "events", "--sort-by=.lastTimestamp"),
        ]
        parts = [f"$ kubectl -n {self.kubectl.namespace} {' '.join(c)}\n{_output(self.kubectl, c)}" for c in commands]
        return "\n".join(parts)


@contextmanager
def job_namespace(cluster: Cluster, what: str) -> Iterator[JobNamespace]:
    """Make a namespace that enforces Pod Security "restricted", and delete it at the end."""
    slug = re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")[:40].strip("-")
    name = f"e2e-{slug}-{secrets.token_hex(3)}"
    made = JobNamespace(Kubectl(cluster.kubeconfig, name), cluster)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    live.append(made)
    try:
        made.kubectl.apply(namespace)
        yield made
    finally:
        live.remove(made)
        _remove(made, name)


def shared_claim() -> Json:
    """Return a claim of the cluster's default class."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM}, "spec": spec}


def local_volume(name: str, claim: str, folder: str, size: str) -> tuple[Json, Json]:
    """Return a volume in a folder of the nodes, and a claim for it."""
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": name}
    host = {"capacity": {"storage": size}, "hostPath": {"path": folder, "type": "Directory"}}
    asked = {"resources": {"requests": {"storage": size}}}
    return (
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": shared | host},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": shared | asked},
    )


def describe_everything(operator: Installation | None) -> str:
    """Return the state of all live namespaces and of the operator."""
    parts = [namespace.describe() for namespace in live]
    if operator is not None:
        parts += [
            f"$ kubectl -n {operator.kubectl.namespace} {' '.join(command)}\n{_output(operator.kubectl, command)}"
            for command in (
                ("describe", "pods"),
                ("logs", "deployment/ddpjob-operator", "--tail=150"),
                ("logs", "deployment/ddpjob-operator", "--tail=50", "--previous"),
            )
        ]
    return "\n".join(parts)


def _output(kubectl: Kubectl, command: tuple[str, ...]) -> str:
    try:
        return kubectl(*command)
    except Exception as error:  # another error in a report would end pytest before the other tests
        return str(error)


def _remove(made: JobNamespace, name: str) -> None:
    """Delete without waiting, so that the next test starts at once. ``until_all_are_gone`` waits at the end."""
    with suppress(CommandError):
        made.kubectl("delete", "namespace", name, "--wait=false")
        _going.append(name)


def until_all_are_gone(kubectl: Kubectl) -> None:
    """Wait until all test namespaces are deleted. Raises ``CommandError`` after two minutes each."""
    while _going:
        name = _going.pop()
        if kubectl("get", "namespace", name, "--ignore-not-found"):
            kubectl.wait_for("delete", f"namespace/{name}", DELETE_SECONDS)
