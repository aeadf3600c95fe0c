"""A TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1) as a DDPJob.

A TrainJob is a change of a runtime, which has the pod template. The runtime is taken from the same file; of
torch-distributed the defaults are known. https://github.com/kubeflow/trainer/tree/master/manifests/base/runtimes
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ddpjob.api.objects import Json, element
from ddpjob.api.quantities import amount
from ddpjob.convert.fields import ANY, Difference, Kept, Left, Shape, require_pod_template, walk
from ddpjob.convert.pods import has_devices, present, spec_of_pod
from ddpjob.engine.merge import merge
from ddpjob.errors import InvalidJobError

VERSION = "trainer.kubeflow.org/v1alpha1"
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
_TEMPLATE: Shape = {"metadata": dict, "spec": dict, "*": ANY}
_NO_JOBSET, _NO_STEPS = "there is no JobSet", "a DDPJob has no steps"
_NO_INITIALIZER = Left(
    "a DDPJob has no initializers", "download it in an init container of template.spec, or mount a claim with spec.data"
)
_OF_JOBS: Shape = {"spec": {"template": _TEMPLATE}}
_RUNTIME: Shape = {
    "mlPolicy": {
        "numNodes": int,
        "torch": {"elasticPolicy": {"minNodes": int, "*": Left("a DDPJob has at most numNodes")}, "*": ANY},
        "*": Left("a DDPJob sets the variables of torchrun alone", "start the training with torchrun"),
    },
    "podGroupPolicy": {"*": {"*": Left("the PodGroup of a DDPJob has no such setting")}},
    "template": {
        "metadata": ANY,
        "spec": {
            "replicatedJobs": [
                {"name": str, "template": _OF_JOBS | {"metadata": {"labels": dict, "*": ANY}}, "*": ANY},
            ],
            "failurePolicy": {"maxRestarts": int},
            "ttlSecondsAfterFinished": Kept(int),
        },
    },
}
_PATCH: Shape = {
    "metadata": Left(_NO_JOBSET, "set metadata of the DDPJob or of its template"),
    "spec": {
        "replicatedJobs": [
            {"name": str, "template": _OF_JOBS | {"metadata": Left("there is no Job", "set template.metadata")}}
        ]
    },
}
_SPEC: Shape = {
    "runtimeRef": {"name": str, "*": ANY},
    "trainer": {
        **{"image": str, "command": [str], "args": [str], "env": [dict], "numNodes": int, "numProcPerNode": ANY},
        "resourcesPerNode": {"limits": dict, "requests": dict, "*": ANY},
    },
    "initializer": {"dataset": _NO_INITIALIZER, "model": _NO_INITIALIZER, "*": ANY},
    "activeDeadlineSeconds": Kept(int),
    "suspend": Kept(bool),
    "managedBy": ANY,
    "labels": Left(_NO_JOBSET, "set template.metadata.labels"),
    "annotations": Left(_NO_JOBSET, "set template.metadata.annotations"),
    "podTemplateOverrides": [{"targetJobs": [{"name": str, "*": ANY}], **_TEMPLATE}],
    "runtimePatches": [{"trainingRuntimeSpec": {"template": _PATCH}, "*": ANY}],
}
_CONTAINER = "node"
_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
_TORCH_DISTRIBUTED = "torch-distributed"
_TORCH_IMAGE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
"""Of the runtime torch-distributed in Kubeflow Trainer 2.3."""


def spec_of_trainjob(job: Json, runtimes: Sequence[Json], notes: list[Difference]) -> Json:
    """Return the spec of the DDPJob; ``runtimes``: those that are known.

    Raises:
        InvalidJobError: the image is unknown, or the runtime has no container that trains.
    """
    given = job.get("spec") or {}
    kept = walk(given, _SPEC, "spec", notes)
    if str(given.get("managedBy") or "").startswith("kueue"):
        notes.append(Difference("spec.managedBy", f"{given['managedBy']} does not know DDPJobs"))
    path, runtime = _runtime(given, runtimes, notes)
    kept = walk(runtime, _RUNTIME, path, notes) | kept
    template, name = _pod_template(runtime, path, notes)
    for field, part in _patches(given, name, notes):
        template = merge(template, require_pod_template(part, field))
    trainer = present(given.get("trainer") or {})
    spec, started = spec_of_pod(
        _with_trainer(template, trainer), _CONTAINER, "pods", notes, trainer_path="spec.trainer"
    )
    if "image" not in spec:
        raise InvalidJobError(
            "spec.trainer.image is missing, and the runtime of the TrainJob is not in the file",
            "the runtime has the image, the command and the volumes of the pods",
            "append it to the file: kubectl get clustertrainingruntime NAME -o yaml, or set spec.trainer.image",
        )
    policy = present(runtime.get("mlPolicy") or {})
    torch = present(policy.get("torch") or {})
    spec["numNodes"] = trainer.get("numNodes", policy.get("numNodes", 1))
    spec["minNodes"] = started.min_nodes((torch.get("elasticPolicy") or {}).get("minNodes"), spec["numNodes"])
    wanted = started.nproc(trainer.get("numProcPerNode", torch.get("numProcPerNode")))
    spec["nprocPerNode"] = _per_cpu(spec.get("resources") or {}) if wanted is None else wanted
    spec["rendezvous"] = started.rendezvous({})
    if runtime.get("podGroupPolicy"):
        spec["scheduling"] = {"schedulingPolicy": {"gang": {}}}
    limit = (_jobset(runtime).get("failurePolicy") or {}).get("maxRestarts")
    if limit is not None:  # the failure policy of a JobSet restarts all pods, too
        spec["restartPolicy"] = {"maxRestarts": limit}
    return spec | {key: value for key, value in kept.items() if value or key == "ttlSecondsAfterFinished"}


def _runtime(spec: Json, runtimes: Sequence[Json], notes: list[Difference]) -> tuple[str, Json]:
    """Return path and spec of the runtime of the file, or what is known of it."""
    name = str((spec.get("runtimeRef") or {}).get("name") or "")
    for runtime in runtimes:
        if (runtime.get("metadata") or {}).get("name") == name:
            return f"{runtime['kind']}.spec", runtime.get("spec") or {}
    field, path = "spec.runtimeRef", "runtime.spec"
    if name != _TORCH_DISTRIBUTED:
        why = f"the runtime {name} is not in the file, so nothing of its pods, volumes and command carries over"
        todo = f"append it to the file: kubectl get clustertrainingruntime {name} -o yaml"
        notes.append(Difference(field, why, todo))
        return path, {}
    container = {"name": _CONTAINER, "image": _TORCH_IMAGE}
    if not (spec.get("trainer") or {}).get("image"):
        why = f"{name} is not in the file; the image is taken from Kubeflow Trainer 2.3"
        notes.append(Difference(field, why, "set the image of your cluster's runtime"))
    node = {"name": _CONTAINER, "template": {"spec": {"template": {"spec": {"containers": [container]}}}}}
    return path, {"mlPolicy": {"torch": {}}, "template": {"spec": {"replicatedJobs": [node]}}}


def _jobset(runtime: Json) -> Json:
    return (runtime.get("template") or {}).get("spec") or {}


def _pod_template(runtime: Json, path: str, notes: list[Difference]) -> tuple[Json, str]:
    """Return the pod template of the runtime's job that trains, and the name of that job."""
    jobs = _jobset(runtime).get("replicatedJobs") or []
    node = next((one for one in jobs if _step(one) == "trainer"), None) or element(jobs, "name", _CONTAINER)
    where = f"{path}.template.spec.replicatedJobs"
    for other in jobs:
        if other is not node:
            todo = "run it before, or as an init container of template.spec"
            notes.append(Difference(f"{where}[{other.get('name')}]", _NO_STEPS, todo))
    inner = ((node.get("template") or {}).get("spec") or {}).get("template")
    found = require_pod_template(inner, f"{where}[{node.get('name')}].template.spec.template")
    return found, str(node.get("name") or _CONTAINER)


