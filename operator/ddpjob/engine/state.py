"""The state of a job: spec, recorded status and observed objects, with the properties that decisions use."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from ddpjob.api.wire import Json, seconds_between
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.attempt import SUSPENDED, Attempt
from ddpjob.engine.desired import Job, is_comparable, spec_hash
from ddpjob.engine.observe import Observed
from ddpjob.engine.pods import PodView, pod_view


@dataclass(frozen=True)
class JobState:
    """All inputs of a plan. ``before`` is the recorded status; its conditions are never read, they are only output."""

    job: Job
    before: Mapping[str, Any]
    observed: Observed
    now: datetime
    settings: EngineSettings

    @cached_property
    def pods(self) -> tuple[PodView, ...]:
        return tuple(pod_view(pod) for pod in self.observed.pods)

    @cached_property
    def attempt(self) -> Attempt:
        """The recorded attempt."""
        return Attempt.recorded(self.before, self.now)

    @cached_property
    def current(self) -> dict[int, PodView]:
        """Pods of the recorded attempt by node_rank."""
        ranks = self.job.node_ranks  # a user may have changed a label
        return {p.node_rank: p for p in self.pods if p.attempt == self.attempt.number and p.node_rank in ranks}

    @cached_property
    def succeeded_nodes(self) -> frozenset[int]:
        """node_ranks of this attempt that exited with 0, including those whose pods no longer exist."""
        recorded = frozenset(self.before.get("succeededNodes") or ())
        if self.attempt.is_closed:
            return recorded  # exit code 0 after the end of the attempt answers the operator's own SIGTERM
        return recorded | {node_rank for node_rank, pod in self.current.items() if pod.state == "succeeded"}

    @cached_property
    def newest_attempt(self) -> int:
        """Highest attempt of any pod of the job."""
        return max((pod.attempt for pod in self.pods), default=0)

    @cached_property
    def all_pods_exist(self) -> bool:
        """Whether each node of this attempt has a pod that is not being deleted, or has succeeded."""
        staying = {node_rank for node_rank, pod in self.current.items() if not pod.deleting}
        return self.attempt.number > 0 and (staying | self.succeeded_nodes).issuperset(self.job.node_ranks)

    @cached_property
    def missing_nodes(self) -> list[int]:
        """node_ranks that have no pod and have not succeeded."""
        done = self.current.keys() | self.succeeded_nodes
        return [node_rank for node_rank in self.job.node_ranks if node_rank not in done]

    @property
    def all_succeeded(self) -> bool:
        return self.succeeded_nodes.issuperset(self.job.node_ranks)

    @property
    def all_stopped(self) -> bool:
        """Whether no pod of this attempt can report a failure any more: it ended, is being deleted, or is gone."""
        return all(pod.ended or pod.deleting for pod in self.current.values())

    @property
    def finished(self) -> bool:
        return "completionTime" in self.before

    @property
    def suspended(self) -> bool:
        """Whether no pod runs because of a suspension."""
        if self.attempt.number == 0:
            return self.job.spec.suspend
        return self.attempt.verdict == SUSPENDED

    @property
    def spec_edited(self) -> bool:
        """Whether the spec changed since the last status."""
        return self.before.get("observedGeneration") != self.job.generation

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
    def last_failure(self) -> Json | None:
        failures = self.before.get("failures") or ()
        return dict(failures[-1]) if failures else None

    @property
    def active_seconds(self) -> float:
        """Seconds that the job was active: all attempts, without suspensions."""
        earlier = float(self.before.get("activeSeconds") or 0)
        if self.suspended or not self.attempt.number:
            return earlier
        return earlier + seconds_between(self.attempt.start_time, self.now)
