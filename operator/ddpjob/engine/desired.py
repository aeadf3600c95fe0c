"""Phase two of a reconcile: the objects one attempt needs, rendered from the spec.

Pods are rendered once per attempt and specialised per rank: 64 pods cost little more than one.
"""

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from ddpjob.api import names
from ddpjob.api.spec import IMMUTABLE, DDPJobSpec
from ddpjob.api.wire import Json
from ddpjob.engine.actions import Create, EngineSettings
from ddpjob.engine.merge import merge
from ddpjob.engine.template import render

_SHORT_FIELDS = ("image", "command", "args", "workingDir", "resources", "imagePullPolicy", "envFrom")
_DEFAULT_USER = 1000


@dataclass(frozen=True)
class Job:
    """A job with its spec parsed: what rendering and planning need to know of it."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: DDPJobSpec

    @classmethod
    def of(cls, body: Json, spec: DDPJobSpec) -> "Job":
        meta = body["metadata"]
        return cls(meta["name"], meta["namespace"], meta["uid"], int(meta.get("generation", 1)), spec)

    @property
    def service(self) -> str:
        return names.service_name(self.name, self.uid)

    @property
    def claim(self) -> str:
        """Name of the claim that the checkpoints are on; empty without checkpoints."""
        return self.spec.checkpoint.claim(self.name) if self.spec.checkpoint else ""

    @property
    def nproc_per_node(self) -> int:
        """Processes per node; ``auto`` is the sum of the trainer's ``*/gpu`` limits, else 1."""
        if isinstance(self.spec.nproc_per_node, int):
            return self.spec.nproc_per_node
        limits = _trainer_of(_template_spec(self)).get("resources", {}).get("limits", {})
        if self.spec.resources and self.spec.resources.limits:
            limits = {**limits, **self.spec.resources.limits}
        gpus = sum(int(n) for name, n in limits.items() if name.endswith("/gpu") and str(n).isdecimal())
        return max(gpus, 1)

    def master_address(self, attempt: int, settings: EngineSettings) -> str:
        return names.master_address(self.name, self.uid, attempt, self.namespace, settings.cluster_domain)


def spec_hash(spec: DDPJobSpec) -> str:
    """Digest of the immutable fields, including the parts of the template that CEL cannot see.

    Defaults do not count: a version that adds a field with a default must not find every live job changed.
    """
    wire = spec.model_dump(by_alias=True, exclude_none=True, exclude_defaults=True, mode="json")
    frozen = {name: wire[name] for name in IMMUTABLE if name in wire}
    return hashlib.sha256(json.dumps(frozen, sort_keys=True).encode()).hexdigest()[:16]


