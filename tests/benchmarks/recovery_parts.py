"""The parts of a recovery, from the changes of the job and its pods as a watcher sees them.

    killed ─▶ detection ─▶ settling ─▶ ending ─▶ creation ─▶ scheduling ─▶ start ─▶ rendezvous ─▶ first step

Each part ends with the moment that ``MEANING`` gives, and begins where the part before ended. The deletion of the other
pods goes on beside creation and scheduling, so it is measured from the end of *ending* and is no summand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ddpjob.api import names
from ddpjob.api.objects import Json

MEANING = {
    "detection": "from the kill until the API server has the end of a pod",
    "settling": "until the API server has the end of the killed pod; the operator waits for the cause of the failure",
    "ending": "until the status has the next attempt",
    "creation": "until all its pods exist",
    "scheduling": "until all of them have a Kubernetes node",
    "start": "until all containers run, as the API server has it",
    "rendezvous": "until rank 0 has claimed its run: import of torch, rendezvous, data, reading the checkpoint",
    "first step": "until the first step is done",
}
PARTS = tuple(MEANING)


@dataclass(frozen=True)
class Seen:
    """A job or a pod as a watcher saw it.

    time: in seconds since the epoch. gone: it was deleted from the API server.
    """

    time: float
    obj: Json
    gone: bool = False

    @property
    def is_pod(self) -> bool:
        return names.LABEL_ATTEMPT in self.obj["metadata"].get("labels", {})

    @property
    def attempt(self) -> int:
        return int(self.obj["metadata"]["labels"][names.LABEL_ATTEMPT])

    @property
    def node_rank(self) -> int:
        return int(self.obj["metadata"]["labels"][names.LABEL_NODE_RANK])


@dataclass(frozen=True)
class Recovery:
    """One recovery; times in seconds.

    parts: by the names of ``PARTS``.
    deletion: from the end of *ending* until the containers of the first attempt have ended. A new pod that needs what
        they hold, such as a device, is not scheduled before.
    """

    parts: dict[str, float]
    deletion: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def operator(self) -> float:
        """The time between the API server's event of the killed pod and the existence of all new pods."""
        return self.parts["ending"] + self.parts["creation"]


def recovery(seen: Iterable[Seen], killed: float, claimed: float, stepped: float) -> Recovery:
    """Return the parts of the recovery from attempt 1 to attempt 2 of two nodes, after the kill of node 1's pod.

    killed: when the pod was killed. claimed, stepped: the times in the rows of the second run.
    """
    after = [one for one in seen if one.time >= killed]
    old, new = ([one for one in after if one.is_pod and one.attempt == attempt] for attempt in (1, 2))
    lost = [one for one in old if _is_lost(one)]
    ends = [
        min(one.time for one in lost),
        min(one.time for one in lost if one.node_rank == 1),
        min(one.time for one in after if not one.is_pod and one.obj.get("status", {}).get("attempt") == 2),
        _all(new, lambda one: True),
        _all(new, _has_node),
        _all(new, _runs),
        claimed,
        stepped,
    ]
    moments = dict(zip(PARTS, _never_earlier(killed, ends), strict=True))
    begins = [killed, *moments.values()]
    parts = {name: end - begin for begin, (name, end) in zip(begins, moments.items(), strict=False)}
    return Recovery(parts, max(0.0, _all(old, _has_ended) - moments["ending"]))


def _all(seen: Iterable[Seen], holds: Callable[[Seen], bool]) -> float:
    """Return when it first held for the last of the two pods."""
    first: dict[str, float] = {}
    for one in seen:
        if holds(one):
            first.setdefault(one.obj["metadata"]["name"], one.time)
    assert len(first) == 2, f"it held for {sorted(first)} only"
    return max(first.values())


def _never_earlier(begin: float, times: Iterable[float]) -> Iterator[float]:
    """Yield the times; one that is earlier than the one before counts as equal, because steps may overlap."""
    for time in times:
        begin = max(begin, time)
        yield begin


def _has_node(one: Seen) -> bool:
    return bool(one.obj["spec"].get("nodeName"))


def _runs(one: Seen) -> bool:
    return any("running" in state for state in _states(one.obj))


def _is_lost(one: Seen) -> bool:
    return _has_ended(one) or "deletionTimestamp" in one.obj["metadata"]


def _has_ended(one: Seen) -> bool:
    return one.gone or any("terminated" in state for state in _states(one.obj))


def _states(pod: Json) -> list[Json]:
    return [container.get("state") or {} for container in pod.get("status", {}).get("containerStatuses") or ()]
