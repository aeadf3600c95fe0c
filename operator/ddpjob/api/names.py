"""Names, labels and environment keys that the operator, the chart and the trainer share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

GROUP: Final = "ddpjob.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"


@dataclass(frozen=True)
class Resource:
    """A kind of API object; its URL is ``/apis/<api_version>/…/<plural>``."""

    api_version: str
    kind: str
    plural: str

    def path(self, namespace: str | None = None) -> str:
        """Return the URL path of the objects of a namespace, or of all if None, without a leading slash."""
        root = "apis" if "/" in self.api_version else "api"
        place = f"namespaces/{namespace}/" if namespace else ""
        return f"{root}/{self.api_version}/{place}{self.plural}"


class Key(NamedTuple):
    """Namespace and name of a job: the element of the work queue and the argument of a reconcile."""

    namespace: str
    name: str


DDPJOBS: Final = Resource(API_VERSION, "DDPJob", "ddpjobs")
PODS: Final = Resource("v1", "Pod", "pods")
SERVICES: Final = Resource("v1", "Service", "services")
SECRETS: Final = Resource("v1", "Secret", "secrets")
CLAIMS: Final = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENTS: Final = Resource("v1", "Event", "events")
NETWORK_POLICIES: Final = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
DEPLOYMENTS: Final = Resource("apps/v1", "Deployment", "deployments")
LEASES: Final = Resource("coordination.k8s.io/v1", "Lease", "leases")

# PodGroups of the systems that place the pods of an attempt together (``engine.scheduling``).
VOLCANO_GROUPS: Final = Resource("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups")
COSCHEDULING_GROUPS: Final = Resource("scheduling.x-k8s.io/v1alpha1", "PodGroup", "podgroups")
KUBERNETES_GROUPS: Final = (
    Resource("scheduling.k8s.io/v1beta1", "PodGroup", "podgroups"),
    Resource("scheduling.k8s.io/v1alpha2", "PodGroup", "podgroups"),
)
"""Of Kubernetes 1.37 and of 1.36; the first that the API server serves is used."""
WORKLOADS: Final = Resource("kueue.x-k8s.io/v1beta2", "Workload", "workloads")
"""What a queue of Kueue admits: one object for all attempts of a job (``engine.scheduling.kueue``)."""
SCHEDULING_KINDS: Final = (VOLCANO_GROUPS, COSCHEDULING_GROUPS, *KUBERNETES_GROUPS, WORKLOADS)

# Objects of the whole cluster that a plan reads for a job in a queue.
FLAVORS: Final = Resource("kueue.x-k8s.io/v1beta2", "ResourceFlavor", "resourceflavors")
WORKLOAD_PRIORITIES: Final = Resource("kueue.x-k8s.io/v1beta2", "WorkloadPriorityClass", "workloadpriorityclasses")
POD_PRIORITIES: Final = Resource("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses")

LABEL_QUEUE: Final = "kueue.x-k8s.io/queue-name"
"""Label of a DDPJob: the LocalQueue that admits it."""
ANNOTATION_VOLCANO_QUEUE: Final = "scheduling.volcano.sh/queue-name"
"""Annotation of the pod template: the queue of Volcano."""
LABEL_QUEUE_PRIORITY: Final = "kueue.x-k8s.io/priority-class"
"""Label of a DDPJob: its WorkloadPriorityClass."""
LABELS_OF_QUEUES: Final = (LABEL_QUEUE, LABEL_QUEUE_PRIORITY)
"""The labels of a DDPJob that plans read. A change of them does not change the generation."""
LABEL_QUEUED_UID: Final = "kueue.x-k8s.io/job-uid"
QUEUE_GATE: Final = "kueue.x-k8s.io/admission"
"""Scheduling gate of pods that Kueue manages by itself."""

GARBAGE_COLLECTION: Final = frozenset({"orphan", "foregroundDeletion"})
"""Finalizers with which the garbage collector keeps or deletes what a deleted object owns, while that exists."""

# Labels used by selectors and lookups. User templates cannot override them.
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "ddpjob-operator"
CONTROLLER: Final = f"{GROUP}/operator"
"""Value of spec.managedBy for jobs of this operator."""
OPERATOR_SELECTOR: Final = "app.kubernetes.io/name=ddpjob,app.kubernetes.io/component=operator"
"""Labels of the Deployment of an operator, and of its pods."""
LABEL_JOB_NAME: Final = f"{GROUP}/job-name"
LABEL_JOB_UID: Final = f"{GROUP}/job-uid"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
LABEL_NODE_RANK: Final = f"{GROUP}/node-rank"
ANNOTATION_POD_SETS: Final = f"{GROUP}/pod-sets"
"""Of a Workload: the digest of what its podSets ask for."""
ANNOTATION_SUSPENDED: Final = f"{GROUP}/suspended"
"""Of a Workload: the operator set spec.active to false, because the job is suspended or left its queue.

