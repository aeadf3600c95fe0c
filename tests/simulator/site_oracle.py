"""What must hold of a job whose program trains by itself (``site``), beside the invariants of ``oracle``."""

import math
from collections.abc import Iterable, Mapping

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.times import parse_time, seconds_since, timestamp
from tests.simulator.oracle import History
from tests.simulator.programs import Program
from tests.simulator.simulation import START
from tests.simulator.site import Site
from tests.simulator.volume import Access, Volume, Writer
from tests.worlds.memory.store import Change

STRAY_SECONDS = 60.0
"""For how long a pod may exist that the job cannot find again: a webhook took its labels or its owner."""
MAX_REPEATS = 36
"""Restarts after which a program with an error must have failed. The limit of the defaults is 12, and the last saves
before the error, of pods that get SIGTERM at different steps, are progress once or twice."""


def check_site(changes: History, site: Site, *, fails: bool = False) -> None:
    """Check a run. fails: the program has an error. Raises ``AssertionError``."""
    if found := overlaps(changes, site.volumes.values()):
        old, new = found[0]
        raise AssertionError(
            f"attempt {old.writer.attempt} wrote step {old.step} at {old.time:.0f} s, after attempt "
            f"{new.writer.attempt} began at {new.time:.0f} s ({len(found)} such writes)"
        )
    check_ends(changes, site.programs, fails=fails)
    check_strays(changes)


def overlaps(changes: History, volumes: Iterable[Volume]) -> list[tuple[Access, Access]]:
    """Return each save of an old attempt after a newer one began, with the first access of that one.

    Not of a pod that nothing in the cluster shows any more, nor after its own deadline: then no operator can know that
    it writes. Nor beside another job that lives: its condition says so.
    """
    pods, jobs = _Pods(changes), _deletions(changes, names.DDPJOBS)
    found = []
    for volume in volumes:
        for save, newer in volume.late_saves():
            is_other_alive = newer.writer.job != save.writer.job and newer.time < jobs.get(save.writer.job, math.inf)
            if pods.may_write(save.writer, newer.time) and not is_other_alive:
                found.append((save, newer))
    return found


def check_ends(changes: History, programs: Mapping[str, Program], *, fails: bool) -> None:
    """Check that no job is lost whose program is good, and that one with an error does not run for ever."""
    last: dict[str, Json] = {}
    for _, change in changes:
        if change.resource is names.DDPJOBS and change.obj["metadata"]["name"] in programs:
            last[change.obj["metadata"]["uid"]] = change.obj
    for job in last.values():
        status, name = job.get("status") or {}, job["metadata"]["name"]
        state = status.get("state")
        if state == "Failed" and not fails:
            reasons = [failure["reason"] for failure in status.get("failures", ())]
            end = [c["reason"] for c in status["conditions"] if c["type"] == "Failed"]
            raise AssertionError(f"the job {name} is lost: {end} after {reasons}")
        if fails:
            assert state == "Failed", f"the program of {name} has an error, and the job is {state}"
            restarts = int(status.get("restarts") or 0)
            assert restarts <= MAX_REPEATS, f"the program of {name} has an error and was restarted {restarts} times"


def check_strays(changes: History) -> None:
    """Check that a pod without the job's labels or owner, as a webhook left it, is deleted soon."""
    created: dict[str, tuple[float, Change]] = {}
    for time, change in changes:
        meta = change.obj["metadata"]
        if change.resource is not names.PODS:
            continue
        if change.type == "DELETED" or "deletionTimestamp" in meta:
            if meta["uid"] in created:
                since, first = created.pop(meta["uid"])
                lasted = time - since
                assert lasted <= STRAY_SECONDS, f"{first.obj['metadata']['name']} was of no job for {lasted:.0f} s"
        elif change.type == "ADDED" and _is_stray(change.obj):
            created[meta["uid"]] = time, change
    left = [change.obj["metadata"]["name"] for _, change in created.values()]
    assert not left, f"pods of no job are left: {left}"


def _is_stray(pod: Json) -> bool:
    meta = pod["metadata"]
    return not meta.get("ownerReferences") or names.LABEL_JOB_UID not in (meta.get("labels") or {})


class _Pods:
    """When each pod was deleted, and until when it may run."""

    def __init__(self, changes: History) -> None:
        self._gone = _deletions(changes, names.PODS)
        self._deadlines: dict[str, list[tuple[float, float]]] = {}
        for time, change in changes:
            meta = change.obj["metadata"]
            if change.resource is names.PODS and (given := meta.get("deletionTimestamp")):
                deadline = seconds_since(timestamp(START), parse_time(given))
                self._deadlines.setdefault(meta["uid"], []).append((time, deadline))

    def may_write(self, writer: Writer, time: float) -> bool:
        """Return whether the API server showed at this time that the pod of a writer might still write."""
        known = [deadline for since, deadline in self._deadlines.get(writer.pod, ()) if since <= time]
        return time < self._gone.get(writer.pod, math.inf) and time < (known[-1] if known else math.inf)


def _deletions(changes: History, resource: object) -> dict[str, float]:
    return {
        change.obj["metadata"]["uid"]: time
        for time, change in changes
        if change.resource is resource and change.type == "DELETED"
    }
