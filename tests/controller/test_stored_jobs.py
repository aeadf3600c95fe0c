"""Jobs in the cache: what they take, and when an edit queues them; and the parsed jobs that are kept."""

import json
import tracemalloc
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json
from ddpjob_operator.controller import reconcile
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.reconcile import ParsedJobs
from tests.builders import a_job

KEY = Key("default", "mnist")


def at(version: int, job: Json, **metadata: Any) -> Json:
    return job | {"metadata": job["metadata"] | {"resourceVersion": str(version)} | metadata}


@pytest.mark.parametrize("junk", [[{}] * 18_000, {"a": {"b": {}}}, [None], "x" * 10_000, []])
def test_cached_job_is_returned_as_it_was_stored(junk: Any) -> None:
    job = at(3, a_job(template={"spec": {"x": junk}}))
    for spec in (job["spec"], json.dumps(job["spec"])):
        cache = Cache()
        cache.put(names.DDPJOBS, job | {"spec": spec})
        assert cache.job(KEY) == job


def test_cached_jobs_take_little_more_memory_than_their_compressed_json() -> None:
    """A tenant with a hundred jobs of as many objects as a valid spec may have: 1.2 MB each when decoded."""
    cache = Cache()
    job = a_job(template={"spec": {"x": [{}] * 18_000}})
    tracemalloc.start()
    try:
        for number in range(100):
            cache.put(names.DDPJOBS, at(number + 1, job, name=f"job-{number}", uid=f"u{number}"))
        assert tracemalloc.get_traced_memory()[0] / 100 < 20_000, "bytes per job"
    finally:
        tracemalloc.stop()


def test_metadata_that_the_operator_does_not_use_is_not_kept() -> None:
    cache = Cache()
    cache.put(names.DDPJOBS, at(3, a_job(), annotations={"a": "b"}, managedFields=[{}], labels={"c": "d"}))
    found = cache.job(KEY)
    assert found is not None and not found["metadata"].keys() & {"annotations", "managedFields", "labels"}
    cache.put(names.DDPJOBS, at(4, a_job(), labels={"c": "d", names.LABEL_QUEUE: "research"}))
    found = cache.job(KEY)
    assert found is not None and found["metadata"]["labels"] == {names.LABEL_QUEUE: "research"}


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"metadata": {"annotations": {"a": "b"}}}, []),
        ({"metadata": {"labels": {"a": "b"}}}, []),
        ({"metadata": {"labels": {names.LABEL_QUEUE: "research"}}}, ["soon"]),
        ({"metadata": {"generation": 2}, "spec": {"image": "j"}}, ["soon"]),
        ({"metadata": {"deletionTimestamp": "2026-03-01T12:00:00Z"}}, ["soon"]),
        ({"status": {"state": "Running"}}, ["soon"]),
        ({"metadata": {"uid": "another"}}, ["at once"]),
    ],
    ids=["annotation", "label", "queue", "spec", "deletion", "status", "another job"],
)
def test_edit_of_a_job_queues_it_with_a_pace_and_an_annotation_does_not(edit: Json, expected: list[str]) -> None:
    woken: list[str] = []
    cache = Cache(lambda key: woken.append("at once"), lambda key: woken.append("soon"))
    job = at(1, a_job())
    cache.put(names.DDPJOBS, job)
    assert woken == ["at once"]
    woken.clear()
    cache.put(names.DDPJOBS, at(2, job | {key: job.get(key, {}) | value for key, value in edit.items()}))
    assert woken == expected
    found = cache.job(KEY)
    assert found is not None and found["metadata"]["resourceVersion"] == "2", "a status patch needs the version"


def test_unchanged_spec_is_parsed_once() -> None:
    parsed = ParsedJobs()
    first = parsed.parse(at(1, a_job()))
    assert parsed.parse(at(2, a_job())) is first
    assert parsed.parse(at(3, a_job(suspend=True), generation=2)).spec.suspend
    defaulted = parsed.parse(at(4, a_job(suspend=True, numNodes=3), generation=2))
    assert defaulted.spec.num_nodes == 3, "a new default changes no generation"


def test_parsed_jobs_are_bounded_by_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "MAX_VALUES", 50)
    parsed = ParsedJobs()
    jobs = [at(1, a_job(args=["a"] * 15), uid=f"u{number}") for number in range(3)]
    first, second, third = map(parsed.parse, jobs)
    assert parsed.parse(jobs[2]) is third and parsed.parse(jobs[1]) is second
    assert parsed.parse(jobs[0]) is not first
    parsed.forget("u1")
    assert parsed.parse(jobs[1]) is not second


def test_of_the_finalizers_of_a_deleted_job_a_few_are_kept_and_the_garbage_collectors_first() -> None:
    many = [f"example.com/{number}" for number in range(1000)]
    cache = Cache()
    cache.put(names.DDPJOBS, at(3, a_job(), finalizers=[*many, "orphan"]))
    job = cache.job(KEY)
    assert job is not None and "finalizers" not in job["metadata"]
    cache.put(names.DDPJOBS, at(4, a_job(), finalizers=[*many, "orphan"], deletionTimestamp="2026-03-01T12:00:00Z"))
    job = cache.job(KEY)
    assert job is not None and job["metadata"]["finalizers"] == ["orphan", *many[:2]]
