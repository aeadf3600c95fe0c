"""Volumes of a job: a shared claim for checkpoints, and training data mounted read-only."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from ddpjob.api import names
from ddpjob.api.model import ApiModel, OpenModel, Rule
from ddpjob.api.pods import MountPath, ObjectName, Resources

SUB_PATH = r"^[^/].*$"


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
