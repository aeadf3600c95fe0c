"""The parts of a DDPJob spec that describe its pods: environment, resources, template, volumes and placement.

Field names and limits follow https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints, WrapValidator
from pydantic_core import PydanticCustomError

from ddpjob.api import names
from ddpjob.api.model import ApiModel, OpenModel, Rule

QUANTITY = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?[0-9]+))?$"
ABSOLUTE_PATH = r"^/[^:]*$"
SUB_PATH = r"^[^/].*$"
DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
# The API server's rule for names of environment variables since Kubernetes 1.34: printable ASCII except "=".
ENV_NAME = r"^[ -<>-~]+$"
MAX_NAME = 253
MAX_QUANTITY = 64
MAX_KEY = 317  # a qualified name: a prefix of 253 characters, "/" and a name of 63
# Not the whole grammar: matches() of keys of unknown length would exceed the API server's cost limit.
_KEYS_RULE = Rule(f"self.all(key, size(key) <= {MAX_KEY})", f"a key must have at most {MAX_KEY} characters")


def _quantity(value: object) -> object:
    message = "must be a non-negative quantity, for example 500m, 4 or 16Gi"
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PydanticCustomError("quantity_type", message)
    if (isinstance(value, int) and value < 0) or (isinstance(value, str) and not re.fullmatch(QUANTITY, value)):
        raise ValueError(message)
    if isinstance(value, str) and len(value) > MAX_QUANTITY:
        raise PydanticCustomError("string_too_long", f"must have at most {MAX_QUANTITY} characters")
    return value


def _map(value: object, read: Callable[[object], dict[str, Any]]) -> dict[str, Any]:
    """Read a map of declared values. A key whose value is null is dropped, as the API server does."""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
    found = read(value)
    if any(len(key) > MAX_KEY for key in found):
        raise ValueError(_KEYS_RULE.message)
    return found


Quantity = Annotated[
    int | str,
    BeforeValidator(_quantity),
    Field(
        json_schema_extra={
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY,
            "maxLength": MAX_QUANTITY,
            "minimum": 0,  # not a CEL rule: 512 variables times 32 containers would exceed its cost budget
        }
    ),
]
ShortText = Annotated[str, StringConstraints(max_length=253)]
LongText = Annotated[str, StringConstraints(max_length=65536)]
ObjectName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME, pattern=DNS_SUBDOMAIN)]
Image = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[!-~]+$")]
MountPath = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=ABSOLUTE_PATH)]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]


def is_object_name(text: str) -> bool:
    """Whether an object of Kubernetes can have this name: a DNS subdomain."""
    return len(text) <= MAX_NAME and re.fullmatch(DNS_SUBDOMAIN, text) is not None


class KeySelector(ApiModel):
    """One key of a ConfigMap or Secret."""

    name: ObjectName
    """Name of the ConfigMap or Secret in the job's namespace."""
    key: ShortText
    """Key of the value."""
    optional: bool | None = None
    """Whether the object or its key may be absent."""


class FieldSelector(ApiModel):
    """A field of the pod itself."""

    field_path: ShortText
    """Path of the field, for example `status.podIP`."""
    api_version: ShortText | None = None
    """API version of the path; default: v1."""


class ResourceFieldSelector(ApiModel):
    """A resource limit or request of a container."""

    resource: ShortText
    """The resource, for example `limits.memory`."""
    container_name: ShortText | None = None
    """The container; required in volumes, optional in environment variables."""
    divisor: Quantity | None = None
    """Unit of the value; default: 1."""


class EnvValueSource(ApiModel):
    """Source of an environment variable's value."""

    config_map_key_ref: KeySelector | None = None
    """A key of a ConfigMap."""
    secret_key_ref: KeySelector | None = None
    """A key of a Secret."""
    field_ref: FieldSelector | None = None
    """A field of the pod."""
    resource_field_ref: ResourceFieldSelector | None = None
    """A resource limit or request of the container."""


class EnvVar(ApiModel):
    """One environment variable."""

    list_keys: ClassVar[tuple[str, ...]] = ("name",)

    name: Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=ENV_NAME)]
    """Name of the variable. The operator sets MASTER_ADDR, NODE_RANK and others itself and refuses them here."""
    value: Annotated[str, StringConstraints(max_length=32768)] | None = None
    """Value. Kubernetes expands $(VAR) in it."""
    value_from: EnvValueSource | None = None
    """Source of the value, instead of `value`."""


class ObjectReference(ApiModel):
    """A ConfigMap or Secret by name."""

    name: ObjectName
    """Name of the object, in the job's namespace."""
    optional: bool | None = None
    """Whether it may be absent."""


