"""A namespace of a test's own, with a volume that all nodes share; and what there is to see when the test failed."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.e2e import storage
from tests.e2e.installation import Installation
from tests.e2e.jobs import JOB_KIND
from tests.e2e.kubectl import Json, Kubectl, until
from tests.kind.cluster import Cluster
from tests.kind.command import CommandError

CLAIM = "trainings"
"""The claim that a user made beforehand."""
DELETE_SECONDS = 120.0

live: list[JobNamespace] = []
"""Scenes that exist at this moment, for the report of a failed test."""
_going: list[str] = []


@dataclass(frozen=True)
class JobNamespace:
    """Everything of one test lies in this namespace and on this volume."""

    kubectl: Kubectl
    volume: Path
    """The volume's folder on this machine."""
    storage_class: str

    def job(self, name: str) -> Json:
        """The DDPJob as the API server has it."""
        return self.kubectl.object(JOB_KIND, name)

    def status(self, name: str) -> Json:
        """Its status; {} before the operator saw it."""
        status: Json = self.job(name).get("status", {})
        return status

    def pods(self) -> list[Json]:
        """All pods of the namespace, whosesoever."""
        return self.kubectl.objects("pods")

    def until_step(self, name: str, least: int, *, checkpoint: int = 0) -> Json:
        """Wait until status shows that step, and a checkpoint of at least that other; returns the status."""

        def look() -> Json | None:
            status = self.status(name)
            step = status.get("progress", {}).get("step", 0)
            saved = status.get("checkpoint", {}).get("step", 0)
            return status if step >= least and saved >= checkpoint else None

        return until(f"{name} is past step {least}, with a checkpoint of step {checkpoint}", look, seconds=180)

    def until_finished(self, name: str, seconds: float = 240) -> Json:
        """``kubectl wait`` as the documentation has it; returns the status."""
        self.kubectl.wait_for("condition=Finished", f"ddp/{name}", seconds)
        return self.status(name)

    def events(self, name: str) -> list[Json]:
        """What ``kubectl describe`` shows under Events."""
        return self.kubectl.objects("events", "--field-selector", f"involvedObject.name={name}")

    def describe(self) -> str:
        """What a person would look at first."""
        looks = [
            ("get", "ddp,pods,services,pvc", "--output=wide"),
            ("describe", "ddp"),
            ("describe", "pods"),
            ("logs", "--selector=ddpjob.dev/job-name", "--prefix", "--tail=60", "--all-containers"),
            ("get", "events", "--sort-by=.lastTimestamp"),
        ]
        parts = [f"$ kubectl -n {self.kubectl.namespace} {' '.join(w)}\n{_said(self.kubectl, w)}" for w in looks]
        return "\n".join(parts)


@contextmanager
def job_namespace(cluster: Cluster, what: str) -> Iterator[JobNamespace]:
    """A fresh namespace that enforces Pod Security "restricted", its volume, and a claim of it; all gone afterwards."""
    words = re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")[:40].strip("-")
    name = f"e2e-{words}-{secrets.token_hex(3)}"
    made = JobNamespace(Kubectl(cluster.kubeconfig, name), cluster.shared_dir / name, name)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    volume = cluster.shared_volume(name, storage_class=name)
    storage.put_mnist(made.volume)
    live.append(made)
    try:
        made.kubectl.apply(namespace, dict(volume))
        yield made
    finally:
        live.remove(made)
        _remove(made, name)


def claim_of(namespace: JobNamespace, name: str = CLAIM) -> Json:
    """A claim of the scene's volume."""
    spec = {
        "storageClassName": namespace.storage_class,
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
    }
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def describe_everything(operator: Installation | None) -> str:
    """All live scenes, and the operator's side of the story."""
    parts = [namespace.describe() for namespace in live]
    if operator is not None:
        parts += [
            f"$ kubectl -n {operator.kubectl.namespace} {' '.join(words)}\n{_said(operator.kubectl, words)}"
            for words in (
                ("describe", "pods"),
                ("logs", "deployment/ddpjob-operator", "--tail=150"),
                ("logs", "deployment/ddpjob-operator", "--tail=50", "--previous"),
            )
        ]
    return "\n".join(parts)


def _said(kubectl: Kubectl, words: tuple[str, ...]) -> str:
    try:
        return kubectl(*words)
    except CommandError as error:
        return str(error)


def _remove(made: JobNamespace, name: str) -> None:
    """Delete without waiting: the next test need not. ``until_all_are_gone`` waits at the end."""
    with suppress(CommandError):
        made.kubectl("delete", "namespace", name, "--wait=false")
        _going.append(name)
    with suppress(CommandError):
        made.kubectl("delete", "persistentvolume", name, "--ignore-not-found", "--wait=false")
    # Not as root, files of the trainer's user stay until the cluster goes.
    shutil.rmtree(made.volume, ignore_errors=True)


def until_all_are_gone(kubectl: Kubectl) -> None:
    """Nothing of any scene is left in the cluster. Raises ``CommandError`` after some minutes."""
    while _going:
        name = _going.pop()
        if kubectl("get", "namespace", name, "--ignore-not-found"):
            kubectl.wait_for("delete", f"namespace/{name}", DELETE_SECONDS)
