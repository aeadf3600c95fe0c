"""Variants of the job in manifests/examples/mnist-cpu.yaml, with the changes that another cluster requires."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.e2e.installation import ROOT
from tests.e2e.storage import has_mnist

EXAMPLE = ROOT / "manifests" / "examples" / "mnist-cpu.yaml"
JOB_KIND = f"{names.DDPJOBS.plural}.{names.GROUP}"


@dataclass(frozen=True)
class Training:
    """The trainer's arguments here, and the accuracy that they must reach."""

    arguments: tuple[str, ...]
    least_accuracy: float


@cache
def training() -> Training:
    """Return the training on MNIST if this machine has the files, else on the digits that the image contains."""
    if has_mnist():
        return Training(tuple(_example()["spec"]["args"]), least_accuracy=0.985)
    return Training(("train", "--epochs", "2", "--data", "digits"), least_accuracy=0.85)


def mnist_job(name: str, *arguments: str, storage_class: str = "", claim: str = "") -> Json:
    """Return the example with its nodes on different machines.

    arguments: additional flags of the trainer.
    storage_class: of the claim template. claim: the name of an existing claim, used instead of the template.
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
    """Return a pod without a job that evaluates the newest checkpoint from a read-only volume."""
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
        "matchLabelKeys": [names.LABEL_ATTEMPT],  # beside a pod of the previous attempt that still ends there is room
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
