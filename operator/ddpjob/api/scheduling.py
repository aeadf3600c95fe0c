"""How the pods of a job are placed: together or one by one."""

from typing import Annotated, ClassVar

from pydantic import Field

from ddpjob.api.model import ApiModel, Rule


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
