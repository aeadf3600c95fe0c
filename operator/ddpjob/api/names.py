"""Every name, label, port, path and environment key that the operator, the chart and the trainer share.

One place, so that a reader finds what a string means and a change cannot miss a copy.
"""

from dataclasses import dataclass
from typing import Final

GROUP: Final = "ddpjob.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"


@dataclass(frozen=True)
class Resource:
    """A kind of object as the API server addresses it: ``/apis/<api_version>/…/<plural>``."""

    api_version: str
    kind: str
    plural: str

    @property
    def path_prefix(self) -> str:
        """``api/v1`` for the core group, ``apis/<group>/<version>`` for every other."""
        root = "api" if "/" not in self.api_version else "apis"
        return f"{root}/{self.api_version}"


DDPJOBS: Final = Resource(API_VERSION, "DDPJob", "ddpjobs")
PODS: Final = Resource("v1", "Pod", "pods")
SERVICES: Final = Resource("v1", "Service", "services")
CLAIMS: Final = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENTS: Final = Resource("v1", "Event", "events")

# A pod's name is also its hostname, so it must be one DNS label of at most 63 characters:
# <job>-<uid5>-<attempt>-<node_rank> leaves 45 for the job beside 1+5, 1+5 and 1+5.
MAX_JOB_NAME: Final = 45
MAX_NODES: Final = 4096
MAX_NPROC_PER_NODE: Final = 64

# Labels. Selectors and owner lookups use these alone; user templates cannot override them.
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "ddpjob-operator"
LABEL_JOB_NAME: Final = f"{GROUP}/job-name"
LABEL_JOB_UID: Final = f"{GROUP}/job-uid"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
LABEL_NODE_RANK: Final = f"{GROUP}/node-rank"
SELECTOR: Final = f"{LABEL_MANAGED_BY}={MANAGED_BY}"

TRAINER_CONTAINER: Final = "trainer"

DEFAULT_PORT: Final = 29500
PROGRESS_PORT: Final = 29501
DEFAULT_CHECKPOINT_PATH: Final = "/checkpoints"
DEFAULT_DATA_PATH: Final = "/data"

# What torchrun and the trainer read. RANK and WORLD_SIZE belong to torchrun and are never set here.
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

# Environment keys a user must not set: the operator owns them on every trainer container.
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
    """First five characters of the job's uid: tells a job from a deleted one of the same name."""
    return uid[:5]


def service_name(job: str, uid: str) -> str:
    """Name of the job's headless Service, also the subdomain of its pods."""
    return f"{job}-{uid5(uid)}"


def pod_name(job: str, uid: str, attempt: int, node_rank: int) -> str:
    """Name and hostname of one node's pod; a new attempt never waits for, or meets, an old one's pods."""
    return f"{job}-{uid5(uid)}-{attempt}-{node_rank}"


def claim_name(job: str) -> str:
    """Name of the claim made from ``checkpoint.claimTemplate``: without the uid, so a job made again finds it."""
    return f"{job}-checkpoints"


def master_address(job: str, uid: str, attempt: int, namespace: str, cluster_domain: str) -> str:
    """Fully qualified name of rank 0's pod (five dots beat ``ndots:5``, so the absolute lookup comes first)."""
    host = pod_name(job, uid, attempt, 0)
    return f"{host}.{service_name(job, uid)}.{namespace}.svc.{cluster_domain}"
