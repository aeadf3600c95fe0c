"""A PyTorchJob of Kubeflow's training operator (kubeflow.org/v1) as a DDPJob.

Its fields and what they do: https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/
"""

from ddpjob.api import names
from ddpjob.api.objects import Json, element
from ddpjob.convert.fields import ANY, Difference, Kept, Left, Shape, walk
from ddpjob.convert.pods import has_devices, present, spec_of_pod
from ddpjob.convert.torchrun import Launch
from ddpjob.engine.merge import merge
from ddpjob.errors import InvalidJobError

VERSION = "kubeflow.org/v1"
_REPLICAS: Shape = {"replicas": int, "restartPolicy": str, "template": dict}
_NO_LIMIT = Left("the PodGroup of a DDPJob has no such limit")
_SPEC: Shape = {
    "nprocPerNode": str,
    "pytorchReplicaSpecs": {"*": _REPLICAS},
    "elasticPolicy": {
        **dict.fromkeys(("minReplicas", "maxReplicas", "nProcPerNode", "maxRestarts"), int),
        "metrics": Left("there is no autoscaling", shape=[dict]),
        "rdzvConf": [{"key": str, "value": str}],
        **dict.fromkeys(("standalone", "rdzvBackend", "rdzvPort", "rdzvHost", "rdzvId"), ANY),
    },
    "runPolicy": {
        "backoffLimit": int,
        **dict.fromkeys(("activeDeadlineSeconds", "ttlSecondsAfterFinished"), Kept(int)),
        "suspend": Kept(bool),
        "cleanPodPolicy": str,
        "managedBy": str,
        "schedulingPolicy": {"minAvailable": int, "priorityClass": str, "queue": str, "*": _NO_LIMIT},
    },
}
_CONTAINER = "pytorch"
_UNBUFFERED = {"name": "PYTHONUNBUFFERED", "value": "1"}
"""Every container of a PyTorchJob has this variable."""
_MANAGER = "kubeflow.org/training-operator"
_PERMANENT = list(range(1, 128))
"""Exit codes after which restartPolicy ExitCode does not restart."""


def spec_of_pytorchjob(job: Json, notes: list[Difference]) -> Json:
    """Return the spec of the DDPJob. Raises ``InvalidJobError`` if it has no replicas, or Master and Worker differ."""
    given = job.get("spec") or {}
    kept = walk(given, _SPEC, "spec", notes)
    replicas = _replicas(given)
    spec, started = _pods(replicas, notes)
    elastic, policy = (present(given.get(key) or {}) for key in ("elasticPolicy", "runPolicy"))
    if not element(spec.get("env"), "name", _UNBUFFERED["name"]):
        spec["env"] = [*spec.get("env", []), dict(_UNBUFFERED)]
    num_nodes = spec["numNodes"] = sum(_count(one) for one in replicas.values())
    spec["minNodes"] = started.min_nodes(elastic.get("minReplicas"), num_nodes)
    spec["nprocPerNode"] = _nproc(given, elastic, started, spec.get("resources") or {}, notes)
    conf = {str(one.get("key")): str(one.get("value")) for one in elastic.get("rdzvConf", ())}
    spec["rendezvous"] = started.rendezvous(conf)
    if "Master" in replicas and policy.get("cleanPodPolicy") in ("All", "Running"):
        spec["successPolicy"] = "NodeZero"  # the success of the Master ends the Workers
    if policy.get("cleanPodPolicy") == "All":
        spec["podRetention"] = "None"
    if (most := elastic.get("maxReplicas", 0)) > num_nodes:
        todo = f"set numNodes to {most} to use as many where there is room"
        notes.append(Difference("spec.elasticPolicy.maxReplicas", f"numNodes is {num_nodes}, as the replicas", todo))
    limit = policy.get("backoffLimit", elastic.get("maxRestarts", started.max_restarts))
    spec["restartPolicy"] = _restarts(replicas, limit, notes)
    _place(spec, present(policy.get("schedulingPolicy") or {}), notes)
    if policy.get("managedBy", _MANAGER) != _MANAGER:
        notes.append(Difference("spec.runPolicy.managedBy", f"{policy['managedBy']} does not know DDPJobs"))
    return spec | kept


def _replicas(spec: Json) -> dict[str, Json]:
    """Return Master, if there is one, and Worker."""
    given = {
        str(kind).capitalize(): present(one or {}) for kind, one in (spec.get("pytorchReplicaSpecs") or {}).items()
    }
    replicas = {kind: given[kind] for kind in ("Master", "Worker") if kind in given}
    if not any(_count(one) for one in replicas.values()):
        raise InvalidJobError(
            "spec.pytorchReplicaSpecs has no replicas", "a PyTorchJob has a Master, Workers, or both", "add replicas"
        )
    if unknown := sorted(set(given) - set(replicas)):
        raise InvalidJobError(
            f"spec.pytorchReplicaSpecs has {', '.join(unknown)}", "a PyTorchJob has Master and Worker", "remove it"
        )
    return {kind: one for kind, one in replicas.items() if _count(one)}


