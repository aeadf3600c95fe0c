"""The volumes of a job: checkpoints on a shared claim, training data mounted read-only."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from ddpjob.api import names
from ddpjob.api.model import ApiModel, OpenModel, Rule
from ddpjob.api.pods import MountPath, ObjectName, Resources

SUB_PATH = r"^[^/].*$"


class ClaimSpec(OpenModel):
    """Spec of a PersistentVolumeClaim; every field of Kubernetes' may be given."""

    access_modes: Annotated[
        list[Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]],
        Field(min_length=1, max_length=4),
    ]
    """Use ReadWriteMany when numNodes > 1: every node mounts the volume."""
    storage_class_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Storage class; the cluster's default when absent."""
    volume_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """Name of a PersistentVolume to bind to."""
    resources: Resources
    """Size of the volume, for example `{requests: {storage: 10Gi}}`."""


class ClaimTemplate(ApiModel):
    """A PersistentVolumeClaim that the operator makes as `<job>-checkpoints`."""

    spec: ClaimSpec
    """Spec of the claim."""


class Checkpoint(ApiModel):
    """The shared volume that rank 0 saves to and every attempt resumes from."""

    rules: ClassVar = (
        Rule(
            "has(self.claimName) != has(self.claimTemplate)",
            "give exactly one of claimName (a claim that exists) and claimTemplate (a claim to make)",
        ),
        Rule(
            "!has(self.subPath) || !self.subPath.split('/').exists(part, part == '..')",
            "subPath must stay inside the volume: no '..'",
        ),
    )

    claim_name: ObjectName | None = None
    """An existing PersistentVolumeClaim of the job's namespace."""
    claim_template: ClaimTemplate | None = None
    """A claim to make for the job; it outlives the job unless claimRetention says Delete."""
    claim_retention: Literal["Retain", "Delete"] = "Retain"
    """Whether the claim made from claimTemplate is kept when the job is deleted. It holds the trained model."""
    mount_path: MountPath = names.DEFAULT_CHECKPOINT_PATH
    """Where the volume is mounted in the trainer (DDPJOB_CHECKPOINT_DIR)."""
    sub_path: Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=SUB_PATH)] | None = None
    """Folder inside the volume, so that several jobs can share one claim."""

    @model_validator(mode="after")
    def _one_claim(self) -> Self:
        if (self.claim_name is None) == (self.claim_template is None):
            raise ValueError(self.rules[0].message)
        if self.sub_path is not None and ".." in self.sub_path.split("/"):
            raise ValueError(self.rules[1].message)
        return self


class Data(ApiModel):
    """A volume with the training data, mounted read-only."""

    claim_name: ObjectName
    """An existing PersistentVolumeClaim of the job's namespace."""
    mount_path: MountPath = names.DEFAULT_DATA_PATH
    """Where it is mounted in the trainer (DDPJOB_DATA_DIR)."""
