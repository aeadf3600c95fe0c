"""The spec of a DDPJob: source of the CRD's schema, of its CEL rules and of the checks in Python.

Every rule exists in CEL for the API server and in Python; tests/api/test_verdicts.py compares their verdicts.
Some rules are beyond CEL and exist only here, so a job that breaks one is created and gets the state Invalid: size and
depth of the spec, and the number of devices that ``nprocPerNode: auto`` counts.
The docstring below each field is its description in ``kubectl explain ddpjob.spec``.
"""

import copy
import json
import re
from collections.abc import Iterable
from functools import reduce
from operator import getitem
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from ddpjob.api import limits, names
from ddpjob.api.model import ApiModel, Rule
from ddpjob.api.objects import levels, value_at
from ddpjob.api.pods import (
    Checkpoint,
    Data,
    EnvFromSource,
    EnvVar,
    Image,
    LocalReference,
    LongText,
    MountPath,
    PodTemplate,
    PodTemplateSpec,
    PullPolicy,
    Quantity,
    Resources,
    Scheduling,
    TemplateContainer,
)
from ddpjob.api.quantities import count_devices
from ddpjob.api.restarts import RestartPolicy
from ddpjob.api.time_spent import Time

DAY = 86_400
YEAR = 365 * DAY
MAX_DEPTH = 100  # a pod has about 15 levels; Python's and pydantic's recursion end at a few hundred
MAX_BYTES = 256 * 1024
MAX_VALUES = 20_000
"""Numbers, texts, lists and objects. They take the memory and the time of a plan: one pod with 20 containers of 50
variables each has 5,000, and 256 KiB of ``{},`` would have 87,000."""

_NPROC_RULE = Rule(
    f"type(self) == int ? self >= 1 && self <= {limits.MAX_NPROC_PER_NODE} : self == 'auto'",
    f"must be auto or a number from 1 to {limits.MAX_NPROC_PER_NODE}",
)


