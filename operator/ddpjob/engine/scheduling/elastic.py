"""Jobs with ``minNodes``: when the next attempt has fewer nodes, and when more.

The size changes only between attempts, and none of these changes costs a restart:

- *Smaller*: not all pods of an attempt have a Kubernetes node after ``partialGangSeconds``, in which no pod of an
  earlier attempt used any. The next attempt has as many as were placed, or with a gang scheduler, which places none of
  them, minNodes.
- *Larger*: all nodes of a smaller attempt run, and ten minutes have passed since the last change. Probes, which are
  pods that need the same room and end at once, ask the scheduler for the missing nodes. If some are placed within a
  minute, the attempt saves a checkpoint and ends, and the next one has as many nodes more.

A job becomes smaller at most once in ten minutes, and larger at most once. A growth after which not all nodes were
placed doubles the time to the next one.
"""

from datetime import datetime, timedelta

from ddpjob.api import names
from ddpjob.api.backoff import doubling
from ddpjob.api.limits import MAX_NODES
from ddpjob.api.pod_view import PodView
from ddpjob.api.spec import DDPJobSpec
from ddpjob.api.status import RUNNING, CurrentAttempt, DDPJobStatus, Size
from ddpjob.api.times import parse_time, remaining, seconds_between, seconds_since, timestamp
from ddpjob.engine.actions import Delete, Obstacle
from ddpjob.engine.attempt import EVICTED
from ddpjob.engine.desired import Job
from ddpjob.engine.evidence import is_on_lost_node
from ddpjob.engine.scheduling import adapters as scheduling
from ddpjob.engine.scheduling import gangs
from ddpjob.engine.state import JobState

NODES_UNAVAILABLE = "NodesUnavailable"
"""Verdict of an attempt that a smaller one follows."""
NODES_AVAILABLE = "NodesAvailable"
"""Verdict of an attempt that a larger one follows."""
RUNNING_SMALLER = "RunningSmaller"
"""All nodes of the attempt run, and it has fewer than numNodes."""
RESIZE_SECONDS = 600.0
"""Shortest time between two changes of the size for the same reason, and from any change to a growth."""
PROBE_SECONDS = 60.0
"""How long probes wait for a Kubernetes node."""
_MAX_WAIT_SECONDS = 6 * 3600.0


def nodes_of(spec: DDPJobSpec, status: DDPJobStatus, attempt: CurrentAttempt) -> int:
    """Return the number of nodes of the recorded attempt of a job with this spec.

    Its pods are judged by the size that it has, also if the spec was edited since: an end must not be lost.
    """
    if status.world is not None and attempt.number and not attempt.is_closed:
        return min(max(status.world.num_nodes, 1), MAX_NODES)
    return _wanted(spec, attempt)


def is_resized(s: JobState) -> bool:
    """Return whether the recorded attempt has another size than the spec, with minNodes, asks for.

    ``auto`` is not compared: another release may count devices in another way.
    """
    world, spec = s.before.world, s.job.spec
    if world is None or s.attempt.number == 0:
        return False
    nproc = world.nproc_per_node if spec.nproc_per_node == "auto" else spec.nproc_per_node
    return (world.num_nodes, world.nproc_per_node) != (_wanted(spec, s.attempt), nproc)


def _wanted(spec: DDPJobSpec, attempt: CurrentAttempt) -> int:
    return spec.num_nodes if attempt.size is None else _within(spec, attempt.size.nodes)


def _within(spec: DDPJobSpec, nodes: int) -> int:
    least = spec.num_nodes if spec.min_nodes is None else spec.min_nodes
    return min(max(nodes, least), spec.num_nodes)


def next_size(s: JobState) -> Size | None:
    """Return the size of the attempt that starts now; None if it is numNodes and was never another.

    After a suspension, or a wait in the queue, which asks for the quota of all nodes, it is numNodes: what is known of
    the nodes is old.
    """
    known, spec = s.attempt.next_size or s.attempt.size, s.job.spec
    if known is None or spec.min_nodes is None:
        return None
    is_back = s.suspended or s.attempt.verdict == EVICTED
    nodes = spec.num_nodes if is_back else _within(spec, known.nodes)
    since = (known.smaller_since or timestamp(s.now)) if nodes < spec.num_nodes else None
    return known.changed(nodes=nodes, smaller_since=since, probe_time=None)