def _count(replica: Json) -> int:
    count = replica.get("replicas")
    return count if isinstance(count, int) else 1


def _pods(replicas: dict[str, Json], notes: list[Difference]) -> tuple[Json, Launch]:
    """Return the part of the spec that the pod templates give. Raises ``InvalidJobError`` if they differ."""
    made: list[tuple[Json, Launch]] = []
    for kind, one in replicas.items():
        path = f"spec.pytorchReplicaSpecs.{kind}.template"
        made.append(spec_of_pod(one.get("template") or {}, _CONTAINER, path, [] if made else notes))
    first, *others = made
    for other in others:
        one, two = _what_matters(first[0]), _what_matters(other[0])
        # Their values may be secrets, and what is printed on standard error may be kept in the log of a pipeline.
        if found := sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key)):
            raise InvalidJobError(
                f"Master and Worker differ in {', '.join(found)}",
                "all pods of a DDPJob are made from one template; a script knows node 0 by $NODE_RANK",
                "make both equal, or remove one of them and add its replicas to the other",
            )
        if first[0] != other[0]:
            field = "spec.pytorchReplicaSpecs.Worker.template.metadata"
            notes.append(Difference(field, "all pods have labels and annotations of Master"))
    return first


def _what_matters(spec: Json) -> Json:
    """Return the spec without what makes no difference to a training: labels and annotations."""
    template = {key: value for key, value in spec.get("template", {}).items() if key != "metadata"}
    return spec | {"template": template}


def _nproc(given: Json, elastic: Json, started: Launch, resources: Json, notes: list[Difference]) -> int | str:
    """Return ``nprocPerNode``. A flag is stronger than elasticPolicy, and that than the spec, as for torchrun."""
    field = "spec.elasticPolicy.nProcPerNode" if "nProcPerNode" in elastic else "spec.nprocPerNode"
    given_here = elastic.get("nProcPerNode", given.get("nprocPerNode"))
    if (wanted := started.nproc(given_here)) is not None:
        return wanted
    if given_here == "cpu" or not has_devices(resources):
        why = "torchrun started one process per GPU or CPU that it found; auto is one per GPU in resources, else one"
        notes.append(Difference(field, why, "set nprocPerNode to a number"))
    return "auto"


def _restarts(replicas: dict[str, Json], limit: int | None, notes: list[Difference]) -> Json:
    """Return ``restartPolicy``: a DDPJob restarts all pods, a PyTorchJob those that failed."""
    kinds = {name: one.get("restartPolicy") or "OnFailure" for name, one in replicas.items()}
    first, kind = next(iter(kinds.items()))
    field = f"spec.pytorchReplicaSpecs.{first}.restartPolicy"
    if len(set(kinds.values())) > 1:
        notes.append(Difference(field, f"all pods restart together, so all have the policy of {first}, {kind}"))
    if kind == "Never":
        return {"maxRestarts": 0}
    restarts: Json = {}
    if limit is None:
        why = f"{kind} without runPolicy.backoffLimit restarts without end, a DDPJob 12 times without progress"
        notes.append(Difference(field, why, "set restartPolicy.maxRestarts"))
    else:
        restarts["maxRestarts"] = limit
    if kind == "ExitCode":
        restarts["rules"] = [{"onExitCodes": {"operator": "In", "values": _PERMANENT}, "action": "Fail"}]
    return restarts


def _place(spec: Json, policy: Json, notes: list[Difference]) -> None:
    """Let the pods be placed together, in this queue and with this priority."""
    path = "spec.runPolicy.schedulingPolicy"
    least = policy.get("minAvailable")
    if least is not None and least >= (spec["minNodes"] or spec["numNodes"]):
        spec["scheduling"] = {"schedulingPolicy": {"gang": {}}}
    elif least is not None:
        why = "a DDPJob starts when all its pods have a Kubernetes node, or with fewer nodes by minNodes"
        notes.append(Difference(f"{path}.minAvailable", why, f"set minNodes: {least} if the script allows it"))
    own: Json = {"spec": present({"priorityClassName": policy.get("priorityClass")})}
    if policy.get("queue"):
        own["metadata"] = {"annotations": {names.ANNOTATION_VOLCANO_QUEUE: policy["queue"]}}
    spec["template"] = merge({key: value for key, value in own.items() if value}, spec.get("template", {}))
