"""Kubernetes nodes that new attempts avoid, because two failures within an hour point to them.

Before a job has trained, one failure to start is enough: a node that ends pods at once has room for the next ones.

A node on which a rank was slow in two attempts is avoided in a weaker way, if the spec asks for it: other nodes are
preferred, and none is waited for. One observation is a verdict of the launchers that lasted for ten minutes of an
attempt, of a part of the steps that depends on the node. It counts for the node only while the same rank was slow on no
other one: then its work takes longer wherever it runs.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from itertools import pairwise

from ddpjob.api.limits import MAX_AVOIDED
from ddpjob.api.pod_view import PodView
from ddpjob.api.status import AvoidedNode, DDPJobStatus, Failure, SlowNode, SlowStatus
from ddpjob.api.times import parse_time, seconds_between, seconds_since, since
from ddpjob.engine.attempt import whole_second_after
from ddpjob.engine.failures import Before
from ddpjob.engine.judgement import suspects_at_start
from ddpjob.engine.obstacles import TRAINING_SLOW
from ddpjob.engine.state import JobState

AVOID_SECONDS = 3600
"""For how long a node is avoided, and how far apart the two failures may be."""
UNSCHEDULABLE_SECONDS = 30
"""How long an attempt may find no Kubernetes node before it uses the avoided nodes again."""
NODES_NEEDED = "AvoidedNodesNeeded"
"""Why an attempt ends that found no other Kubernetes node: the next one may use those that it avoided."""
SLOW_SECONDS = 600
"""How long a rank is slow in an attempt before that says something about its Kubernetes node."""
PARTS_OF_NODES = frozenset({"forward", "backward", "optimizer", "queue"})
"""Parts of a step that take longer on a worse node. Data, the script and the CPU limit are facts of the job."""
_FULL = re.compile(r"\b(\d+) No preemption victims found")
"""Nodes that would have room without pods which the scheduler may not end. It says of nodes that are too small, since
Kubernetes 1.32, that preemption is not helpful."""


def avoided(status: DDPJobStatus, now: datetime) -> list[AvoidedNode]:
    """Return the entries of ``status.avoidNodes`` whose time has not passed, and that no wrong clock made."""
    return [node for node in status.avoid_nodes or () if _lasts(node, now)]


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


def banned(status: DDPJobStatus) -> list[AvoidedNode]:
    """Return the entries of ``status.avoidNodes`` on which pods must not run, also those whose time has passed."""
    return [node for node in status.avoid_nodes or () if not node.is_slow]


def slow_after(s: JobState, now: SlowStatus | None) -> list[SlowNode] | None:
    """Return ``status.slowNodes`` after a change of ``status.slow``; None if the spec does not ask for them.

    A verdict has lasted until rank 0's last report: it may have ended while no operator ran. Of each rank on each
    Kubernetes node, the last two attempts are kept.
    """
    if not s.job.spec.placement.avoid_slow_nodes:
        return None
    known, seen, entries = s.before.slow, s.before.progress, s.before.slow_nodes
    until = seen.last_heartbeat_time if seen is not None else None
    if known is None or until is None or (now is not None and now.since == known.since):
        return entries
    if known.node_name is None or known.rank is None or known.part not in PARTS_OF_NODES:
        return entries
    if seconds_between(known.since, parse_time(until)) < SLOW_SECONDS:
        return entries
    new = SlowNode(
        node_name=known.node_name, attempt=s.attempt.number, rank=known.rank, part=known.part, since=known.since,
        time=until,
    )  # fmt: skip
    place = new.node_name, new.rank
    same = [each for each in entries or () if (each.node_name, each.rank) == place and each.attempt != new.attempt]
    others = [each for each in entries or () if (each.node_name, each.rank) != place]
    return [*others, *same[-1:], new][-MAX_AVOIDED:]


def with_slow(nodes: Collection[AvoidedNode], found: Sequence[SlowNode], now: datetime) -> list[AvoidedNode]:
    """Return entries of ``status.avoidNodes`` with the nodes that ``status.slowNodes`` shows to be slow, and no others.

    Those of failures are kept first.
    """
    failed = [node for node in nodes if not node.is_slow]
    names = {node.node_name for node in failed}
    slow = [node for node in _slow(found, now) if node.node_name not in names]
    return [*slow, *failed][-MAX_AVOIDED:]


def _slow(found: Sequence[SlowNode], now: datetime) -> Iterator[AvoidedNode]:
    """Yield the nodes on which ranks that were slow nowhere else were slow in two attempts, at most an hour apart."""
    moved = {
        each.rank
        for each in found
        for other in found
        if (each.rank == other.rank) and each.node_name != other.node_name
    }
    for name in dict.fromkeys(each.node_name for each in found):
        own = sorted((e for e in found if e.node_name == name and e.rank not in moved), key=lambda e: e.time)
        attempts = {
            attempt
            for before, after in pairwise(own)
            if before.attempt != after.attempt
            and seconds_between(before.time, parse_time(after.since)) <= AVOID_SECONDS
            for attempt in (before.attempt, after.attempt)
        }
        if attempts and 0 <= seconds_since(own[-1].time, now) < AVOID_SECONDS:
            until = whole_second_after(parse_time(own[-1].time), AVOID_SECONDS)
            yield AvoidedNode(node_name=name, reason=TRAINING_SLOW, until=until, attempts=sorted(attempts))


def _lasts(node: AvoidedNode, now: datetime) -> bool:
    return 0 < -seconds_since(node.until, now) <= AVOID_SECONDS + 1


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
    is_waiting = bool(banned(s.before)) and any(pod.unschedulable is not None for pod in pods)
    if not (is_starting and is_waiting) or others_are_full(pods):
        return None
    return since(s.attempt.no_other_node_since, s.now)
