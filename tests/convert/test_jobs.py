"""Ten jobs with the fields of public PyTorchJobs and TrainJobs, and the DDPJobs that are made of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from ddpjob.client.jobfile import documents_of, dump_yaml
from ddpjob.client.validation import validate
from ddpjob.convert.conversion import Conversion, convert

JOBS = Path(__file__).parent / "jobs"
UNBUFFERED = {"name": "PYTHONUNBUFFERED", "value": "1"}
AS_BEFORE = {"profile": "Unset"}
MASTER, WORKER = (f"spec.pytorchReplicaSpecs.{kind}" for kind in ("Master", "Worker"))

# For each file the spec of the DDPJob, and the fields of the notes.
EXPECTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "pytorchjob-torchrun": (
        {
            "image": "registry.example.com/demo:cpu",
            "command": ["torchrun", "demo.py"],
            "env": [UNBUFFERED],
            "numNodes": 2,
            "nprocPerNode": 2,
        },
        [f"{MASTER}.restartPolicy"],
    ),
    "pytorchjob-entrypoint": (
        {
            "image": "registry.example.com/send-receive:1",
            "env": [UNBUFFERED],
            "numNodes": 4,
            "nprocPerNode": 1,
        },
        [f"{MASTER}.restartPolicy"],
    ),
    "pytorchjob-elastic": (
        {
            "image": "registry.example.com/images:1",
            "command": ["python", "-m", "torch.distributed.run", "/app/images.py", "--epochs=1", "/data/images"],
            "env": [{"name": "LOGLEVEL", "value": "INFO"}, UNBUFFERED],
            "resources": {"requests": {"cpu": 4}},
            "imagePullPolicy": "IfNotPresent",
            "numNodes": 2,
            "minNodes": 1,
            "nprocPerNode": "auto",
            "rendezvous": {"timeoutSeconds": 1200},
            "restartPolicy": {"maxRestarts": 100},
        },
        [
            "spec.elasticPolicy.metrics",
            f"{WORKER}.template.spec.containers[0].command",
            "spec.nprocPerNode",
            "spec.elasticPolicy.maxReplicas",
        ],
    ),
    "pytorchjob-gpu": (
        {
            "image": "registry.example.com/digits:1",
            "args": ["--backend", "nccl"],
            "env": [UNBUFFERED],
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "numNodes": 2,
            "nprocPerNode": 1,
            "template": {"metadata": {"labels": {"role": "first"}}},
        },
        [f"{WORKER}.template.metadata", f"{MASTER}.restartPolicy"],
    ),
    "pytorchjob-python": (
        {
            "image": "registry.example.com/plain:1",
            "command": ["python3"],
            "args": ["plain.py", "--epochs=1"],
            "env": [UNBUFFERED],
            "imagePullPolicy": "Always",
            "numNodes": 3,
            "nprocPerNode": 1,
            "sharedMemory": {"sizeLimit": "2Gi"},
            "scheduling": {"schedulingPolicy": {"gang": {}}},
            "restartPolicy": {
                "maxRestarts": 5,
                "rules": [{"onExitCodes": {"operator": "In", "values": list(range(1, 128))}, "action": "Fail"}],
            },
            "activeDeadlineSeconds": 3600,
            "ttlSecondsAfterFinished": 600,
            "template": {
                "metadata": {
                    "annotations": {"sidecar.istio.io/inject": "false", "scheduling.volcano.sh/queue-name": "night"}
                },
                "spec": {
                    "priorityClassName": "high",
                    "serviceAccountName": "trainer",
                    "automountServiceAccountToken": True,
                    "nodeSelector": {"disk": "fast"},
                    "volumes": [{"name": "scratch", "emptyDir": {}}],
                    "containers": [
                        {"name": "trainer", "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]},
                    ],
                },
            },
        },
        ["spec.runPolicy.schedulingPolicy.scheduleTimeoutSeconds"],
    ),
    "trainjob-torchrun": (
        {
            "image": "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime",
            "env": [{"name": "GREETING", "value": "hello"}],
            "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"cpu": "4", "memory": "8Gi"}},
            "numNodes": 2,
            "nprocPerNode": 2,  # one process per CPU of the requests
            "template": {
                "spec": {
                    "serviceAccountName": "trainer",
                    "automountServiceAccountToken": True,
                    "nodeSelector": {"pool": "training"},
                    "tolerations": [{"key": "training", "operator": "Exists", "effect": "NoSchedule"}],
                }
            },
        },
        ["spec.runtimePatches[0].trainingRuntimeSpec.template.metadata", "spec.runtimeRef"],
    ),
    "trainjob-overrides": (
        {
            "image": "registry.example.com/tune:1",
            "command": ["torchrun"],
            "args": ["/scripts/tune.py", "--lora"],
            "resources": {"limits": {"nvidia.com/gpu": 4}},
            "numNodes": 2,
            "nprocPerNode": 4,
            "template": {
                "spec": {
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                    "volumes": [
                        {"name": "work", "persistentVolumeClaim": {"claimName": "work"}},
                        {"name": "scripts", "configMap": {"name": "scripts"}},
                    ],
                    "containers": [
                        {
                            "name": "trainer",
                            "volumeMounts": [
                                {"name": "work", "mountPath": "/work"},
                                {"name": "scripts", "mountPath": "/scripts"},
                            ],
                        }
                    ],
                }
            },
        },
        ["spec.runtimeRef", "spec.podTemplateOverrides[1]", "spec.trainer.command"],
    ),
    "trainjob-queue": (
        {
            "image": "registry.example.com/python:3.11",
            "command": ["python3", "-c", "print('trained')"],
            "resources": {"requests": {"cpu": "2", "memory": "4Gi"}},
            "numNodes": 3,
            "nprocPerNode": 1,
        },
        ["spec.suspend"],
    ),
    "trainjob-own-runtime": (
        {
            "image": "registry.example.com/torch:2",
            "env": [{"name": "OF_RUNTIME", "value": "1"}],
            "numNodes": 4,
            "nprocPerNode": 1,
            "scheduling": {"schedulingPolicy": {"gang": {}}},
        },
        [],
    ),
    "trainjob-steps": (
        {
            "image": "registry.example.com/torch:2",
            "command": ["torchrun", "/app/train.py"],
            "resources": {"limits": {"nvidia.com/gpu": 8}},
            "numNodes": 2,
            "nprocPerNode": "auto",
            "template": {
                "spec": {
                    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
                    "containers": [
                        {"name": "trainer", "volumeMounts": [{"name": "data", "mountPath": "/workspace"}]},
                    ],
                }
            },
        },
        [
            "spec.initializer.dataset",
            "TrainingRuntime.spec.template.spec.replicatedJobs[dataset-initializer]",
        ],
    ),
}


def converted(name: str) -> Conversion:
    return convert(documents_of((JOBS / f"{name}.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", EXPECTED)
def test_job_becomes_this_ddpjob_and_these_notes(name: str) -> None:
    made = converted(name)
    expected, noted = EXPECTED[name]
    inline = {"command"} - expected.keys()  # a script of several lines
    assert {key: value for key, value in made.job["spec"].items() if key not in inline} == (
        expected | {"podSecurity": AS_BEFORE}
    )
    assert [note.field for note in made.notes] == noted
    assert all(note.why for note in made.notes)


@pytest.mark.parametrize("name", EXPECTED)
def test_converted_job_is_valid(name: str) -> None:
    checked = validate(name, dump_yaml(converted(name).job))
    without_volume = [problem.field for problem in checked.problems if problem.field == "spec"]
    assert [problem.field for problem in checked.problems] == without_volume[:1], "a job of Kubeflow may have none"
    assert len(checked.jobs) == 1


def test_all_jobs_are_compared() -> None:
    assert {path.stem for path in JOBS.glob("*.yaml")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_job_names_the_public_file_whose_fields_it_has(name: str) -> None:
    lines = (JOBS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert re.match(r"# Fields as in [\w-]+/[\w-]+: [\w/.-]+\.(yaml|md)\b", lines[1])


def test_name_namespace_labels_and_annotations_are_kept() -> None:
    assert converted("pytorchjob-python").job["metadata"] == {
        "name": "plain",
        "namespace": "team-a",
        "labels": {"team": "a"},
    }
