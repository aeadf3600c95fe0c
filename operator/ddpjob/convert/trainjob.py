"""A TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1) as a DDPJob.

A TrainJob is a change of a runtime, which has the pod template. The runtime is taken from the same file; of
torch-distributed the defaults are known. https://github.com/kubeflow/trainer/tree/master/manifests/base/runtimes
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ddpjob.api.objects import Json, element
from ddpjob.api.quantities import amount
from ddpjob.convert.notes import Note, note_others
from ddpjob.convert.pods import has_devices, max_restarts, present, spec_of_pod
from ddpjob.convert.shape import Shape, require_pod_template, require_shape
from ddpjob.convert.torchrun import Launch
from ddpjob.engine.merge import merge
from ddpjob.errors import InvalidJobError

VERSION = "trainer.kubeflow.org/v1alpha1"
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
_TEMPLATE: Shape = {"metadata": dict, "spec": dict}
_JOBS: Shape = [{"name": str, "template": {"metadata": {"labels": dict}, "spec": {"template": _TEMPLATE}}}]
_RUNTIME_SHAPE: Shape = {
    "mlPolicy": {"numNodes": int, "torch": {"elasticPolicy": {"minNodes": int}}},
    "podGroupPolicy": {"*": dict},
    "template": {
        "spec": {"replicatedJobs": _JOBS, "failurePolicy": {"maxRestarts": int}, "ttlSecondsAfterFinished": int}
    },
}
_AMOUNTS: Shape = {"limits": dict, "requests": dict}
_SHAPE: Shape = {
    "runtimeRef": {"name": str},
    "trainer": {"image": str, "command": [str], "args": [str], "env": [dict], "numNodes": int}
    | {"resourcesPerNode": _AMOUNTS},
    "initializer": dict,
    "activeDeadlineSeconds": int,
    "suspend": bool,
    "podTemplateOverrides": [{"targetJobs": [dict], **_TEMPLATE}],
    "podSpecOverrides": [{"targetJobs": [dict]}],
    "runtimePatches": [{"trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": _JOBS}}}}],
}
_OF_RUN = ("failurePolicy", "ttlSecondsAfterFinished")
_CONTAINER = "node"
_ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
_TORCH_DISTRIBUTED = "torch-distributed"
_TORCH_IMAGE = "pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime"
"""Of the runtime torch-distributed in Kubeflow Trainer 2.3."""
_KNOWN = (
    *("runtimeRef", "trainer", "initializer", "suspend", "managedBy", "activeDeadlineSeconds", "labels", "annotations"),
    *("podTemplateOverrides", "podSpecOverrides", "runtimePatches"),
)


def spec_of_trainjob(job: Json, runtimes: Sequence[Json], notes: list[Note]) -> Json:
    """Return the spec of the DDPJob; ``runtimes``: those that are known.

    Raises:
        InvalidJobError: the image is unknown, or the runtime has no container that trains.
    """
    given = job.get("spec") or {}
    require_shape(given, _SHAPE, "spec")
    note_others(given, _KNOWN, "spec", notes)
    runtime = _runtime(given, runtimes, notes)
    template, name = _pod_template(runtime, notes)
    for field, part in _patches(given, name, notes):
        template = merge(template, require_pod_template(part, field))
    trainer = present(given.get("trainer") or {})
    known = ("image", "command", "args", "env", "resourcesPerNode", "numNodes", "numProcPerNode")
    note_others(trainer, known, "spec.trainer", notes)
    spec, started = spec_of_pod(
        _with_trainer(template, trainer), _CONTAINER, "pods", notes, trainer_path="spec.trainer"
    )
    if "image" not in spec:
        raise InvalidJobError(
            "spec.trainer.image is missing, and the runtime of the TrainJob is not in the file",
            "the runtime has the image, the command and the volumes of the pods",
            "append it to the file: kubectl get clustertrainingruntime NAME -o yaml, or set spec.trainer.image",
        )
    policy = present((runtime.get("spec") or {}).get("mlPolicy") or {})
    spec["numNodes"] = trainer.get("numNodes", policy.get("numNodes", 1))
    per_node = trainer.get("numProcPerNode", (policy.get("torch") or {}).get("numProcPerNode"))
    elastic = present((policy.get("torch") or {}).get("elasticPolicy") or {})
    spec["minNodes"] = started.min_nodes(elastic.get("minNodes"), spec["numNodes"])
    for key in sorted(elastic.keys() - {"minNodes"}):
        notes.append(Note(f"runtime.spec.mlPolicy.torch.elasticPolicy.{key}", "a DDPJob has at most numNodes"))
    spec["nprocPerNode"] = _nproc(per_node, started, spec.get("resources") or {})
    _note_the_rest(given, notes)
    if (runtime.get("spec") or {}).get("podGroupPolicy"):
        spec["scheduling"] = {"schedulingPolicy": {"gang": {}}}
    spec |= _of_jobset(((runtime.get("spec") or {}).get("template") or {}).get("spec") or {}, notes)
    return spec | present({key: given.get(key) or None for key in ("activeDeadlineSeconds", "suspend")})


def _of_jobset(jobset: Json, notes: list[Note]) -> Json:
    """Return the fields of the run that a JobSet and a DDPJob both have; a failure policy restarts all pods of both."""
    policy, spec = present(jobset.get("failurePolicy") or {}), {}
    path = "runtime.spec.template.spec.failurePolicy"
    note_others(policy, ("maxRestarts",), path, notes)
    if "maxRestarts" in policy:
        spec["restartPolicy"] = {"maxRestarts": max_restarts(policy["maxRestarts"], f"{path}.maxRestarts", notes)}
    if (seconds := jobset.get("ttlSecondsAfterFinished")) is not None:
        spec["ttlSecondsAfterFinished"] = seconds
    return spec


def _runtime(spec: Json, runtimes: Sequence[Json], notes: list[Note]) -> Json:
    """Return the runtime of the file, or what is known of it."""
    name = str((spec.get("runtimeRef") or {}).get("name") or "")
    for runtime in runtimes:
        if (runtime.get("metadata") or {}).get("name") == name:
            require_shape(runtime.get("spec"), _RUNTIME_SHAPE, f"{runtime['kind']}.spec")
            return runtime
    field = "spec.runtimeRef"
    if name != _TORCH_DISTRIBUTED:
        why = f"the runtime {name} is not in the file, so nothing of its pods, volumes and command carries over"
        notes.append(Note(field, why, f"append it to the file: kubectl get clustertrainingruntime {name} -o yaml"))
        return {}
    container = {"name": _CONTAINER, "image": _TORCH_IMAGE}
    if not (spec.get("trainer") or {}).get("image"):
        why = f"{name} is not in the file; the image is taken from Kubeflow Trainer 2.3"
        notes.append(Note(field, why, "set the image of your cluster's runtime"))
    node = {"name": _CONTAINER, "template": {"spec": {"template": {"spec": {"containers": [container]}}}}}
    return {"spec": {"mlPolicy": {"torch": {}}, "template": {"spec": {"replicatedJobs": [node]}}}}


def _pod_template(runtime: Json, notes: list[Note]) -> tuple[Json, str]:
    """Return the pod template of the runtime's job that trains, and the name of that job."""
    spec = runtime.get("spec") or {}
    path = f"{runtime.get('kind') or 'runtime'}.spec"
    for kind, settings in present(spec.get("podGroupPolicy") or {}).items():
        for key in present(settings or {}):
            notes.append(Note(f"{path}.podGroupPolicy.{kind}.{key}", "the PodGroup of a DDPJob has no such setting"))
    for kind in sorted((spec.get("mlPolicy") or {}).keys() - {"numNodes", "torch"}):
        why = f"a DDPJob sets the variables of torchrun, not the variables of {kind}"
        notes.append(Note(f"{path}.mlPolicy.{kind}", why, "start the training with torchrun"))
    note_others(spec, ("mlPolicy", "podGroupPolicy", "template"), path, notes)
    jobset = (spec.get("template") or {}).get("spec") or {}
    jobs = jobset.get("replicatedJobs") or []
    note_others(jobset, ("replicatedJobs", *_OF_RUN), f"{path}.template.spec", notes)
    node = next((one for one in jobs if _step(one) == "trainer"), None) or element(jobs, "name", _CONTAINER)
    for other in jobs:
        if other is not node:
            field = f"{path}.template.spec.replicatedJobs[{other.get('name')}]"
            notes.append(
                Note(field, "a DDPJob has no steps", "run it before, or as an init container of template.spec")
            )
    inner = (node.get("template") or {}).get("spec") or {}
    note_others(inner, ("template",), f"{path}.template.spec.replicatedJobs[{node.get('name')}].template.spec", notes)
    where = f"{path}.template.spec.replicatedJobs[{node.get('name')}].template.spec.template"
    return require_pod_template(inner.get("template"), where), str(node.get("name") or _CONTAINER)


