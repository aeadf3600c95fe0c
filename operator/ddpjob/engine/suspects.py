"""Kubernetes nodes that new attempts avoid, because two failures within an hour point to them.

Before a job has trained, one failure to start is enough: a node that ends pods at once has room for the next ones.
"""

import re
from collections.abc import Collection
from datetime import datetime

from ddpjob.api.limits import MAX_AVOIDED
from ddpjob.api.pod_view import PodView
from ddpjob.api.status import AvoidedNode, DDPJobStatus, Failure
from ddpjob.api.times import seconds_since, since
from ddpjob.engine.attempt import whole_second_after
from ddpjob.engine.failures import Before
from ddpjob.engine.judgement import suspects_at_start
from ddpjob.engine.state import JobState

AVOID_SECONDS = 3600
"""For how long a node is avoided, and how far apart the two failures may be."""
UNSCHEDULABLE_SECONDS = 30
"""How long an attempt may find no Kubernetes node before it uses the avoided nodes again."""
NODES_NEEDED = "AvoidedNodesNeeded"
"""Why an attempt ends that found no other Kubernetes node: the next one may use those that it avoided."""
_FULL = re.compile(r"\b(\d+) No preemption victims found")
"""Nodes that would have room without pods which the scheduler may not end. It says of nodes that are too small, since
Kubernetes 1.32, that preemption is not helpful."""


def avoided(status: DDPJobStatus, now: datetime) -> list[AvoidedNode]:
    """Return the entries of ``status.avoidNodes`` whose time has not passed, and that no wrong clock made."""
    return [node for node in status.avoid_nodes or () if 0 < -seconds_since(node.until, now) <= AVOID_SECONDS + 1]


def avoided_after(status: DDPJobStatus, failure: Failure, now: datetime, *, has_trained: bool) -> list[AvoidedNode]:
    """Return the entries of ``status.avoidNodes`` after one more failure."""
    nodes, name = avoided(status, now), failure.node_name
    before = failed_before(status.failures or (), name, now)
    # A node that ends pods at once has room; one that failed so before, and was avoided, has shown it twice.
    is_first = suspects_at_start(failure) and (not has_trained or before is not None)
    if not name or not failure.node_suspected or not (is_first or before == "lately"):
        return nodes
    new = AvoidedNode(node_name=name, reason=failure.reason, until=whole_second_after(now, AVOID_SECONDS))
    return [*(node for node in nodes if node.node_name != name), new][-MAX_AVOIDED:]


def failed_before(failures: Collection[Failure], name: str | None, now: datetime) -> Before:
    """Return whether earlier failures suspect the Kubernetes node of this name."""
    ages = [seconds_since(f.time, now) for f in failures if f.node_suspected and name and f.node_name == name]
    if not ages:
        return None
    return "lately" if min(ages) <= AVOID_SECONDS else "long ago"


def others_are_full(pods: Collection[PodView]) -> bool:
    """Return whether Kubernetes nodes have no room for a pod because of pods that are not of this attempt."""
    held = {pod.node_name for pod in pods if pod.node_name}
    counts = (int(found[1]) for pod in pods if (found := _FULL.search(pod.unschedulable or "")))
    return any(count > len(held) for count in counts)


def no_other_node_since(s: JobState) -> str | None:
    """Since when the scheduler names no Kubernetes node for a pod but those to avoid, also none that is only full.

    None if it is not so now. By the operator's clock; after it was set back, from now on.
    """
    pods = s.current.values()
    is_starting = not s.attempt.is_closed and s.attempt.all_running_time is None and s.room_since is not None
    is_waiting = bool(s.before.avoid_nodes) and any(pod.unschedulable is not None for pod in pods)
    if not (is_starting and is_waiting) or others_are_full(pods):
        return None
    return since(s.attempt.no_other_node_since, s.now)