def job_after(s: JobState, begins_attempt: bool) -> Job:
    """Return the job with the size of the attempt after a decision. begins_attempt: it starts another one."""
    if not begins_attempt:
        return s.job
    size = next_size(s)
    return s.job.of_size(size.nodes if size else s.job.spec.num_nodes)


def shrunk(s: JobState, *, gave_up: bool = False) -> Size | None:
    """Return the size of the next attempt if the current one is to end because its nodes are not all there; or None.

    gave_up: a pod has ended because it waited for the others. Then the limit counts from the first attempt in which
    this happened: otherwise a job whose pods give up early would always start again with the same size.
    """
    nodes, left = _placeable(s, gave_up=gave_up), _seconds_to_shrink(s, gave_up=gave_up)
    if nodes is None or left is None or left > 0:
        return None
    now, size = timestamp(s.now), s.attempt.size or Size(nodes=nodes)
    since = size.smaller_since or now
    return size.changed(nodes=nodes, smaller_since=since, shrunk_time=now, probe_time=None, misses=_misses(s, size))


def grown(s: JobState) -> Size | None:
    """Return the size of the next attempt if there is room for more nodes than the current one has; or None."""
    size = s.attempt.size
    if size is None or not is_asking(s) or _may_not_start_again(s):
        return None
    placed = _room(s)
    missing = s.job.spec.num_nodes - s.job.nodes
    if not placed or (placed < missing and _seconds_asking(s) < PROBE_SECONDS):
        return None
    nodes = s.job.nodes + min(placed, missing)
    since = size.smaller_since if nodes < s.job.spec.num_nodes else None
    return size.changed(nodes=nodes, smaller_since=since, grown_time=timestamp(s.now), probe_time=None)


def _may_not_start_again(s: JobState) -> bool:
    """Whether no attempt could follow the current one, which then goes on with the nodes that it has."""
    return s.spec_changed or scheduling.wait(s) is not None


def _room(s: JobState) -> int:
    """Return for how many more pods there is room at the same time.

    A probe ends at once, and the scheduler may place the next one where it was. A deleted one, perhaps of a node that
    is lost, shows nothing.
    """
    placed = [pod for pod in s.observed.pods if pod.is_probe and pod.node_name and not (pod.evicted or pod.deleting)]
    return sum(not any(_came_after(probe, other) for other in placed) for probe in placed)


def _came_after(probe: PodView, other: PodView) -> bool:
    """Whether a probe may have been placed in the room that another one has left; the times have whole seconds."""
    if probe.node_name != other.node_name or probe.started_at is None or other.finished_at is None or probe is other:
        return False
    first = (other.started_at or "", other.name) < (probe.started_at, probe.name)
    return first and probe.started_at >= other.finished_at


def asks(s: JobState) -> bool:
    """Whether probes are to be created now."""
    left = _seconds_to_ask(s)
    return left is not None and left <= 0


def is_asking(s: JobState) -> bool:
    """Whether probes wait for a Kubernetes node; their time is over when it was seen once that it has passed."""
    size = s.attempt.size
    if size is None or size.probe_time is None or s.attempt.phase != RUNNING or s.succeeded_nodes:
        return False
    # Some time longer, so that the plan at the end of the wait counts the probes before it deletes them.
    return _is_recent(size.probe_time, s.now, PROBE_SECONDS * 1.5)


def unused_probes(s: JobState, *, goes_on: bool) -> list[Delete]:
    """Return the deletes of probes, also of earlier questions. goes_on: the current attempt does."""
    is_used = goes_on and is_asking(s)
    unused = (pod for pod in s.observed.pods if pod.is_probe and not (pod.deleting or is_used))
    return [Delete(names.PODS, pod.name, pod.uid) for pod in unused]