class EnvFromSource(ApiModel):
    """All keys of a ConfigMap or Secret as environment variables."""

    prefix: ShortText | None = None
    """Prefix of every variable's name."""
    config_map_ref: ObjectReference | None = None
    """The ConfigMap."""
    secret_ref: ObjectReference | None = None
    """The Secret."""


class LocalReference(ApiModel):
    """Name of an object in the job's namespace."""

    list_keys: ClassVar[tuple[str, ...]] = ("name",)

    name: ObjectName
    """Name of the object."""


_KEYS: Any = {"x-kubernetes-validations": [_KEYS_RULE.wire()]}
ResourceMap = Annotated[dict[str, Quantity], Field(max_length=32, json_schema_extra=_KEYS), WrapValidator(_map)]
TextMap = Annotated[dict[str, ShortText], Field(max_length=64, json_schema_extra=_KEYS), WrapValidator(_map)]
LongTextMap = Annotated[dict[str, LongText], Field(max_length=64, json_schema_extra=_KEYS), WrapValidator(_map)]


class NamedEntry(OpenModel):
    """An entry of a list, with the fields that Kubernetes gives it."""

    list_keys: ClassVar[tuple[str, ...]] = ("name",)

    name: ShortText
    """Name of the entry. A container refers to an entry of the template's `resourceClaims` by its name."""


class Resources(ApiModel):
    """Compute resources of the trainer container."""

    limits: ResourceMap | None = None
    """Limits, for example `{cpu: 4, memory: 16Gi, nvidia.com/gpu: 8}`."""
    requests: ResourceMap | None = None
    """Resources that the scheduler reserves; default: the limits."""
    claims: Annotated[list[NamedEntry], Field(max_length=32)] | None = None
    """Resource claims that the container uses."""


class TemplateMetadata(OpenModel):
    """Labels and annotations of every pod of the job."""

    labels: TextMap | None = None
    """Labels. The operator sets those under ddpjob.dev/."""
    annotations: LongTextMap | None = None
    """Annotations."""


class TemplateContainer(OpenModel):
    """A container of the template. The one named `trainer` runs the training; others are sidecars."""

    list_keys: ClassVar[tuple[str, ...]] = ("name",)

    name: Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=DNS_LABEL)]
    """Name of the container; `trainer` runs the training."""
    image: Image | None = None
    """Image of the container."""
    command: Annotated[list[LongText], Field(max_length=256)] | None = None
    """Command; default: the image's entrypoint."""
    args: Annotated[list[LongText], Field(max_length=256)] | None = None
    """Arguments of the command."""
    env: Annotated[list[EnvVar], Field(max_length=512)] | None = None
    """Environment variables."""
    working_dir: MountPath | None = None
    """Working directory."""
    resources: Resources | None = None
    """Compute resources."""
    image_pull_policy: PullPolicy | None = None
    """When to pull the image."""


class PodTemplateSpec(OpenModel):
    """A pod spec. All fields of Kubernetes are accepted; the declared ones are validated."""

    containers: Annotated[list[TemplateContainer], Field(max_length=32)] | None = None
    """Containers. `trainer` is merged with the fields of the job's spec; others are sidecars."""
    init_containers: Annotated[list[TemplateContainer], Field(max_length=32)] | None = None
    """Init containers."""
    node_selector: TextMap | None = None
    """Labels that a Kubernetes node must have."""
    tolerations: Annotated[list[dict[str, Any]], Field(max_length=64)] | None = None
    """Tolerations, added to those of the operator: 30 s for nodes that are not ready or unreachable."""
    affinity: dict[str, Any] | None = None
    """Affinity and anti-affinity."""
    scheduling_gates: Annotated[list[NamedEntry], Field(max_length=64)] | None = None
    """Gates that must be removed before the pods are scheduled."""
    scheduler_name: ShortText | None = None
    """Name of the scheduler."""
    priority_class_name: ShortText | None = None
    """Priority class of the pods."""
    runtime_class_name: ShortText | None = None
    """Runtime class of the pods."""
    service_account_name: ShortText | None = None
    """Service account of the pods. Its token is mounted only if `automountServiceAccountToken` is true."""
    host_network: bool | None = None
    """Whether the pods use the network of their node."""
    termination_grace_period_seconds: Annotated[int, Field(ge=0, le=86400)] | None = None
    """Seconds between SIGTERM and SIGKILL."""
    resource_claims: Annotated[list[NamedEntry], Field(max_length=32)] | None = None
    """Resource claims of the pods (dynamic resource allocation). With them `nprocPerNode` must be a number."""


