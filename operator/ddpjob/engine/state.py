"""The state of a job: spec, recorded status and observed objects, with the properties that decisions use."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from ddpjob.api.wire import condition, is_true, seconds_between
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, is_comparable, spec_hash
from ddpjob.engine.observe import Observed
from ddpjob.engine.pods import PodView, pod_view


@dataclass(frozen=True)
class JobState:
    """All inputs of a plan. ``before`` is the recorded status."""

    job: Job
    before: Mapping[str, Any]
    observed: Observed
    now: datetime
    settings: EngineSettings

    @cached_property
    def pods(self) -> tuple[PodView, ...]:
        return tuple(pod_view(pod) for pod in self.observed.pods)

    @property
    def attempt(self) -> int:
        """The recorded attempt; 0 before the first."""
        return int(self.before.get("attempt") or 0)

    @cached_property
    def current(self) -> dict[int, PodView]:
        """Pods of the recorded attempt by node_rank."""
        return {pod.node_rank: pod for pod in self.pods if pod.attempt == self.attempt}

    @cached_property
    def succeeded_node_ranks(self) -> frozenset[int]:
        """node_ranks of this attempt that exited with 0, including those whose pods no longer exist."""
        recorded = frozenset(self.before.get("succeededRanks") or ())
        if self.suspended:
            return recorded  # exit code 0 after the suspension answers the operator's own SIGTERM
        return recorded | {node_rank for node_rank, pod in self.current.items() if pod.state == "succeeded"}

    @property
    def newest_attempt(self) -> int:
        """Highest attempt of any pod of the job."""
        return max((pod.attempt for pod in self.pods), default=0)

    @property
    def gang_is_complete(self) -> bool:
        """Whether each node of this attempt has a pod that is not being deleted, or has succeeded."""
        staying = {node_rank for node_rank, pod in self.current.items() if not pod.deleting}
        return self.attempt > 0 and (staying | self.succeeded_node_ranks).issuperset(self.job.node_ranks)

    @property
    def gang_was_complete(self) -> bool:
        """Whether the gang is recorded as complete: after that a missing pod is lost, not still to be created."""
        return self.attempt > 0 and self.before.get("completeAttempt") == self.attempt

    @property
    def missing_node_ranks(self) -> list[int]:
        """node_ranks that have no pod and have not succeeded."""
        done = self.current.keys() | self.succeeded_node_ranks
        return [node_rank for node_rank in self.job.node_ranks if node_rank not in done]

    @property
    def all_succeeded(self) -> bool:
        return self.succeeded_node_ranks.issuperset(self.job.node_ranks)

    @property
    def finished(self) -> bool:
        return is_true(self.before, "Finished")

    @property
    def suspended(self) -> bool:
        return is_true(self.before, "Suspended")

    @cached_property
    def spec_hash(self) -> str:
        """Digest of the parts of the current spec that CEL rules cannot compare."""
        return spec_hash(self.job.stored_spec)

    @property
    def spec_changed(self) -> bool:
        """Whether an immutable part of the spec changed, which CEL rules cannot detect in the whole template."""
        recorded = self.before.get("specHash")
        return is_comparable(recorded) and recorded != self.spec_hash

    @property
    def active_seconds(self) -> float:
        """Seconds that the job was active, without suspensions."""
        before = float(self.before.get("activeSeconds") or 0)
        if self.suspended or "startTime" not in self.before:
            return before
        resumed = condition(self.before, "Suspended").get("lastTransitionTime")
        since = resumed if resumed and "activeSeconds" in self.before else self.before["startTime"]
        return before + seconds_between(since, self.now)