def obstacle(s: JobState) -> Obstacle | None:
    """Return that the attempt has fewer nodes than the spec, since when, and when it asks for more; None if not so."""
    size, nodes, wanted = s.attempt.size, s.job.nodes, s.job.spec.num_nodes
    if size is None or nodes >= wanted:
        return None
    then = max(parse_time(time) + timedelta(seconds=wait) for time, wait in _times_before_asking(size))
    text = (
        f"numNodes is {wanted}: the job has fewer since {size.smaller_since}, because no Kubernetes node was free "
        f"for the others; from {timestamp(then)} on the operator looks for room, and when there is some, "
        "the job goes on from a checkpoint with more nodes"
    )
    return RUNNING_SMALLER, text


def waits(s: JobState) -> list[float | None]:
    """Return the seconds until the size may change, or until probes are created or have waited; None for never."""
    asking = PROBE_SECONDS - _seconds_asking(s) if is_asking(s) else None
    over = asking + PROBE_SECONDS / 2 if asking is not None else None
    # No event follows from a probe that is not created.
    asked = PROBE_SECONDS if asks(s) else None
    return [_seconds_to_shrink(s), _seconds_to_ask(s), asked, asking, over]


def _placeable(s: JobState, *, gave_up: bool = False) -> int | None:
    """Return how many nodes the next attempt would have, if it is possible to have fewer; None if it is not.

    gave_up: pods have ended because they waited for the others; they had a Kubernetes node.
    """
    least, current = s.job.spec.min_nodes, s.job.nodes
    if least is None or current <= least:
        return None
    there = (pod for pod in s.current.values() if not pod.deleting and not (is_on_lost_node(pod) or pod.evicted))
    placed = sum(pod.node_name is not None and (gave_up or not pod.ended) for pod in there)
    if gangs.places_all_or_none(s):
        placed = max(placed, least)
    return placed if least <= placed < current else None


def _seconds_to_shrink(s: JobState, *, gave_up: bool = False) -> float | None:
    attempt, limit = s.attempt, s.job.spec.placement.partial_gang_seconds
    may_shrink = s.room_since is not None if gave_up else attempt.phase == RUNNING
    if not (limit and may_shrink) or attempt.all_running_time is not None or _placeable(s, gave_up=gave_up) is None:
        return None
    since = attempt.creating_since or attempt.start_time if gave_up else s.partial_since or s.room_since
    left = limit - seconds_between(since or timestamp(s.now), s.now)
    if attempt.size is not None and attempt.size.shrunk_time is not None:
        left = max(left, remaining(RESIZE_SECONDS, attempt.size.shrunk_time, s.now))
    return left


def _misses(s: JobState, size: Size) -> int | None:
    """Return how many growths in a row failed, if the attempt that ends now was placed only in part."""
    shrunk = size.shrunk_time
    if size.grown_time is None or (shrunk is not None and parse_time(size.grown_time) < parse_time(shrunk)):
        return None
    soon = s.job.spec.placement.partial_gang_seconds + RESIZE_SECONDS
    return (size.misses or 0) + 1 if _is_recent(size.grown_time, s.now, soon) else None


def _seconds_to_ask(s: JobState) -> float | None:
    attempt, size = s.attempt, s.attempt.size
    if size is None or s.job.nodes >= s.job.spec.num_nodes or _may_not_start_again(s):
        return None
    # Not by allRunningTime: no plan follows the one that records it.
    running = sum(pod.state == "running" for pod in s.current.values())
    if attempt.phase != RUNNING or running < s.job.nodes:
        return None
    return max(remaining(wait, time, s.now) for time, wait in _times_before_asking(size))


def _times_before_asking(size: Size) -> list[tuple[str, float]]:
    wait = doubling(RESIZE_SECONDS, (size.misses or 0) + 1, _MAX_WAIT_SECONDS)
    times = (size.shrunk_time, size.grown_time, size.probe_time)
    return [(time, wait) for time in times if time is not None]


def _seconds_asking(s: JobState) -> float:
    size = s.attempt.size
    return seconds_between(size.probe_time, s.now) if size and size.probe_time else 0.0


def _is_recent(time: str, now: datetime, seconds: float) -> bool:
    return 0 <= seconds_since(time, now) < seconds
