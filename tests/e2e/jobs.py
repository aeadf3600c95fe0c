"""The job of manifests/examples/mnist-cpu.yaml, changed only where a user of another cluster would change it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from ddpjob.api import names
from tests.e2e.installation import ROOT
from tests.e2e.kubectl import Json
from tests.e2e.storage import has_mnist

EXAMPLE = ROOT / "manifests" / "examples" / "mnist-cpu.yaml"
JOB_KIND = f"{names.DDPJOBS.plural}.{names.GROUP}"


@dataclass(frozen=True)
class Training:
    """What the example trains here, and what must come of it."""

    arguments: tuple[str, ...]
    least_accuracy: float


@cache
def training() -> Training:
    """Real MNIST where this machine has it, else the handwritten digits that are part of the image."""
    if has_mnist():
        return Training(tuple(_example()["spec"]["args"]), least_accuracy=0.985)
    return Training(("train", "--epochs", "2", "--data", "digits"), least_accuracy=0.85)


def mnist_job(name: str, *arguments: str, storage_class: str = "", claim: str = "") -> Json:
    """The example, with each of its nodes on a machine of its namespace.

    arguments: more flags for the trainer.
    storage_class: of the claim template; or claim: an existing claim instead of the template.
    """
    job = copy.deepcopy(_example())
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["args"] = [*training().arguments, *arguments]
    spec["template"] = {"spec": {"affinity": _apart(name)}}
    if claim:
        spec["checkpoint"] = {"mountPath": spec["checkpoint"]["mountPath"], "claimName": claim}
    else:
        spec["checkpoint"]["claimTemplate"]["spec"]["storageClassName"] = storage_class
    return job


def evaluation_pod(name: str, claim: str, image: str) -> Json:
    """A pod of no job that evaluates the newest checkpoint; it can read the volume and not write to it."""
    arguments = ["eval", "--checkpoint-dir", "/checkpoints"]
    data = training().arguments
    arguments += ["--data-dir", "/checkpoints/data"] if "--data-dir" in data else ["--data", "digits"]
    container = {
        "name": "eval",
        "image": image,
        "args": arguments,
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "ddpjob"}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints", "readOnly": True}],
    }
    security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "securityContext": security,
        "containers": [container],
        "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


@cache
def _example() -> Json:
    job: Json = yaml.safe_load(EXAMPLE.read_text())
    return job


def _apart(name: str) -> Json:
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {names.LABEL_JOB_NAME: name}},
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