def _step(replicated: Json) -> str:
    labels = ((replicated.get("template") or {}).get("metadata") or {}).get("labels") or {}
    return str(labels.get(_ANCESTOR) or "")


def _patches(spec: Json, name: str, notes: list[Note]) -> Iterator[tuple[str, Json]]:
    """Yield path and content of each change of the pods that train, of all three forms that TrainJobs have had."""
    for field in ("podTemplateOverrides", "podSpecOverrides"):
        for index, override in enumerate(spec.get(field) or ()):
            path = f"spec.{field}[{index}]"
            targets = [str(target.get("name")) for target in override.get("targetJobs") or ()]
            rest = {key: value for key, value in override.items() if key != "targetJobs"}
            if targets and not {name, _CONTAINER} & set(targets):
                notes.append(Note(path, f"it is for {', '.join(targets)}: a DDPJob has no steps"))
            else:
                yield path, rest if field == "podTemplateOverrides" else {"spec": rest}
    for index, patch in enumerate(spec.get("runtimePatches") or ()):
        path, runtime = f"spec.runtimePatches[{index}].trainingRuntimeSpec", patch.get("trainingRuntimeSpec") or {}
        note_others(runtime, ("template",), path, notes)
        path, template = f"{path}.template", runtime.get("template") or {}
        note_others(template.get("spec") or {}, ("replicatedJobs",), f"{path}.spec", notes)
        if template.get("metadata"):
            notes.append(
                Note(f"{path}.metadata", "there is no JobSet", "set metadata of the DDPJob or of its template")
            )
        for one in (template.get("spec") or {}).get("replicatedJobs") or ():
            where = f"{path}.spec.replicatedJobs[{one.get('name')}].template"
            inner = one.get("template") or {}
            if inner.get("metadata"):
                notes.append(Note(f"{where}.metadata", "there is no Job", "set template.metadata"))
            if one.get("name") not in (name, _CONTAINER):
                notes.append(Note(where, "a DDPJob has no steps"))
            else:
                note_others(inner.get("spec") or {}, ("template",), f"{where}.spec", notes)
                yield f"{where}.spec.template", (inner.get("spec") or {}).get("template") or {}


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


def _nproc(per_node: Any, started: Launch, resources: Json) -> int | str:
    """Return ``nprocPerNode``; without GPUs, ``auto`` of a TrainJob is one process per CPU in its resources."""
    wanted = started.flags.get("nproc-per-node", per_node)
    if str(wanted).isdecimal():
        return int(wanted)
    if started.starts_processes is not True:
        return 1
    if has_devices(resources):
        return "auto"
    given = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return max(1, int(amount(given["cpu"]))) if "cpu" in given else "auto"


def _note_the_rest(spec: Json, notes: list[Note]) -> None:
    for kind in ("dataset", "model"):
        if (spec.get("initializer") or {}).get(kind):
            action = "download it in an init container of template.spec, or mount a claim with spec.data"
            notes.append(Note(f"spec.initializer.{kind}", "a DDPJob has no initializers", action))
    for kind in ("labels", "annotations"):
        if spec.get(kind):
            notes.append(Note(f"spec.{kind}", "there is no JobSet", f"set template.metadata.{kind}"))
    if str(spec.get("managedBy") or "").startswith("kueue"):
        notes.append(Note("spec.managedBy", f"{spec['managedBy']} does not know DDPJobs"))