def _nproc(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("nproc_type", _NPROC_RULE.message)
    if not (1 <= value <= limits.MAX_NPROC_PER_NODE if isinstance(value, int) else value == "auto"):
        raise ValueError(_NPROC_RULE.message)
    return value


_NPROC_SCHEMA: Any = {"x-kubernetes-int-or-string": True, "x-kubernetes-validations": [_NPROC_RULE.wire()]}
NprocPerNode = Annotated[int | str, BeforeValidator(_nproc), Field(json_schema_extra=_NPROC_SCHEMA)]
Seconds = Annotated[int, Field(ge=1, le=YEAR)]
ManagedBy = Annotated[
    str,
    StringConstraints(
        max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
    ),
]
"""A controller, as in a Job of Kubernetes: a domain and a path."""


class Rendezvous(ApiModel):
    """Static rendezvous of the nodes at rank 0's address. With hostNetwork, two jobs on a node need different ports."""

    rules: ClassVar = (
        Rule(
            "self.port != self.progressPort",
            "port and progressPort must differ: rank 0 listens on both",
            lambda rendezvous: rendezvous.port != rendezvous.progress_port,
        ),
    )

    port: Annotated[int, Field(ge=1024, le=65535)] = limits.MASTER_PORT
    """Port of the rendezvous on rank 0 (MASTER_PORT)."""
    progress_port: Annotated[int, Field(ge=1024, le=65535)] = limits.PROGRESS_PORT
    """Port on which rank 0 serves its progress (DDPJOB_PROGRESS_PORT)."""
    timeout_seconds: Annotated[int, Field(ge=10, le=DAY)] = 600
    """Seconds that a rank waits for the others before it fails."""


class SharedMemory(ApiModel):
    """/dev/shm of the trainer. It is memory-backed, because data loaders crash (SIGBUS) with the default of 64 MiB."""

    size_limit: Quantity | None = None
    """Maximum size, for example `2Gi`. The container's memory limit applies as well."""


class PodSecurity(ApiModel):
    """Security context of the pods."""

    rules: ClassVar = (
        Rule(
            "self.profile != 'Restricted' || !has(self.runAsUser) || self.runAsUser != 0",
            "runAsUser 0 is root: the Restricted profile forbids it; set profile: Baseline to run as root",
            lambda security: security.profile != "Restricted" or security.run_as_user != 0,
        ),
    )

    profile: Literal["Restricted", "Baseline", "Unset"] = "Restricted"
    """Restricted: the Pod Security level. Baseline: only the default seccomp profile. Unset: only the ids below."""
    run_as_user: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """User id of the trainer. Default with Restricted: 1000."""
    fs_group: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Group id that owns mounted volumes. Default with Restricted: 1000."""


def _defaulted(model: type[ApiModel]) -> Any:
    # The whole object, not {}: the API server checks a default against the rules before it sets nested defaults.
    return Field(default_factory=model, json_schema_extra={"default": model().wire()})


# Changing one of these on a live job would mix two programs in one training.
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
    "managedBy",
    "launcher",
    "scheduling.schedulingPolicy",
)

# The immutable parts with fields that the schema does not declare. CEL cannot compare those; ``specHash`` covers them.
OPEN_PARTS = (("template",), ("checkpoint", "claimTemplate"), ("resources", "claims"))
# May change while the job is suspended, and in the edit that suspends it.
SIZE = ("numNodes", "nprocPerNode")


def _same(path: str) -> str:
    """Return the CEL expression that a field is equal, or absent, in both versions."""
    keys = path.split(".")
    places = [".".join(keys[: n + 1]) for n in range(len(keys))]
    new, old = (" && ".join(f"has({of}.{place})" for place in places) for of in ("self", "oldSelf"))
    new, old = (text if len(keys) == 1 else f"({text})" for text in (new, old))
    return f"{new} == {old} && (!{new} || self.{path} == oldSelf.{path})"


def _immutable(name: str) -> str:
    return f"{name} is immutable: delete the job and apply it again to change it (its checkpoints stay)"


# Rules of the spec, with has(): a rule of the field itself does not see that the field is added or removed.
_IMMUTABLE_RULES = {name: Rule(_same(name), _immutable(name)) for name in IMMUTABLE}
for _name in SIZE:
    _text = f"{_immutable(_name)}, or change it while the job is suspended"
    _IMMUTABLE_RULES[_name] = Rule(f"({_same(_name)}) || (oldSelf.suspend || self.suspend)", _text)


_OWNED = "[" + ", ".join(f"'{name}'" for name in sorted(names.OWNED_ENV)) + "]"


_DEFAULT_SCHEDULING = Scheduling()
_LARGE_ADVICE = "move scripts, configuration and data into the image, a ConfigMap or a volume"


def _too_large(size: int) -> str:
    return f"has {size:,} bytes of JSON, at most {MAX_BYTES:,} are allowed: {_LARGE_ADVICE}"


class DDPJobSpec(ApiModel):
    """A data-parallel training on numNodes nodes."""

    rules: ClassVar = (
        Rule(
            "has(self.image) || (has(self.template) && has(self.template.spec) && has(self.template.spec.containers)"
            " && self.template.spec.containers.exists(c, c.name == 'trainer' && has(c.image)))",
            "image is required: set spec.image, or template.spec.containers[name=trainer].image",
            lambda spec: spec.image is not None or any(container.image for container in spec.trainers),
        ),
        Rule(
            f"!has(self.env) || !self.env.exists(e, e.name in {_OWNED})",
            "env must not set variables that the operator sets (MASTER_ADDR, MASTER_PORT, NNODES, NODE_RANK, "
            "NPROC_PER_NODE, their PET_* forms and DDPJOB_*): use numNodes, nprocPerNode, rendezvous, checkpoint, data",
            lambda spec: all(variable.name not in names.OWNED_ENV for variable in spec.env or ()),
        ),
        Rule(
            "!has(self.env) || !self.env.exists(e, has(e.value) && has(e.valueFrom))",
            "env: an entry has either value or valueFrom, not both",
            lambda spec: all(entry.value is None or entry.value_from is None for entry in spec.env or ()),
        ),
        Rule(
            "self.nprocPerNode != 'auto' || !has(self.template) || !has(self.template.spec)"
            " || !has(self.template.spec.resourceClaims) || size(self.template.spec.resourceClaims) == 0",
            "nprocPerNode must be a number when the template has resourceClaims: the operator cannot count their "
            "devices",
            lambda spec: spec.nproc_per_node != "auto" or not (spec.pod_template and spec.pod_template.resource_claims),
        ),
        Rule(
            "!has(self.checkpoint) || !has(self.data) || self.checkpoint.mountPath != self.data.mountPath",
            "checkpoint.mountPath and data.mountPath must differ",
            lambda spec: not (spec.checkpoint and spec.data and spec.checkpoint.mount_path == spec.data.mount_path),
        ),
        Rule(
            "!has(self.minNodes) || self.minNodes <= self.numNodes",
            "minNodes must not exceed numNodes",
            lambda spec: spec.min_nodes is None or spec.min_nodes <= spec.num_nodes,
        ),
        Rule(
            "!has(self.minNodes) || !has(self.scheduling) || self.scheduling.partialGangSeconds > 0",
            "minNodes needs scheduling.partialGangSeconds above 0: after this time a job starts with fewer nodes",
            lambda spec: spec.min_nodes is None or spec.placement.partial_gang_seconds > 0,
        ),
        *_IMMUTABLE_RULES.values(),
    )

    image: Image | None = None
    """Image of the trainer. Any image that contains PyTorch works."""
    command: Annotated[list[LongText], Field(max_length=256)] | None = None
    """Command of the trainer, for example `[ddprun, train.py]`; default: the image's entrypoint."""
    args: Annotated[list[LongText], Field(max_length=256)] | None = None
    """Arguments of the command, for example `[train, --epochs, "3"]`."""
    env: Annotated[list[EnvVar], Field(max_length=512)] | None = None
    """Environment variables of the trainer."""
    env_from: Annotated[list[EnvFromSource], Field(max_length=64)] | None = None
    """ConfigMaps and Secrets whose keys become environment variables of the trainer."""
    working_dir: MountPath | None = None
    """Working directory of the trainer; default: the image's."""
    resources: Resources | None = None
    """Compute resources of the trainer on each node, for all its processes together."""
    image_pull_policy: PullPolicy | None = None
    """When to pull the image; default: that of Kubernetes."""
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=16)] | None = None
    """Secrets with credentials for pulling the image."""
    template: PodTemplate | None = None
    """Pod template, for settings without a field of their own here. Its container `trainer` runs the training."""
    num_nodes: Annotated[int, Field(ge=1, le=limits.MAX_NODES)] = 1
    """Number of nodes, with one pod each."""
    min_nodes: Annotated[int, Field(ge=1, le=limits.MAX_NODES)] | None = None
    """Elastic: fewer nodes, at least this number, where not all of numNodes get a Kubernetes node; default: numNodes.

    An attempt without all nodes after scheduling.partialGangSeconds ends, and the next one has fewer. It grows again
    after a checkpoint when there is room for more. The world size differs between attempts
    (docs/concepts/scheduling.md).
    """
    nproc_per_node: NprocPerNode = "auto"
    """Processes per node. `auto` means one per GPU (`*/gpu`) and MIG device of the trainer, or 1 without them."""
    rendezvous: Rendezvous = _defaulted(Rendezvous)
    """Rendezvous of the nodes."""
    shared_memory: SharedMemory = _defaulted(SharedMemory)
    """/dev/shm of the trainer."""
    pod_security: PodSecurity = _defaulted(PodSecurity)
    """Security context of the pods."""
    network_policy: Literal["Isolated"] | None = None
    """Isolated: only the job's own pods, and the operator for the progress, can connect to the pods; default: anyone.

    It is a NetworkPolicy for connections to the pods; those that they open are free. It needs a network plugin that
    enforces NetworkPolicies, and has no effect on pods with hostNetwork.
    """
    launcher: Literal["Injected"] | None = None
    """Injected: the pods get `ddprun`, which runs in place of torchrun; the image needs Python 3.10 and torch only.

    An init container copies it from the operator's launcher image. The commands torchrun, ddprun and python -m
    torch.distributed.run are replaced, with the same arguments; others run unchanged. Default: the image's programs.
    """
    restart_policy: RestartPolicy = _defaulted(RestartPolicy)
    """Restarts after a failure."""
    on_divergence: Literal["Report", "Restart"] = "Report"
    """What follows when the ranks have different parameters (docs/tasks/scripts.md). Report: only a report.

    Restart: a restart that counts. `ddprun` sets aside the checkpoints that were saved since all ranks agreed, so
    training continues from the one before; if all are from after, it goes on. If only one rank differs, and no mistake
    in the script explains it, the Kubernetes node of that rank is suspected.
    """
    success_policy: Literal["AllNodes", "NodeZero"] = "AllNodes"
    """AllNodes: the job succeeds when every node's trainer exits with 0. NodeZero: when node 0's does."""
    active_deadline_seconds: Seconds | None = None
    """Maximum active time in seconds, with restarts and without suspensions. After it the job fails."""
    startup_deadline_seconds: Seconds | None = None
    """Maximum seconds from an attempt's start until all nodes run, and until the first step if the trainer reports it.

    An attempt that never had all nodes running fails the job, for example because no node has enough GPUs or because
    the image cannot be pulled. One whose nodes ran restarts, and the restart counts. Attempts whose pods are refused,
    for example by a quota, count as one: the time begins with the first of them, and again after an edit of the spec.
    """
    progress_deadline_seconds: Annotated[int, Field(ge=30, le=YEAR)] | None = None
    """Maximum seconds without a new step. The restart after them counts. A trainer that reports no steps is not ended.

    Only time during which the operator reached the trainer counts. Otherwise `Running` has the reason ProgressUnknown.
    """
    completion_grace_seconds: Seconds = 300
    """Maximum seconds from the first node's exit code 0 until all have ended. The restart after them counts, and
    doubles them for the next attempt, to at most eight times this value."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=YEAR)] | None = None
    """Seconds after which a finished job and its pods are deleted; default: never."""
    pod_retention: Literal["LastAttempt", "None", "All"] = "LastAttempt"
    """Ended pods to keep, for their logs: those of the last attempt and of the failure before it, none, or all."""
    log_tail: Literal["Include", "Omit"] = "Include"
    """Whether `status.failures` includes the end of the log of the pod that failed. Omit it if logs contain secrets."""
    suspend: bool = False
    """true deletes the pods and keeps the checkpoints. Back to false starts a new attempt, which is not a restart."""
    restarted_at: Annotated[Time, StringConstraints(max_length=64)] | None = None
    """A new time restarts all pods after they saved a checkpoint. This restart does not count."""
    managed_by: ManagedBy | None = None
    """The controller of this job; default: this operator, `ddpjob.dev/operator`. Jobs of others are left alone."""
    checkpoint: Checkpoint | None = None
    """Shared volume for checkpoints. Without it a restart starts training from the beginning."""
    data: Data | None = None
    """Volume with the training data."""
    scheduling: Scheduling | None = None
    """Placement of the pods."""

    @property
    def placement(self) -> Scheduling:
        """Placement of the pods, with its defaults."""
        return self.scheduling or _DEFAULT_SCHEDULING

    @property
    def pod_template(self) -> PodTemplateSpec | None:
        """Pod spec of the template."""
        return self.template.spec if self.template else None

    @property
    def trainers(self) -> list[TemplateContainer]:
        """The trainer's container in the template, if there is one."""
        containers = (self.pod_template.containers if self.pod_template else None) or []
        return [container for container in containers if container.name == names.TRAINER_CONTAINER]

    @property
    def devices_per_node(self) -> int:
        """GPUs and MIG devices of the trainer on each node. Raises ``ValueError`` if they cannot be counted."""
        own = [container.resources for container in self.trainers]
        parts = [part for part in (*own, self.resources) if part is not None]  # the last one is the strongest
        limits = {name: value for part in parts for name, value in (part.limits or {}).items()}
        requests = {name: value for part in parts for name, value in (part.requests or {}).items()}
        return count_devices(limits, requests)

    @model_validator(mode="before")
    @classmethod
    def _not_too_large(cls, value: object) -> object:
        count = 0
        for depth, level in enumerate(levels(value) if isinstance(value, dict) else ()):
            count += len(level)
            if depth > MAX_DEPTH:
                raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
            if count > MAX_VALUES:
                raise ValueError(f"has more than {MAX_VALUES:,} values: {_LARGE_ADVICE}")
        if count and (size := len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode())) > MAX_BYTES:
            raise ValueError(_too_large(size))
        return value

    @model_validator(mode="after")
    def _devices_are_countable(self) -> Self:
        if self.nproc_per_node == "auto" and (count := self.devices_per_node) > limits.MAX_NPROC_PER_NODE:
            raise ValueError(
                f"nprocPerNode: auto counts {count} devices, at most {limits.MAX_NPROC_PER_NODE} can be used"
            )
        return self


