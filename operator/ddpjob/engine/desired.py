"""The objects that an attempt needs, rendered from the spec.

The pod of node 0 is rendered; the other nodes' pods are copies with their own name, hostname, label and NODE_RANK, so
64 pods take little longer than one.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeGuard

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, element, value_at
from ddpjob.api.spec import OPEN_PARTS, DDPJobSpec, parse_spec
from ddpjob.api.status import AvoidedNode
from ddpjob.engine.actions import Create, EngineSettings
from ddpjob.engine.injection import with_launcher
from ddpjob.engine.merge import merge
from ddpjob.engine.template import render

_SHORT_FIELDS = ("image", "command", "args", "workingDir", "resources", "imagePullPolicy", "envFrom")
_DEFAULT_USER = 1000
_DEFAULT_GRACE_SECONDS = 30  # of Kubernetes
_LAUNCHER_SECONDS = 5  # of the grace, for the launcher's own end
# Asks service meshes for no sidecar: it would run on after the trainer, and encrypt what NCCL or gloo send.
_NO_SIDECAR = {"sidecar.istio.io/inject": "false", "linkerd.io/inject": "disabled"}
_ISTIO_LABEL = "sidecar.istio.io/inject"
# Changes whenever spec_hash hashes other parts, or in another way.
_HASH_FORM = "v4:"
# Kinds of volumes that belong to one pod, or that it cannot write.
_PRIVATE_VOLUMES = {"emptyDir", "ephemeral", "configMap", "secret", "downwardAPI", "projected", "image"}
# The variables that differ between the nodes of an attempt; the value is the node_rank.
_ENV_OF_NODE = frozenset({names.ENV_NODE_RANK, f"PET_{names.ENV_NODE_RANK}"})


@dataclass(frozen=True)
class Job:
    """A job with its parsed spec, as rendering and planning use it.

    nodes: of the attempt: numNodes, or fewer (``elastic``).
    stored_spec: the same spec as stored. created: when the job was created.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    spec: DDPJobSpec
    nodes: int
    stored_spec: Json = field(default_factory=dict, repr=False, compare=False)
    created: str | None = None

    @classmethod
    def of(cls, body: Json) -> "Job":
        """Return the job of an API object; fields of the spec that this release does not know are ignored.

        Raises:
            pydantic.ValidationError: the spec breaks a rule.
        """
        meta, spec = body["metadata"], parse_spec(body, ignore_unknown=True)
        generation = int(meta.get("generation", 1))
        place, created = (meta["name"], meta["namespace"], meta["uid"]), meta.get("creationTimestamp")
        return cls(*place, generation, spec, spec.num_nodes, body["spec"], created)

    @cached_property
    def wire(self) -> Json:
        """The spec as JSON. Pods share parts of it, so it must not be changed."""
        return self.spec.wire()

    @cached_property
    def spec_hash(self) -> str:
        """``spec_hash`` of the stored spec."""
        return spec_hash(self.stored_spec)

    @property
    def template_spec(self) -> Json:
        """The pod spec of the user's template; empty without one."""
        spec: Json = self.wire.get("template", {}).get("spec", {})
        return spec

    @property
    def node_ranks(self) -> range:
        """The ranks of the nodes of an attempt: from 0."""
        return range(self.nodes)

    def of_size(self, nodes: int) -> "Job":
        """Return the job with an attempt of this number of nodes."""
        return self if nodes == self.nodes else replace(self, nodes=nodes)

    @property
    def service(self) -> str:
        return names.service_name(self.name, self.uid)

    @property
    def claim(self) -> str:
        """Name of the claim that holds the checkpoints; empty without checkpoints."""
        return self.spec.checkpoint.claim(self.name) if self.spec.checkpoint else ""

    @cached_property
    def writes_volume(self) -> bool:
        """Whether the pods can write to a volume that pods of another attempt have, too."""
        if self.spec.checkpoint is not None:
            return True
        spec = self.template_spec
        shared = {volume["name"] for volume in spec.get("volumes") or () if _is_shared(volume)}
        containers = (each for kind in ("initContainers", "containers") for each in spec.get(kind) or ())
        mounts = (mount for container in containers for mount in container.get("volumeMounts") or ())
        return any(mount.get("name") in shared and mount.get("readOnly") is not True for mount in mounts)

    @property
    def grace_seconds(self) -> int:
        """Seconds between SIGTERM and SIGKILL of a pod."""
        given = self.template_spec.get("terminationGracePeriodSeconds")
        return _DEFAULT_GRACE_SECONDS if given is None else int(given)

    @property
    def nproc_per_node(self) -> int:
        """Processes per node; ``auto`` is one per device of the trainer, at least 1."""
        given = self.spec.nproc_per_node
        return given if isinstance(given, int) else max(self.spec.devices_per_node, 1)

    def master_address(self, attempt: int, settings: EngineSettings) -> str:
        """Return the fully qualified name of rank 0's pod.

        It has five dots, so a resolver with ``ndots:5`` looks up the absolute name first.
        """
        host = names.pod_name(self.name, self.uid, attempt, 0)
        return f"{host}.{self.service}.{self.namespace}.svc.{settings.cluster_domain}"