def owner_reference(job: Job) -> Json:
    """The controller reference by which the API server collects what a deleted job leaves."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.DDPJOBS.kind,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def job_labels(job: Job) -> dict[str, str]:
    """Labels of everything that belongs to the job."""
    return {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_JOB_NAME: job.name,
        names.LABEL_JOB_UID: job.uid,
    }


def desired_service(job: Job) -> Create:
    """The headless Service: one for the job, whatever the attempt."""
    body = render(
        "service.yaml.j2",
        service=job.service,
        namespace=job.namespace,
        labels=job_labels(job),
        owners=[owner_reference(job)],
        selector={names.LABEL_JOB_UID: job.uid},
        port=job.spec.rendezvous.port,
    )
    return Create(names.SERVICES, job.service, body)


def desired_claim(job: Job) -> Create | None:
    """The claim of ``checkpoint.claimTemplate``, or None where the user brings one (or none at all)."""
    checkpoint = job.spec.checkpoint
    if checkpoint is None or checkpoint.claim_template is None:
        return None
    delete = checkpoint.claim_retention == "Delete"
    body = render(
        "claim.yaml.j2",
        claim=job.claim,
        namespace=job.namespace,
        labels={names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_JOB_NAME: job.name},
        owners=[owner_reference(job)] if delete else [],
        spec=checkpoint.claim_template.wire()["spec"],
    )
    return Create(names.CLAIMS, job.claim, body, shared=True)


def desired_pods(job: Job, attempt: int, settings: EngineSettings) -> tuple[Create, ...]:
    """One pod per node of the attempt, rank 0 first in line."""
    first = _rank_zero(job, attempt, settings)
    return tuple(_specialised(first, job, attempt, rank) for rank in range(job.spec.num_nodes))


def trainer_environment(job: Job, attempt: int, settings: EngineSettings) -> list[dict[str, str]]:
    """The variables that place a node in the world; torchrun reads PET_* as defaults of its flags."""
    spec = job.spec
    values: dict[str, Any] = {
        names.ENV_MASTER_ADDR: job.master_address(attempt, settings),
        names.ENV_MASTER_PORT: spec.rendezvous.port,
        names.ENV_NNODES: spec.num_nodes,
        names.ENV_NODE_RANK: 0,
        names.ENV_NPROC_PER_NODE: job.nproc_per_node,
    }
    values |= {f"PET_{name}": value for name, value in values.items()}
    # The group restarts as a whole, never a worker alone; without the timeout in RDZV_CONF torchrun ignores ours.
    values |= {"PET_MAX_RESTARTS": 0, "PET_RDZV_CONF": f"timeout={spec.rendezvous.timeout_seconds}"}
    values |= {names.ENV_JOB_NAME: job.name, names.ENV_JOB_UID: job.uid, names.ENV_ATTEMPT: attempt}
    if spec.checkpoint:
        values[names.ENV_CHECKPOINT_DIR] = spec.checkpoint.mount_path
    if spec.data:
        values[names.ENV_DATA_DIR] = spec.data.mount_path
    values[names.ENV_PROGRESS_PORT] = names.PROGRESS_PORT
    return [{"name": name, "value": str(value)} for name, value in values.items()]


def _rank_zero(job: Job, attempt: int, settings: EngineSettings) -> Json:
    spec = job.spec
    wire = spec.wire()
    security = spec.pod_security
    defaults = render(
        "pod_defaults.yaml.j2",
        container=names.TRAINER_CONTAINER,
        profile=security.profile,
        run_as_user=_DEFAULT_USER,
        fs_group=_DEFAULT_USER,
    )
    owned = trainer_environment(job, attempt, settings)
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
        progress_port=names.PROGRESS_PORT,
        shm_limit=spec.shared_memory.size_limit,
        checkpoint={"subPath": None} | wire["checkpoint"] | {"claim": job.claim} if spec.checkpoint else None,
        data=wire.get("data"),
    )
    template = wire.get("template", {})
    # Labels and annotations alone: a finalizer in a template, say, would keep every pod from ever going away.
    metadata = {key: value for key, value in template.get("metadata", {}).items() if key in ("labels", "annotations")}
    pod = merge(merge(defaults, {"metadata": metadata, "spec": _template_spec(job)}), overlay)
    if pod["spec"].get("hostNetwork"):
        # Its default would ask the Kubernetes node's resolver, which does not know MASTER_ADDR.
        pod["spec"].setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    return _secured(_ordered(pod), defaults)


def _ordered(pod: Json) -> Json:
    """Trainer first among containers; owned variables first, so that ``$(NODE_RANK)`` works in the user's."""
    containers = sorted(pod["spec"]["containers"], key=lambda c: bool(c["name"] != names.TRAINER_CONTAINER))
    trainer = containers[0]
    trainer["env"] = sorted(trainer["env"], key=lambda variable: variable["name"] not in names.OWNED_ENV)
    pod["spec"]["containers"] = containers
    return pod


def _secured(pod: Json, defaults: Json) -> Json:
    """The trainer's security default under every container: one without it, and the namespace refuses the pod."""
    context = defaults["spec"]["containers"][0].get("securityContext")
    for kind in ("containers", "initContainers"):
        if context and (containers := pod["spec"].get(kind)):
            pod["spec"][kind] = [merge({"securityContext": context}, container) for container in containers]
    return pod


def _specialised(first: Json, job: Job, attempt: int, rank: int) -> Create:
    name = names.pod_name(job.name, job.uid, attempt, rank)
    if rank == 0:
        return Create(names.PODS, name, first)
    pod = copy.copy(first)
    labels = first["metadata"]["labels"] | {names.LABEL_NODE_RANK: str(rank)}
    pod["metadata"] = first["metadata"] | {"name": name, "labels": labels}
    trainer, *others = first["spec"]["containers"]
    env = [_node_rank(variable, rank) for variable in trainer["env"]]
    pod["spec"] = first["spec"] | {"hostname": name, "containers": [trainer | {"env": env}, *others]}
    return Create(names.PODS, name, pod)


def _node_rank(variable: Json, rank: int) -> Json:
    if variable["name"] in (names.ENV_NODE_RANK, f"PET_{names.ENV_NODE_RANK}"):
        return {"name": variable["name"], "value": str(rank)}
    return variable


def _template_spec(job: Job) -> Json:
    spec: Json = job.spec.wire().get("template", {}).get("spec", {})
    return spec


def _trainer_of(pod_spec: Json) -> Json:
    for container in pod_spec.get("containers", []):
        if container.get("name") == names.TRAINER_CONTAINER:
            return dict(container)
    return {}
