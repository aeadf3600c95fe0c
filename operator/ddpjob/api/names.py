"""Names, labels, ports, paths, limits and environment keys that the operator, the chart and the trainer share."""

from dataclasses import dataclass
from typing import Final

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


DDPJOBS: Final = Resource(API_VERSION, "DDPJob", "ddpjobs")
PODS: Final = Resource("v1", "Pod", "pods")
SERVICES: Final = Resource("v1", "Service", "services")
CLAIMS: Final = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENTS: Final = Resource("v1", "Event", "events")

# A pod's name is also its hostname, so it must be one DNS label of at most 63 characters:
# <job>-<uid5>-<attempt>-<node_rank> leaves 45 for the job: the other three parts take up to 1 + 5 each.
MAX_JOB_NAME: Final = 45
MAX_NODES: Final = 4096
MAX_NPROC_PER_NODE: Final = 64

# Labels used by selectors and lookups. User templates cannot override them.
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "ddpjob-operator"
LABEL_JOB_NAME: Final = f"{GROUP}/job-name"
LABEL_JOB_UID: Final = f"{GROUP}/job-uid"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
LABEL_NODE_RANK: Final = f"{GROUP}/node-rank"
SELECTOR: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"

TRAINER_CONTAINER: Final = "trainer"

DEFAULT_NUM_NODES: Final = 1
DEFAULT_MAX_RESTARTS: Final = 3
DEFAULT_PORT: Final = 29500
PROGRESS_PORT: Final = 29501
DEFAULT_CHECKPOINT_PATH: Final = "/checkpoints"
DEFAULT_DATA_PATH: Final = "/data"

# Variables that torchrun and the trainer read. torchrun itself sets RANK and WORLD_SIZE.
ENV_MASTER_ADDR: Final = "MASTER_ADDR"
ENV_MASTER_PORT: Final = "MASTER_PORT"
ENV_NNODES: Final = "NNODES"
ENV_NODE_RANK: Final = "NODE_RANK"
ENV_NPROC_PER_NODE: Final = "NPROC_PER_NODE"
ENV_JOB_NAME: Final = "DDPJOB_NAME"
ENV_JOB_UID: Final = "DDPJOB_UID"
ENV_ATTEMPT: Final = "DDPJOB_ATTEMPT"
ENV_CHECKPOINT_DIR: Final = "DDPJOB_CHECKPOINT_DIR"
ENV_DATA_DIR: Final = "DDPJOB_DATA_DIR"
ENV_PROGRESS_PORT: Final = "DDPJOB_PROGRESS_PORT"

# Environment keys that a user must not set: the operator sets them on every trainer container.
OWNED_ENV: Final = frozenset(
    {
        ENV_MASTER_ADDR,
        ENV_MASTER_PORT,
        ENV_NNODES,
        ENV_NODE_RANK,
        ENV_NPROC_PER_NODE,
        "PET_NNODES",
        "PET_NODE_RANK",
        "PET_NPROC_PER_NODE",
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        "PET_MAX_RESTARTS",
        "PET_RDZV_CONF",
        ENV_JOB_NAME,
        ENV_JOB_UID,
        ENV_ATTEMPT,
        ENV_CHECKPOINT_DIR,
        ENV_DATA_DIR,
        ENV_PROGRESS_PORT,
    }
)


def uid5(uid: str) -> str:
    """Return the first five characters of the job's uid, which separate it from a deleted job of the same name."""
    return uid[:5]


def service_name(job: str, uid: str) -> str:
    """Return the name of the job's headless Service, which is also the subdomain of its pods."""
    return f"{job}-{uid5(uid)}"


def pod_name(job: str, uid: str, attempt: int, node_rank: int) -> str:
    """Return the name and hostname of a node's pod; the attempt in it keeps pods of different attempts apart."""
    return f"{job}-{uid5(uid)}-{attempt}-{node_rank}"


def claim_name(job: str) -> str:
    """Return the name of the claim made from ``checkpoint.claimTemplate``.

    It has no uid in it, so a job that is created again with the same name uses the same claim.
    """
    return f"{job}-checkpoints"


def master_address(job: str, uid: str, attempt: int, namespace: str, cluster_domain: str) -> str:
    """Return the fully qualified name of rank 0's pod.

    It has five dots, so a resolver with ``ndots:5`` looks up the absolute name first.
    """
    host = pod_name(job, uid, attempt, 0)
    return f"{host}.{service_name(job, uid)}.{namespace}.svc.{cluster_domain}"