The value is the number of the last attempt that uses the quota."""
ANNOTATION_HELD: Final = f"{GROUP}/held"
"""Of a Workload: why the job could not use an admission. It stays out of its queue until it has changed."""
ANNOTATIONS_OF_WORKLOADS: Final = (ANNOTATION_POD_SETS, ANNOTATION_SUSPENDED, ANNOTATION_HELD)
LABEL_PROBE: Final = f"{GROUP}/probe"
"""Of a pod that only asks the scheduler whether there is room for another node; it is of no attempt."""
ANNOTATION_PROGRESS_PORT: Final = f"{GROUP}/progress-port"
"""Of a pod of this machine: its DDPJOB_PROGRESS_PORT, which differs from the spec's."""
# The label that an object of each kind has if it is of this operator; a selector of a key alone means that the label
# exists. Not LABEL_MANAGED_BY, which other operators use, too. A claim has no uid: it outlives the job.
SELECTORS: Final[Mapping[Resource, str]] = {
    PODS: LABEL_JOB_UID,
    SERVICES: LABEL_JOB_UID,
    NETWORK_POLICIES: LABEL_JOB_UID,
    CLAIMS: LABEL_JOB_NAME,
    # Any user of a queue may remove the labels of a Workload, which would still keep its quota: all are listed.
    **dict.fromkeys((kind for kind in SCHEDULING_KINDS if kind is not WORKLOADS), LABEL_JOB_UID),
}

TRAINER_CONTAINER: Final = "trainer"
CHECKPOINT_VOLUME: Final = "ddpjob-checkpoint"
LAUNCHER: Final = "ddpjob-launcher"
"""Init container and volume of ``launcher: Injected``."""
LAUNCHER_PATH: Final = "/opt/ddpjob-launcher"
"""Where the trainer has that volume."""
ScriptLauncher = Literal["ddprun", "torchrun"]
"""What starts the processes of a script that is given in place of a job file."""
WORKDIR: Final = "ddpjob-workdir"
"""Init container and volume of a job that was submitted with its files."""
WORKDIR_PATH: Final = "/workdir"
"""Where the trainer has that volume, unless the job sets a working directory."""
LABEL_WORKDIR: Final = f"{GROUP}/workdir"
"""Label of a Secret with files for a job that does not own it yet."""

# Variables that torchrun and the trainer read.
ENV_MASTER_ADDR: Final = "MASTER_ADDR"
ENV_MASTER_PORT: Final = "MASTER_PORT"
ENV_NNODES: Final = "NNODES"
ENV_NODE_RANK: Final = "NODE_RANK"
ENV_NPROC_PER_NODE: Final = "NPROC_PER_NODE"
ENV_JOB_NAME: Final = "DDPJOB_NAME"
ENV_JOB_UID: Final = "DDPJOB_UID"
ENV_ATTEMPT: Final = "DDPJOB_ATTEMPT"
ENV_TOKEN: Final = "DDPJOB_TOKEN"  # noqa: S105 - a name
"""What only the pods of one attempt have in common (``engine.token``). Secret."""
ENV_CHECKPOINT_DIR: Final = "DDPJOB_CHECKPOINT_DIR"
ENV_DATA_DIR: Final = "DDPJOB_DATA_DIR"
ENV_PROGRESS_PORT: Final = "DDPJOB_PROGRESS_PORT"
ENV_LEADER_PORT: Final = "DDPJOB_LEADER_PORT"
"""The progress port of node 0; only in local mode, where each pod has another."""