_NAME = "[a-z]([-a-z0-9]*[a-z0-9])?"
NAME_RULE = Rule(
    f"self.metadata.name.matches('^{_NAME}$') && size(self.metadata.name) <= {limits.MAX_JOB_NAME}",
    f"metadata.name must be at most {limits.MAX_JOB_NAME} lower-case letters, digits and '-', beginning with a letter "
    "and ending with a letter or digit: pod and host names are made from it",
)


def is_job_name(name: str) -> bool:
    """Return whether a DDPJob may have this name: ``NAME_RULE`` in Python."""
    return len(name) <= limits.MAX_JOB_NAME and re.fullmatch(_NAME, name) is not None


def forbidden_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return one message for each immutable field that differs between two stored specs of one job.

    The transition rules of ``DDPJobSpec`` in Python. A field that is added or removed counts as changed.
    """
    rules = _IMMUTABLE_RULES
    if old.get("suspend") or new.get("suspend"):
        rules = {name: rule for name, rule in rules.items() if name not in SIZE}
    return [
        rule.message
        for name, rule in rules.items()
        # As text: in Python, true is 1.
        if len({json.dumps(value_at(spec, name.split(".")), sort_keys=True) for spec in (old, new)}) > 1
    ]


def parse_spec(job: dict[str, Any], *, ignore_unknown: bool = False) -> DDPJobSpec:
    """Return the typed spec of a job as the API server stores it.

    Args:
        job: the DDPJob. A spec above ``MAX_BYTES`` is not kept: its size is in its place (``cluster.job_json``).
        ignore_unknown: leave out fields that this release does not know, at any depth. The CustomResourceDefinition of
            another release may declare them, and its defaults put them into every stored job.

    Raises:
        pydantic.ValidationError: the spec breaks a rule; ``explain`` converts the error to text.
    """
    spec = job.get("spec") or {}
    if isinstance(spec, int):
        fault = InitErrorDetails(type=PydanticCustomError("too_large", _too_large(spec)), input=spec)
        raise ValidationError.from_exception_data("DDPJobSpec", [fault])
    try:
        return DDPJobSpec.model_validate(spec, by_alias=True, by_name=False)
    except ValidationError as error:
        unknown = [item["loc"] for item in error.errors() if item["type"] == "extra_forbidden"]
        if not (ignore_unknown and unknown):
            raise
    # The rules of an object that has an unknown field have not been checked yet.
    return DDPJobSpec.model_validate(without(spec, unknown), by_alias=True, by_name=False)


Location = tuple[int | str, ...]
"""The names of fields and the indices of lists that lead to a value."""


def without(value: Any, locations: Iterable[Location]) -> Any:
    """Return a copy of a JSON value without the fields at these locations."""
    copied = copy.deepcopy(value)
    for *path, field in locations:
        del reduce(getitem, path, copied)[field]
    return copied


_TEXTS = {
    "extra_forbidden": "unknown field",
    "missing": "required field is missing",
    "model_type": "must be a mapping of fields, as {field: value}",
    "dict_type": "must be a mapping, as {name: value}",
    "list_type": "must be a list, as [a, b]",
}
_PYDANTIC_SUBJECT = re.compile(r"^(Input|String|List|Dictionary|Value) should ")


def explain(error: ValidationError) -> list[str]:
    """Return one line for each error: the path of the field and what is wrong with it."""
    return [f"{field_path('spec', item['loc'])}: {message_of(item)}" for item in error.errors()]


def field_path(root: str, location: Iterable[int | str]) -> str:
    """Return the path of the field of a pydantic error, for example ``spec.env[0].name``."""
    return root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)


def message_of(error: ErrorDetails) -> str:
    """Return one of pydantic's errors as text for a user, for example ``must be a valid integer``."""
    if error["type"] in _TEXTS:
        return _TEXTS[error["type"]]
    return _PYDANTIC_SUBJECT.sub("must ", error["msg"].removeprefix("Value error, "))
