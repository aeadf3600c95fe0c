"""The spec of a DDPJob: the one source of the CRD's schema, of its CEL rules and of the checks in Python.

Every rule stands twice, as CEL for the API server and as a validator here; tests/api and tests/cluster hold
the two to the same verdict. Descriptions are the docstrings below each field (``kubectl explain ddpjob.spec``).
"""

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from ddpjob.api import names
from ddpjob.api.model import ApiModel, Rule
from ddpjob.api.pods import (
    EnvFromSource,
    EnvVar,
    Image,
    LocalReference,
    LongText,
    MountPath,
    PodTemplate,
    PullPolicy,
    Quantity,
    Resources,
)
from ddpjob.api.volumes import Checkpoint, Data

DAY = 86_400
YEAR = 365 * DAY

_NPROC_MESSAGE = f"must be auto or a number from 1 to {names.MAX_NPROC_PER_NODE}"


def _nproc(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("nproc_type", _NPROC_MESSAGE)
    if not (1 <= value <= names.MAX_NPROC_PER_NODE if isinstance(value, int) else value == "auto"):
        raise ValueError(_NPROC_MESSAGE)
    return value


NprocPerNode = Annotated[
    int | str,
    BeforeValidator(_nproc),
    Field(
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "x-kubernetes-validations": [
                {
                    "rule": f"type(self) == int ? self >= 1 && self <= {names.MAX_NPROC_PER_NODE} : self == 'auto'",
                    "message": _NPROC_MESSAGE,
                }
            ],
        }
    ),
]
Seconds = Annotated[int, Field(ge=1, le=YEAR)]


class Rendezvous(ApiModel):
    """How the nodes find each other: static, through rank 0's address."""

    rules: ClassVar = (
        Rule(
            f"self.port != {names.PROGRESS_PORT}",
            f"port must not be {names.PROGRESS_PORT}: rank 0 serves its progress there",
        ),
    )

    port: Annotated[int, Field(ge=1024, le=65535)] = names.DEFAULT_PORT
    """Port on rank 0 that all ranks meet at (MASTER_PORT)."""
    timeout_seconds: Annotated[int, Field(ge=10, le=DAY)] = 600
    """Seconds a rank waits for the others before it gives up."""

    @model_validator(mode="after")
    def _free_of_progress_port(self) -> Self:
        if self.port == names.PROGRESS_PORT:
            raise ValueError(self.rules[0].message)
        return self


class SharedMemory(ApiModel):
    """/dev/shm of the trainer: memory-backed, because the 64 MiB default kills data loaders with a bus error."""

    size_limit: Quantity | None = None
    """Upper bound, for example `2Gi`; the container's memory limit bounds it in any case."""