# Variables of one process, which a launcher sets for each that it starts. With one process per node the operator sets
# them, too, for a program that no launcher starts. Not in OWNED_ENV: a user's own value has been needed until now.
ENV_RANK: Final = "RANK"
ENV_WORLD_SIZE: Final = "WORLD_SIZE"
ENV_LOCAL_RANK: Final = "LOCAL_RANK"
ENV_LOCAL_WORLD_SIZE: Final = "LOCAL_WORLD_SIZE"
ENV_RDZV_ID: Final = "PET_RDZV_ID"
"""torchrun's id of the run, in its temporary files and in TORCHELASTIC_RUN_ID; a user's own value is kept, too."""
ENV_INPLACE_RESTARTS: Final = "DDPJOB_INPLACE_RESTARTS"
"""How often the launchers may restart their processes in place; with a user's own value 0 they never do."""
ENV_STOP_GRACE: Final = "DDPJOB_STOP_GRACE"
"""Seconds that a launcher gives its processes after SIGTERM; a user's own value is kept."""
ENV_STARTUP_DEADLINE: Final = "DDPJOB_STARTUP_DEADLINE"
ENV_PROGRESS_DEADLINE: Final = "DDPJOB_PROGRESS_DEADLINE"
ENV_COMPLETION_GRACE: Final = "DDPJOB_COMPLETION_GRACE"
"""Seconds without a step after which the operator ends the attempt; launchers take the stacks before."""
ENV_ON_DIVERGENCE: Final = "DDPJOB_ON_DIVERGENCE"
"""restart: launchers end the attempt when the ranks have different parameters."""

_RENDEZVOUS_ENV: Final = (ENV_MASTER_ADDR, ENV_MASTER_PORT, ENV_NNODES, ENV_NODE_RANK, ENV_NPROC_PER_NODE)
# Environment keys that a user must not set: the operator sets them on every trainer container.
OWNED_ENV: Final = frozenset(
    {
        *_RENDEZVOUS_ENV,
        *(f"PET_{name}" for name in _RENDEZVOUS_ENV),
        "PET_MAX_RESTARTS",
        "PET_RDZV_CONF",
        ENV_JOB_NAME,
        ENV_JOB_UID,
        ENV_ATTEMPT,
        ENV_TOKEN,
        ENV_CHECKPOINT_DIR,
        ENV_DATA_DIR,
        ENV_PROGRESS_PORT,
    }
)


def service_name(job: str, uid: str) -> str:
    """Return the name of the job's headless Service, also the subdomain of its pods, and of its NetworkPolicy.

    Five characters of the uid separate it from that of a deleted job of the same name.
    """
    return f"{job}-{uid[:5]}"


def pod_name(job: str, uid: str, attempt: int, node_rank: int) -> str:
    """Return the name and hostname of a node's pod; the attempt in it keeps pods of different attempts apart."""
    return f"{service_name(job, uid)}-{attempt}-{node_rank}"


def probe_name(job: str, uid: str, attempt: int, node_rank: int) -> str:
    """Return the name of the pod that asks, during an attempt, for room for another node."""
    return f"{service_name(job, uid)}-{attempt}-probe-{node_rank}"


def group_name(job: str, uid: str, attempt: int) -> str:
    """Return the name of the PodGroup of an attempt."""
    return f"{service_name(job, uid)}-{attempt}"


def claim_name(job: str) -> str:
    """Return the name of the claim made from ``checkpoint.claimTemplate``.

    It has no uid in it, so a job that is created again with the same name uses the same claim.
    """
    return f"{job}-checkpoints"


def claim_place(claim: str, sub_path: str | None) -> str:
    """Return claim and directory of checkpoints as one text, equal for all jobs that save there."""
    return f"{claim}/{(sub_path or '').strip('/')}"


def workdir_name(job: str, digest: str) -> str:
    """Return the name of the Secret with files for a job. digest: of its content, in hexadecimal digits."""
    return f"{job}-workdir-{digest[:16]}"