class PodTemplate(ApiModel):
    """A pod template. It overrides the operator's defaults; the fields of the job's spec override the template."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations of the pods."""
    spec: PodTemplateSpec | None = None
    """Spec of the pods."""


class ClaimSpec(OpenModel):
    """Spec of a PersistentVolumeClaim. All fields of Kubernetes are accepted."""

    access_modes: Annotated[
        list[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]],
        Field(min_length=1, max_length=4),
    ]
    """Use ReadWriteMany if numNodes > 1, because every node mounts the volume."""
    storage_class_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Storage class; default: the cluster's."""
    volume_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Name of a PersistentVolume to bind to."""
    resources: Resources
    """Size of the volume, for example `{requests: {storage: 10Gi}}`."""


class ClaimTemplate(ApiModel):
    """A PersistentVolumeClaim that the operator creates with the name `<job>-checkpoints`."""

    spec: ClaimSpec
    """Spec of the claim."""


class Checkpoint(ApiModel):
    """Shared volume that rank 0 saves checkpoints to and every attempt resumes from."""

    rules: ClassVar = (
        Rule(
            "has(self.claimName) != has(self.claimTemplate)",
            "give exactly one of claimName (an existing claim) and claimTemplate (a claim to create)",
            lambda checkpoint: (checkpoint.claim_name is None) != (checkpoint.claim_template is None),
        ),
        Rule(
            "!has(self.subPath) || !self.subPath.split('/').exists(part, part == '..')",
            "subPath must not contain '..'",
            lambda checkpoint: ".." not in (checkpoint.sub_path or "").split("/"),
        ),
    )

    claim_name: ObjectName | None = None
    """Name of an existing PersistentVolumeClaim in the job's namespace."""
    claim_template: ClaimTemplate | None = None
    """Claim to create, or of an earlier job of this name. It outlives the job, unless claimRetention is Delete."""
    claim_retention: Literal["Retain", "Delete"] = "Retain"
    """Whether the claim from claimTemplate, which holds the trained model, is kept when the job is deleted."""
    mount_path: MountPath = "/checkpoints"
    """Mount path in the trainer (DDPJOB_CHECKPOINT_DIR)."""
    sub_path: Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=SUB_PATH)] | None = None
    """Directory inside the volume, for several jobs on one claim."""
    fenced: bool | None = None
    """Whether an older attempt cannot save once a newer attempt has saved. Then the attempt after a failure does not
    wait for the end of the earlier pods. Default: what the launcher of ddprun or ddptrain reports, else false."""

    def claim(self, job: str) -> str:
        """Return the name of the claim that holds the checkpoints of the job with this name."""
        return self.claim_name or names.claim_name(job)


class Data(ApiModel):
    """Volume with the training data, mounted read-only."""

    claim_name: ObjectName
    """Name of an existing PersistentVolumeClaim in the job's namespace."""
    mount_path: MountPath = "/data"
    """Mount path in the trainer (DDPJOB_DATA_DIR)."""


class GangPolicy(ApiModel):
    """All pods get a Kubernetes node, or none does."""


class BasicPolicy(ApiModel):
    """Each pod gets a Kubernetes node by itself."""


class SchedulingPolicy(ApiModel):
    """Whether the pods of an attempt are placed together. Exactly one of gang and basic."""

    rules: ClassVar = (
        Rule(
            "has(self.gang) != has(self.basic)",
            "give exactly one of gang (all pods are placed, or none) and basic (each pod by itself)",
            lambda policy: (policy.gang is None) != (policy.basic is None),
        ),
    )

    gang: GangPolicy | None = None
    """All pods or none, by the gang scheduler that the operator is configured for. Without one the job waits."""
    basic: BasicPolicy | None = None
    """Each pod by itself, also where the operator is configured for a gang scheduler."""


class Scheduling(ApiModel):
    """Placement of the pods."""

    scheduling_policy: SchedulingPolicy | None = None
    """Default: gang where the operator is configured for a gang scheduler, otherwise basic."""
    # By default as long as a cluster autoscaler may take to add a Kubernetes node.
    partial_gang_seconds: Annotated[int, Field(ge=0, le=86_400)] = 300
    """Seconds for which an attempt waits while not all its pods get a Kubernetes node: a job with minNodes then starts
    with fewer, any other gives its nodes back if an older job waits, too, or after five times as long. It costs no
    restart. 0: without end."""
    avoid_slow_nodes: bool = False
    """Whether new attempts prefer other Kubernetes nodes than those on which a rank was slow in two attempts
    (docs/tasks/scripts.md)."""