def spec_hash(spec: Json) -> str:
    """Return the digest of the parts of a stored spec that CEL transition rules cannot compare.

    It reads the JSON and no model, and these parts have no defaults, so that neither a new field nor a changed default
    of another release changes the digest. A null is left out, because the API server drops it once a schema declares
    the field.
    """
    given = {".".join(path): part for path in OPEN_PARTS if (part := value_at(spec, path)) is not None}
    text = json.dumps(given, sort_keys=True)
    if "null" in text:  # otherwise a large spec need not be copied
        text = json.dumps(_without_nulls(given), sort_keys=True)
    return _HASH_FORM + hashlib.sha256(text.encode()).hexdigest()[:16]


def is_comparable(recorded: str | None) -> TypeGuard[str]:
    """Return whether ``spec_hash`` of this release made the recorded digest; another release may hash other parts."""
    return recorded is not None and recorded.startswith(_HASH_FORM)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _is_shared(volume: Json) -> bool:
    sources = {kind: source for kind, source in volume.items() if isinstance(source, dict)}
    is_read_only = any(source.get("readOnly") is True for source in sources.values())
    return bool(sources) and not (is_read_only or _PRIVATE_VOLUMES & sources.keys())


def owner_reference(job: Job) -> Json:
    """Return the controller reference, by which the API server deletes the objects of a deleted job."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.DDPJOBS.kind,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def job_labels(job: Job) -> dict[str, str]:
    """Return the labels of all objects of the job."""
    return {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_JOB_NAME: job.name,
        names.LABEL_JOB_UID: job.uid,
    }


def owned_object(
    job: Job, kind: Resource, name: str, spec: Json, *, labels: Json | None = None, annotations: Json | None = None
) -> Create:
    """Return an object of another system that goes with the job. labels: beside those of all objects of the job."""
    meta: Json = {"name": name, "namespace": job.namespace, "labels": job_labels(job) | (labels or {})}
    meta |= {"annotations": annotations} if annotations else {}
    meta["ownerReferences"] = [owner_reference(job)]
    return Create(kind, name, {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": spec})


def desired_claim(job: Job) -> Create | None:
    """Return the claim of ``checkpoint.claimTemplate``, or None if the job has no such template."""
    checkpoint = job.spec.checkpoint
    if checkpoint is None or checkpoint.claim_template is None:
        return None
    body = render(
        "claim.yaml.j2",
        claim=job.claim,
        namespace=job.namespace,
        labels={names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_JOB_NAME: job.name},
        owners=[owner_reference(job)] if checkpoint.claim_retention == "Delete" else [],
        spec=checkpoint.claim_template.wire()["spec"],
    )
    return Create(names.CLAIMS, job.claim, body, shared=True)


_PODS_BEFORE_OTHERS = 8
"""More pods are not created before the Service: a name that a container asks for too early is not found, and DNS
servers keep this answer for some seconds."""


@dataclass(frozen=True, eq=False)
class DesiredPods(Sequence[Create]):
    """The pods of an attempt, in the order of ``node_ranks``, each rendered when it is read.

    first: the pod of node 0. beside: other objects that are created together with the pods; they follow the first
    ``_PODS_BEFORE_OTHERS`` pods.
    """

    job: Job
    attempt: int
    first: Json
    node_ranks: Sequence[int]
    beside: Sequence[Create] = ()

    def __len__(self) -> int:
        return len(self.node_ranks) + len(self.beside)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        place = range(len(self))[index]
        start = min(len(self.node_ranks), _PODS_BEFORE_OTHERS)
        if start <= place < start + len(self.beside):
            return self.beside[place - start]
        node_rank = self.node_ranks[place if place < start else place - len(self.beside)]
        return _pod_of_node(self.first, self.job, self.attempt, node_rank)


def desired_pods(
    job: Job,
    attempt: int,
    settings: EngineSettings,
    node_ranks: Sequence[int] | None = None,
    *,
    beside: Sequence[Create] = (),
    avoid: Sequence[AvoidedNode] = (),
    granted: int = 0,
    token: str = "",
    dress: Callable[[Json], Json] = lambda pod: pod,
) -> DesiredPods:
    """Return one pod for each of ``node_ranks``, by default for all nodes of the attempt, in this order.

    avoid: Kubernetes nodes on which they must not run, or if those were only slow, run only without a better one.
    granted: restarts in place. token: of the attempt (``engine.token``).
    dress: returns the pod of node 0 as the systems need it that place the pods.
    """
    ranks = job.node_ranks if node_ranks is None else node_ranks
    first = _pod_of_node_0(job, attempt, settings, granted, token)
    if avoid:
        first["spec"]["affinity"] = _affinity_without(first["spec"].get("affinity") or {}, avoid)
    return DesiredPods(job, attempt, dress(first), ranks, beside)


_NOT_FOR_PROBES = frozenset({"args", "env", "envFrom", "lifecycle", "volumeMounts", "workingDir"})
_GROUP_MARKS = frozenset({"scheduling.k8s.io/group-name", "scheduling.x-k8s.io/pod-group"})


def desired_probes(first: Json, job: Job, attempt: int, node_ranks: Iterable[int]) -> tuple[Create, ...]:
    """Return pods that need the same room as the pod of node 0, and end at once wherever they are placed.

    first: the pod of node 0 as it is created. A probe keeps what the scheduler reads, and is in no group of pods. A
    program named ``true`` that the image does not have makes no difference: the pod was placed.
    """
    spec = {
        key: value for key, value in first["spec"].items() if key not in ("hostname", "subdomain", "schedulingGroup")
    }
    spec |= {"terminationGracePeriodSeconds": 1}
    for kind in ("containers", "initContainers"):
        if given := spec.get(kind):
            spec[kind] = [
                {key: value for key, value in each.items() if key not in _NOT_FOR_PROBES and not key.endswith("Probe")}
                | {"command": ["true"]}
                for each in given
            ]
    meta = first["metadata"]
    gone = _GROUP_MARKS | {names.LABEL_ATTEMPT, names.LABEL_NODE_RANK}
    for kind in ("labels", "annotations"):
        meta = meta | {kind: {key: value for key, value in (meta.get(kind) or {}).items() if key not in gone}}
    meta["labels"][names.LABEL_PROBE] = "true"
    found = (names.probe_name(job.name, job.uid, attempt, rank) for rank in node_ranks)
    return tuple(
        Create(names.PODS, name, first | {"metadata": meta | {"name": name}, "spec": spec}, optional=True)
        for name in found
    )


def _affinity_without(affinity: Json, nodes: Sequence[AvoidedNode]) -> Json:
    """Return the affinity with a requirement against these nodes in every term, because the terms are alternatives.

    Nodes that were slow are only the last choice: a slow node is better than none.

    A nodeSelectorTerm matches the field ``metadata.name`` only with one value per requirement.
    https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#NodeSelector
    """
    of_nodes = dict(affinity.get("nodeAffinity") or {})
    required: Json = of_nodes.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    others, faster = (
        [
            {"key": "metadata.name", "operator": "NotIn", "values": [node.node_name]}
            for node in nodes
            if node.is_slow is is_slow
        ]
        for is_slow in (False, True)
    )
    if others:
        given: Iterable[Json] = required.get("nodeSelectorTerms") or ({},)
        terms = [term | {"matchFields": [*(term.get("matchFields") or ()), *others]} for term in given]
        of_nodes |= {"requiredDuringSchedulingIgnoredDuringExecution": required | {"nodeSelectorTerms": terms}}
    if faster:
        name = "preferredDuringSchedulingIgnoredDuringExecution"
        of_nodes |= {name: [*(of_nodes.get(name) or ()), {"weight": 100, "preference": {"matchFields": faster}}]}
    return affinity | {"nodeAffinity": of_nodes}


def trainer_environment(job: Job, attempt: int, settings: EngineSettings) -> list[dict[str, str]]:
    """Return the trainer's variables for node 0; torchrun reads PET_* as defaults of its flags."""
    spec = job.spec
    values: dict[str, Any] = {
        names.ENV_MASTER_ADDR: job.master_address(attempt, settings),
        names.ENV_MASTER_PORT: spec.rendezvous.port,
        names.ENV_NNODES: job.nodes,
        names.ENV_NODE_RANK: 0,
        names.ENV_NPROC_PER_NODE: job.nproc_per_node,
    }
    values |= {f"PET_{name}": value for name, value in values.items()}
    # torchrun must not restart workers by itself, and it reads the rendezvous timeout only from RDZV_CONF.
    values |= {"PET_MAX_RESTARTS": 0, "PET_RDZV_CONF": f"timeout={spec.rendezvous.timeout_seconds}"}
    values |= {names.ENV_JOB_NAME: job.name, names.ENV_JOB_UID: job.uid, names.ENV_ATTEMPT: attempt}
    if spec.checkpoint:
        values[names.ENV_CHECKPOINT_DIR] = spec.checkpoint.mount_path
    if spec.data:
        values[names.ENV_DATA_DIR] = spec.data.mount_path
    values[names.ENV_PROGRESS_PORT] = spec.rendezvous.progress_port
    return [{"name": name, "value": str(value)} for name, value in values.items()]


