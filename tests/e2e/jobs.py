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
from tests.kind.images import TRAINER_TAG

EXAMPLE = ROOT / "manifests" / "examples" / "mnist-cpu.yaml"
JOB_KIND = f"{names.DDPJOBS.plural}.{names.GROUP}"
# What Pod Security "restricted" requires.
POD_SECURITY = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


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


def mnist_job(name: str, *arguments: str, claim: str = "") -> Json:
    """Return the example with its nodes on different machines.

    arguments: additional flags of the trainer. claim: the name of an existing claim, used instead of the template.
    """
    job = copy.deepcopy(_example())
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["args"] = [*training().arguments, *arguments]
    spec["template"] = {"spec": {"affinity": strictly_apart(name)}}
    if claim:
        spec["checkpoint"] = {"mountPath": spec["checkpoint"]["mountPath"], "claimName": claim}
    return job


def shell_job(name: str, script: str, **spec: Any) -> Json:
    """Return a job of one node that runs a shell script, and ends within a second after SIGTERM.

    spec: fields that replace those of the job.
    """
    given = {
        "image": TRAINER_TAG,
        "command": ["sh", "-c", script],
        "template": {"spec": {"terminationGracePeriodSeconds": 1}},
        **spec,
    }
    return {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": name}, "spec": given}


def sleeping_pod(name: str) -> Json:
    """Return a pod without a job that does nothing."""
    container = {"name": "sleep", "image": TRAINER_TAG, "command": ["sleep", "600"]}
    return _pod(name, container, terminationGracePeriodSeconds=1)


def evaluation_pod(name: str, claim: str) -> Json:
    """Return a pod without a job that evaluates the newest checkpoint from a read-only volume."""
    data = ["--data-dir", "/checkpoints/data"] if "--data-dir" in training().arguments else ["--data", "digits"]
    container = {
        "name": "eval",
        "image": TRAINER_TAG,
        "args": ["eval", "--checkpoint-dir", "/checkpoints", *data],
        "env": [{"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "ddpjob"}],
        "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints", "readOnly": True}],
    }
    volume = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    return _pod(name, container, volumes=[volume])


def _pod(name: str, container: Json, **spec: Any) -> Json:
    """Return a pod of one container that Pod Security "restricted" admits."""
    containers = [container | {"securityContext": CONTAINER_SECURITY}]
    whole = {"restartPolicy": "Never", "securityContext": POD_SECURITY, "containers": containers, **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": whole}


@cache
def _example() -> Json:
    job: Json = yaml.safe_load(EXAMPLE.read_text())
    return job


def strictly_apart(name: str) -> Json:
    """Return the affinity of pods that only run on different Kubernetes nodes."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {names.LABEL_JOB_NAME: name}},
        "matchLabelKeys": [names.LABEL_ATTEMPT],  # beside a pod of the previous attempt that still ends there is room
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
