"""The index of partial jobs: the eldest, as by a comparison of all jobs, and whom each change wakes."""

import json
import random
from datetime import timedelta
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json
from ddpjob.api.times import parse_time
from ddpjob.engine.scheduling.guard import ELDER_SECONDS
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.partial_jobs import PartialJobs

SINCE = "2026-03-01T12:00:00Z"
PARTIAL = {"number": 1, "phase": "Running", "startTime": SINCE, "partialSince": SINCE}
YIELDED = {"number": 1, "phase": "Ending", "startTime": SINCE, "yields": 1} | {
    "ending": {"verdict": "YieldedTo", "since": SINCE}
}
GAVE_UP = YIELDED | {"ending": {"verdict": "PartiallyScheduled", "since": SINCE}}
PLACED = {"number": 1, "phase": "Running", "startTime": SINCE, "yields": 1}


def a_job(name: str, attempt: Json | None, *, created: int = 0, priority: int | None = None, **more: Any) -> Json:
    given = attempt and attempt | ({"podPriority": priority} if priority is not None else {})
    meta = {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": "1"}
    meta["creationTimestamp"] = f"2026-03-01T12:00:{created:02}Z"
    return {"metadata": meta, "spec": {}, "status": {"currentAttempt": given} if given else {}} | more


class Jobs:
    """An index, and the keys that it woke."""

    def __init__(self) -> None:
        self.woken: list[str] = []
        self.now = parse_time(SINCE)
        self.index = PartialJobs(lambda key: self.woken.append(key.name), lambda: self.now)

    def observe(self, *jobs: Json) -> list[str]:
        self.woken.clear()
        for job in jobs:
            self.index.observe(Key("default", job["metadata"]["name"]), job)
        return self.woken

    def elder(self, name: str) -> str | None:
        found = self.index.elder(Key("default", name))
        return found.name if found is not None else None


@pytest.mark.parametrize(
    "gone",
    [
        a_job("a", PLACED),
        a_job("a", GAVE_UP),
        a_job("a", YIELDED),
        a_job("a", None),
        a_job("a", PARTIAL, status={"currentAttempt": PARTIAL, "completionTime": SINCE}),
        a_job("a", PARTIAL, spec={"managedBy": "example.com/other"}),
        a_job("a", PARTIAL, spec='{"managedBy": "example.com/other"}'),
        a_job("a", PARTIAL, status={"currentAttempt": "spoiled"}),
        a_job("a", PARTIAL | {"partialSince": "spoiled"}),
    ],
)
def test_job_that_is_not_partial_is_no_elder(gone: Json) -> None:
    jobs = Jobs()
    jobs.observe(a_job("a", PARTIAL), a_job("b", YIELDED, created=1), a_job("c", YIELDED, created=2))
    assert jobs.elder("b") == jobs.elder("c") == "a"
    assert jobs.observe(gone) == ["b", "c"]
    assert jobs.elder("b") is None


@pytest.mark.parametrize("spent", [0, 600])
def test_job_that_never_fits_counts_as_elder_for_half_an_hour(spent: int) -> None:
    """With ``partialGangSeconds: 0`` it stays partial for ever, and was the elder of the jobs of all tenants."""
    jobs = Jobs()
    jobs.observe(
        a_job("poison", PARTIAL | {"elderSeconds": spent}),
        a_job("b", YIELDED, created=1),
        a_job("c", PARTIAL, created=2),
        a_job("d", PARTIAL, created=3),
    )
    jobs.now += timedelta(seconds=ELDER_SECONDS - spent - 1)
    assert [jobs.elder(name) for name in "bcd"] == ["poison"] * 3
    jobs.observe(a_job("c", PARTIAL | {"partialSince": "2026-03-01T12:29:00Z"}, created=2))
    jobs.now += timedelta(seconds=2)
    assert [jobs.elder(name) for name in "bcd"] == [None, None, "c"], "the next one of the order"
    assert {"b", "c"} <= {*jobs.woken} and jobs.elder("poison") is None
    jobs.observe(a_job("poison", PARTIAL | {"elderSeconds": ELDER_SECONDS}))
    assert jobs.elder("d") == "c"


@pytest.mark.parametrize("spoiled", [{"elderSeconds": 2**53}, {"partialSince": "9999-12-31T23:59:59Z"}])
def test_status_that_a_user_spoiled_keeps_no_job_from_the_index(spoiled: Json) -> None:
    """The cache takes each job with it: an error would end the watch of the jobs of all tenants."""
    jobs = Jobs()
    jobs.observe(a_job("spoiled", PARTIAL | spoiled), a_job("b", PARTIAL, created=1), a_job("c", PARTIAL, created=2))
    assert jobs.elder("c") in ("b", "spoiled")


def devices(**amounts: Any) -> Json:
    return {"limits": {name.replace("_", ".") + ".com/gpu": amount for name, amount in amounts.items()} | {"cpu": 4}}


@pytest.mark.parametrize(
    ("spec", "competes"),
    [
        ({}, False),
        ({"resources": devices(nvidia=8)}, True),
        (json.dumps({"resources": devices(nvidia=8)}), True),
        ({"resources": devices(amd=8)}, False),
        ({"resources": devices(amd="0", nvidia=1)}, True),
        ({"template": {"spec": {"containers": [{"name": "trainer", "resources": devices(nvidia=1)}]}}}, True),
        ({"template": {"spec": {"containers": "spoiled"}}, "resources": ["spoiled"]}, False),
    ],
)
def test_only_jobs_with_the_same_kind_of_device_compete(spec: Any, competes: bool) -> None:
    jobs = Jobs()
    jobs.observe(a_job("elder", PARTIAL, spec=spec))
    jobs.observe(a_job("victim", YIELDED, created=1, spec={"resources": devices(nvidia=8)}))
    assert jobs.elder("victim") == ("elder" if competes else None)
    jobs.observe(a_job("victim", YIELDED, created=1, spec=spec))
    assert jobs.elder("victim") == "elder", "an edit while it is suspended moves it"


def test_cache_keeps_the_index_and_forgets_deleted_jobs() -> None:
    woken: list[Key] = []
    cache = Cache(on_change=woken.append, now=lambda: parse_time(SINCE))
    for number, (name, attempt) in enumerate([("a", PARTIAL), ("b", YIELDED), ("c", None)]):
        cache.put(names.DDPJOBS, a_job(name, attempt, created=number), wake=False)
    elder = cache.elder(Key("default", "b"))
    assert elder is not None and (elder.name, elder.since) == ("a", SINCE)
    assert cache.elder(Key("default", "c")) is None and not woken
    cache.remove(names.DDPJOBS, "default", "a", "uid-a")
    assert cache.elder(Key("default", "b")) is None and Key("default", "b") in woken


@pytest.mark.parametrize("seed", range(20))
def test_any_changes_wake_each_job_whose_elder_came_or_went(seed: int) -> None:
    chance = random.Random(seed)
    jobs, known = Jobs(), dict[str, Json]()
    for _ in range(200):
        name = chance.choice("abcdefgh")
        attempt = chance.choice((PARTIAL, PARTIAL, YIELDED, YIELDED, PLACED, None))
        before = {each: jobs.elder(each) is not None for each in known}
        known[name] = a_job(name, attempt, created=chance.randrange(3), priority=chance.choice((None, 5)))
        jobs.observe(known[name])
        partial = {each: _rank(job) for each, job in known.items() if "partialSince" in _attempt(job)}
        eldest = min(partial, key=partial.__getitem__, default=None)
        for each, job in known.items():
            waits = each in partial or "ending" in _attempt(job)
            has_elder = eldest is not None and waits and partial[eldest] < _rank(job)
            assert jobs.elder(each) == (eldest if has_elder else None)
            came = each in partial and has_elder and not before.get(each, has_elder)
            went = waits and before.get(each, False) and not has_elder
            assert each == name or each in jobs.woken or not (came or went)


def _attempt(job: Json) -> Json:
    return dict((job["status"] or {}).get("currentAttempt") or {})


def _rank(job: Json) -> tuple[int, str, str]:
    meta = job["metadata"]
    return -_attempt(job).get("podPriority", 0), meta["creationTimestamp"], meta["uid"]