def _step(replicated: Json) -> str:
    labels = ((replicated.get("template") or {}).get("metadata") or {}).get("labels") or {}
    return str(labels.get(_ANCESTOR) or "")


def _patches(spec: Json, name: str, notes: list[Difference]) -> Iterator[tuple[str, Json]]:
    """Yield path and content of each change of the pods that train, of both forms that TrainJobs have had."""
    found: list[tuple[str, set[str], Json]] = []  # path, names of the jobs, change
    for index, override in enumerate(spec.get("podTemplateOverrides") or ()):
        targets = {str(target.get("name")) for target in override.get("targetJobs") or ()}
        change = {key: value for key, value in override.items() if key != "targetJobs"}
        found.append((f"spec.podTemplateOverrides[{index}]", targets or {name}, change))
    for index, patch in enumerate(spec.get("runtimePatches") or ()):
        for one in _jobset(patch.get("trainingRuntimeSpec") or {}).get("replicatedJobs") or ():
            path = f"spec.runtimePatches[{index}].trainingRuntimeSpec.template.spec.replicatedJobs[{one.get('name')}]"
            change = ((one.get("template") or {}).get("spec") or {}).get("template") or {}
            found.append((f"{path}.template.spec.template", {str(one.get("name"))}, change))
    for path, targets, change in found:
        if targets & {name, _CONTAINER}:
            yield path, change
        else:
            notes.append(Difference(path, f"it is for {', '.join(sorted(targets))}: {_NO_STEPS}"))


def _with_trainer(template: Json, trainer: Json) -> Json:
    """Return the pod template with the fields of ``spec.trainer``."""
    own = {key: trainer.get(key) for key in ("image", "command", "args", "env")}
    container = present({"name": _CONTAINER, **own, "resources": trainer.get("resourcesPerNode")})
    given = (template.get("spec") or {}).get("containers") or []
    before = element(given, "name", _CONTAINER) or (given[0] if len(given) == 1 else {})
    others = [one for one in given if one is not before]
    if "resources" in container and before:  # the whole of them is replaced
        before = {key: value for key, value in before.items() if key != "resources"}
    pod = (template.get("spec") or {}) | {"containers": [merge(before, container), *others]}
    return template | {"spec": pod}


def _per_cpu(resources: Json) -> int | str:
    """Return ``nprocPerNode`` for ``auto`` of a TrainJob: without GPUs one process per CPU in its resources."""
    given: dict[str, Any] = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    if has_devices(resources) or "cpu" not in given:
        return "auto"
    return max(1, int(amount(given["cpu"])))
