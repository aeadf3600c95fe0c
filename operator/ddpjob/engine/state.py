"""A job, what was recorded about it and what is there, as questions that decisions are made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from ddpjob.api.wire import Json, seconds_between
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, spec_hash
from ddpjob.engine.observe import Observed
from ddpjob.engine.pods import PodView, pod_view


@dataclass(frozen=True)
class JobState:
    """Everything one plan depends on. ``before`` is the recorded status; the answers below are derived."""

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
    def succeeded_ranks(self) -> frozenset[int]:
        """Ranks of this attempt that ended with 0, those whose pods are gone by now included."""
        recorded = frozenset(self.before.get("succeededRanks") or ())
        if self.suspended:
            return recorded  # the suspension rested on a live LIST; a 0 since then answers our own SIGTERM
        return recorded | {rank for rank, pod in self.current.items() if pod.state == "succeeded"}

    @property
    def newest_attempt(self) -> int:
        """Highest attempt that any pod of the job belongs to."""
        return max((pod.attempt for pod in self.pods), default=0)

    @property
    def gang_is_complete(self) -> bool:
        """Whether every rank of this attempt has a pod that stays, or has succeeded."""
        staying = {rank for rank, pod in self.current.items() if not pod.deleting}
        return self.attempt > 0 and len(staying | self.succeeded_ranks) >= self.job.spec.num_nodes

    @property
    def gang_was_complete(self) -> bool:
        """Whether that was once so and is recorded: from then on a missing pod is lost, not still to make."""
        return self.attempt > 0 and self.before.get("completeAttempt") == self.attempt

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks that have no pod and have not succeeded."""
        ranks = range(self.job.spec.num_nodes)
        return [rank for rank in ranks if rank not in self.current and rank not in self.succeeded_ranks]

    @property
    def all_succeeded(self) -> bool:
        return len(self.succeeded_ranks) >= self.job.spec.num_nodes

    @property
    def finished(self) -> bool:
        return self.condition_is("Finished", "True")

    @property
    def suspended(self) -> bool:
        return self.condition_is("Suspended", "True")

    @cached_property
    def spec_hash(self) -> str:
        """Digest of what must not change in the spec, as it is now."""
        return spec_hash(self.job.spec)

    @property
    def spec_changed(self) -> bool:
        """Whether a part of the spec that must not change did (one that the CRD's rules cannot see)."""
        recorded = self.before.get("specHash")
        return recorded is not None and recorded != self.spec_hash

    def condition(self, name: str) -> Json | None:
        for condition in self.before.get("conditions") or ():
            if condition.get("type") == name:
                return dict(condition)
        return None

    def condition_is(self, name: str, status: str) -> bool:
        condition = self.condition(name)
        return condition is not None and condition.get("status") == status

    @property
    def active_seconds(self) -> float:
        """Seconds of running so far; the clock stands still while the job is suspended."""
        before = float(self.before.get("activeSeconds") or 0)
        if self.suspended or "startTime" not in self.before:
            return before
        resumed = self.condition("Suspended")
        since = (
            resumed["lastTransitionTime"] if resumed and "activeSeconds" in self.before else self.before["startTime"]
        )
        return before + seconds_between(since, self.now)