def overridden_fields(job: Job) -> list[str]:
    """Return the paths of the fields of the user's template whose values the operator replaces."""
    spec, root = job.template_spec, "spec.template.spec"
    fields = [f"{root}.{field}" for field in ("hostname", "subdomain") if field in spec]
    if spec.get("restartPolicy", "Never") != "Never":
        fields.append(f"{root}.restartPolicy")
    env = element(spec.get("containers"), "name", names.TRAINER_CONTAINER).get("env") or ()
    own = [variable["name"] for variable in env if variable["name"] in names.OWNED_ENV]
    return [*fields, *(f"{root}.containers[name={names.TRAINER_CONTAINER}].env[name={name}]" for name in own)]


def _default_environment(job: Job, attempt: int, granted: int) -> dict[str, str]:
    """Return the variables that the user's ``env`` overrides.

    Those of the only process of a node, unless a launcher must start several; torchrun overwrites them. What a launcher
    gives its processes of the grace: in the rest it reports how they ended. And the deadlines that end an attempt
    without a step, as they are when it starts.
    """
    spec, grace = job.spec, job.grace_seconds
    given = {
        names.ENV_RDZV_ID: f"{job.uid}-{attempt}",
        names.ENV_STOP_GRACE: max(1, grace // 2, grace - _LAUNCHER_SECONDS),
        names.ENV_INPLACE_RESTARTS: granted,
        names.ENV_STARTUP_DEADLINE: spec.startup_deadline_seconds,
        names.ENV_PROGRESS_DEADLINE: spec.progress_deadline_seconds,
        names.ENV_COMPLETION_GRACE: spec.completion_grace_seconds if spec.success_policy == "AllNodes" else None,
        names.ENV_ON_DIVERGENCE: "restart" if spec.on_divergence == "Restart" else None,
    }
    if job.nproc_per_node == 1:
        of_process = {names.ENV_WORLD_SIZE: job.nodes, names.ENV_LOCAL_RANK: 0, names.ENV_LOCAL_WORLD_SIZE: 1}
        given = {names.ENV_RANK: f"$({names.ENV_NODE_RANK})"} | of_process | given  # the kubelet inserts the value
    return {name: str(value) for name, value in given.items() if value is not None}


def _pod_of_node_0(job: Job, attempt: int, settings: EngineSettings, granted: int, token: str) -> Json:
    spec = job.spec
    wire = job.wire
    security = spec.pod_security
    defaults = render(
        "pod_defaults.yaml.j2",
        container=names.TRAINER_CONTAINER,
        profile=security.profile,
        run_as_user=_DEFAULT_USER,
        fs_group=_DEFAULT_USER,
        process_env=_default_environment(job, attempt, granted),
    )
    template = wire.get("template", {})
    _ask_for_no_sidecar(defaults["metadata"], template.get("metadata", {}))
    owned = trainer_environment(job, attempt, settings)
    owned += [{"name": names.ENV_TOKEN, "value": token}] if token else []
    overlay = render(
        "pod.yaml.j2",
        pod=names.pod_name(job.name, job.uid, attempt, 0),
        service=job.service,
        namespace=job.namespace,
        labels=job_labels(job) | {names.LABEL_ATTEMPT: str(attempt), names.LABEL_NODE_RANK: "0"},
        owners=[owner_reference(job)],
        container=names.TRAINER_CONTAINER,
        profile=security.profile,
        run_as_user=security.run_as_user,
        fs_group=security.fs_group,
        pull_secrets=wire.get("imagePullSecrets"),
        env=[*wire.get("env", []), *owned],
        short={key: wire[key] for key in _SHORT_FIELDS if key in wire},
        port=spec.rendezvous.port,
        progress_port=spec.rendezvous.progress_port,
        shm_limit=spec.shared_memory.size_limit,
        checkpoint={"subPath": None} | wire["checkpoint"] | {"claim": job.claim} if spec.checkpoint else None,
        data=wire.get("data"),
    )
    # Only labels and annotations: a finalizer in the template, for example, would block the deletion of every pod.
    metadata = {key: value for key, value in template.get("metadata", {}).items() if key in ("labels", "annotations")}
    pod = merge(merge(defaults, {"metadata": metadata, "spec": job.template_spec}), overlay)
    if pod["spec"].get("hostNetwork"):
        # The default policy uses the resolver of the Kubernetes node, which cannot resolve MASTER_ADDR.
        pod["spec"].setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    pod = _ordered(pod)
    if spec.launcher is not None:
        pod = with_launcher(pod, settings.launcher_image, settings.launcher_pull_policy)
    return _secured(pod, defaults)


def _ask_for_no_sidecar(defaults: Json, given: Json) -> None:
    """Add the annotations and the label that injectors read, unless the user's metadata has the key in one of both."""
    keys = {*given.get("labels", {}), *given.get("annotations", {})}
    asked = {key: value for key, value in _NO_SIDECAR.items() if key not in keys}
    defaults["annotations"] |= asked
    if _ISTIO_LABEL in asked:  # Istio's webhook is not called for a pod with this label, also while it is down
        defaults["labels"] = {_ISTIO_LABEL: asked[_ISTIO_LABEL]}


def _ordered(pod: Json) -> Json:
    """Put the trainer first, and the operator's variables first, so that the user's can refer to ``$(NODE_RANK)``."""
    containers = sorted(pod["spec"]["containers"], key=lambda c: bool(c["name"] != names.TRAINER_CONTAINER))
    trainer = containers[0]
    trainer["env"] = sorted(trainer["env"], key=lambda variable: variable["name"] not in names.OWNED_ENV)
    pod["spec"]["containers"] = containers
    return pod


def _secured(pod: Json, defaults: Json) -> Json:
    """Apply the trainer's security default to every container; a namespace refuses a pod if one lacks it."""
    context = defaults["spec"]["containers"][0].get("securityContext")
    for kind in ("containers", "initContainers"):
        if context and (containers := pod["spec"].get(kind)):
            pod["spec"][kind] = [merge({"securityContext": context}, container) for container in containers]
    return pod


def _pod_of_node(first: Json, job: Job, attempt: int, node_rank: int) -> Create:
    name = names.pod_name(job.name, job.uid, attempt, node_rank)
    if node_rank == 0:
        return Create(names.PODS, name, first)
    pod = copy.copy(first)
    labels = first["metadata"]["labels"] | {names.LABEL_NODE_RANK: str(node_rank)}
    pod["metadata"] = first["metadata"] | {"name": name, "labels": labels}
    trainer, *others = first["spec"]["containers"]
    own = {"value": str(node_rank)}
    env = [variable | own if variable["name"] in _ENV_OF_NODE else variable for variable in trainer["env"]]
    pod["spec"] = first["spec"] | {"hostname": name, "containers": [trainer | {"env": env}, *others]}
    return Create(names.PODS, name, pod)