class PodSecurity(ApiModel):
    """Security context of the pods."""

    rules: ClassVar = (
        Rule(
            "self.profile != 'Restricted' || !has(self.runAsUser) || self.runAsUser != 0",
            "runAsUser 0 is root: the Restricted profile forbids it; set profile: Baseline to run as root",
        ),
    )

    profile: Literal["Restricted", "Baseline", "Unset"] = "Restricted"
    """Restricted: Kubernetes' Pod Security level. Baseline: the seccomp default. Unset: nothing but the ids below."""
    run_as_user: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """User id of the trainer; 1000 under Restricted when absent."""
    fs_group: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Group that owns mounted volumes; 1000 under Restricted when absent."""

    @model_validator(mode="after")
    def _restricted_is_not_root(self) -> Self:
        if self.profile == "Restricted" and self.run_as_user == 0:
            raise ValueError(self.rules[0].message)
        return self


class RestartPolicy(ApiModel):
    """What happens when an attempt fails: the whole group starts again from the last checkpoint."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """Restarts of the group before the job fails."""


# Named by their fields in the CRD; changing one on a live job would train two programs as one.
IMMUTABLE = (
    "image",
    "command",
    "args",
    "env",
    "envFrom",
    "workingDir",
    "resources",
    "imagePullPolicy",
    "imagePullSecrets",
    "template",
    "numNodes",
    "nprocPerNode",
    "rendezvous",
    "sharedMemory",
    "podSecurity",
    "checkpoint",
    "data",
)


# At spec level with has(): a rule on the field itself would let it be added and removed.
_IMMUTABLE_RULES = {
    name: Rule(
        f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})",
        f"{name} is immutable: delete the job and apply it again to change it (its checkpoints stay)",
    )
    for name in IMMUTABLE
}


_OWNED = "[" + ", ".join(f"'{name}'" for name in sorted(names.OWNED_ENV)) + "]"
_OWNED_MESSAGE = (
    "env must not set the variables that the operator owns (MASTER_ADDR, MASTER_PORT, NNODES, NODE_RANK, "
    "NPROC_PER_NODE, their PET_ twins and DDPJOB_*): use numNodes, nprocPerNode, rendezvous, checkpoint, data"
)
_IMAGE_MESSAGE = "image is required: set spec.image, or template.spec.containers[name=trainer].image"
_CLAIMS_MESSAGE = (
    "nprocPerNode must be a number when the template has resourceClaims: the operator can't count their devices"
)
_PATHS_MESSAGE = "checkpoint.mountPath and data.mountPath must differ"


def _defaulted(model: type[ApiModel]) -> Any:
    # The whole object, not {}: the API server holds a default against the rules before it fills in nested ones.
    return Field(default_factory=model, json_schema_extra={"default": model().wire()})


class DDPJobSpec(ApiModel):
    """One data-parallel training on numNodes pods."""

    rules: ClassVar = (
        Rule(
            "has(self.image) || (has(self.template) && has(self.template.spec) && has(self.template.spec.containers)"
            " && self.template.spec.containers.exists(c, c.name == 'trainer' && has(c.image)))",
            _IMAGE_MESSAGE,
        ),
        Rule(f"!has(self.env) || !self.env.exists(e, e.name in {_OWNED})", _OWNED_MESSAGE),
        Rule(
            "!has(self.env) || !self.env.exists(e, has(e.value) && has(e.valueFrom))",
            "env: an entry has either value or valueFrom, not both",
        ),
        Rule(
            "self.nprocPerNode != 'auto' || !has(self.template) || !has(self.template.spec)"
            " || !has(self.template.spec.resourceClaims) || size(self.template.spec.resourceClaims) == 0",
            _CLAIMS_MESSAGE,
        ),
        Rule(
            "!has(self.checkpoint) || !has(self.data) || self.checkpoint.mountPath != self.data.mountPath",
            _PATHS_MESSAGE,
        ),
        *_IMMUTABLE_RULES.values(),
    )

    image: Image | None = None
    """Image of the trainer. Any image with torchrun in it works."""
    command: Annotated[list[LongText], Field(max_length=256)] | None = None
    """Entrypoint of the trainer instead of the image's, for example `[torchrun, train.py]`."""
    args: Annotated[list[LongText], Field(max_length=256)] | None = None
    """Arguments of the entrypoint, for example `[train, --epochs, "3"]`."""
    env: Annotated[list[EnvVar], Field(max_length=512)] | None = None
    """Environment variables of the trainer."""
    env_from: Annotated[list[EnvFromSource], Field(max_length=64)] | None = None
    """ConfigMaps and Secrets whose keys become environment variables of the trainer."""
    working_dir: MountPath | None = None
    """Working directory of the trainer; the image's when absent."""
    resources: Resources | None = None
    """Compute resources of each node's trainer, all its processes together."""
    image_pull_policy: PullPolicy | None = None
    """When the image is pulled; Kubernetes' default when absent."""
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=16)] | None = None
    """Secrets for pulling the image."""
    template: PodTemplate | None = None
    """A whole pod template, for what the short fields do not cover; container `trainer` is the one that trains."""
    num_nodes: Annotated[int, Field(ge=1, le=names.MAX_NODES)] = 1
    """Number of nodes: one pod each."""
    nproc_per_node: NprocPerNode = "auto"
    """Processes per node; `auto` is the trainer's GPU limit, or 1 without GPUs."""
    rendezvous: Rendezvous = _defaulted(Rendezvous)
    """How the nodes find each other."""
    shared_memory: SharedMemory = _defaulted(SharedMemory)
    """/dev/shm of the trainer."""
    pod_security: PodSecurity = _defaulted(PodSecurity)
    """Security context of the pods."""
    restart_policy: RestartPolicy = _defaulted(RestartPolicy)
    """What happens when an attempt fails."""
    active_deadline_seconds: Seconds | None = None
    """Seconds of running, restarts included and suspension excluded, after which the job fails."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=YEAR)] | None = None
    """Seconds after which a finished job is deleted with its pods; kept when absent."""
    suspend: bool = False
    """True stops the pods and keeps the checkpoints; false again starts a new attempt, which costs no restart."""
    checkpoint: Checkpoint | None = None
    """The shared volume for checkpoints; without it a restart begins from zero."""
    data: Data | None = None
    """A volume with the training data."""

    @model_validator(mode="after")
    def _image_somewhere(self) -> Self:
        spec = self.template.spec if self.template else None
        containers = (spec.containers if spec else None) or []
        named = any(c.name == names.TRAINER_CONTAINER and c.image for c in containers)
        if self.image is None and not named:
            raise ValueError(_IMAGE_MESSAGE)
        if self.nproc_per_node == "auto" and spec and spec.resource_claims:
            raise ValueError(_CLAIMS_MESSAGE)
        return self

    @model_validator(mode="after")
    def _env_is_the_users(self) -> Self:
        env = self.env or []
        if any(e.name in names.OWNED_ENV for e in env):
            raise ValueError(_OWNED_MESSAGE)
        if any(e.value is not None and e.value_from is not None for e in env):
            raise ValueError(self.rules[2].message)
        return self

    @model_validator(mode="after")
    def _mounts_differ(self) -> Self:
        if self.checkpoint and self.data and self.checkpoint.mount_path == self.data.mount_path:
            raise ValueError(_PATHS_MESSAGE)
        return self


_NAME = "[a-z]([-a-z0-9]*[a-z0-9])?"
NAME_RULE = Rule(
    f"self.metadata.name.matches('^{_NAME}$') && size(self.metadata.name) <= {names.MAX_JOB_NAME}",
    f"metadata.name must be at most {names.MAX_JOB_NAME} lower-case letters, digits and '-', beginning with a letter "
    "and ending with a letter or digit: pod and host names are made from it",
)


def is_job_name(name: str) -> bool:
    """Return whether a DDPJob may have this name: ``NAME_RULE`` in Python."""
    return len(name) <= names.MAX_JOB_NAME and re.fullmatch(_NAME, name) is not None


def forbidden_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return one message for each immutable field that differs between two stored specs of one job.

    The transition rules of ``DDPJobSpec`` in Python. A field that is added or removed differs, too.
    """
    return [rule.message for name, rule in _IMMUTABLE_RULES.items() if not _is_equal(old.get(name), new.get(name))]


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are the same; unlike ``==``, true is not 1."""
    return one == other and json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def parse_spec(job: dict[str, Any]) -> DDPJobSpec:
    """Return the typed spec of a job as the API server stores it.

    Raises:
        pydantic.ValidationError: the spec breaks a rule; ``explain`` turns it into lines for a user.
    """
    return DDPJobSpec.model_validate(job.get("spec") or {}, by_alias=True, by_name=False)


_PYDANTIC_SUBJECT = re.compile(r"^(Input|String|List|Dictionary|Value) should ")


def explain(error: ValidationError) -> list[str]:
    """Return one line for each error: the field's path as the user wrote it, and what is wrong with it."""
    return [f"{field_path('spec', item['loc'])}: {message_of(item)}" for item in error.errors()]


def field_path(root: str, location: Iterable[int | str]) -> str:
    """Return the path below ``root`` of one of pydantic's errors, for example ``spec.env[0].name``."""
    return root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def message_of(error: ErrorDetails) -> str:
    """Return one of pydantic's errors as text for a user, for example ``must be a valid integer``."""
    if error["type"] == "extra_forbidden":
        return "unknown field"
    return _PYDANTIC_SUBJECT.sub("must ", error["msg"].removeprefix("Value error, "))
