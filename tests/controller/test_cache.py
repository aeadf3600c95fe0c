"""The cache believes the newest it was told, in whatever order it is told."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.api import names
from ddpjob.cluster.base import ObjectList
from ddpjob.controller.cache import Cache, Key, is_labelled

JOB = "11111111-job"


def a_pod(name: str, version: int, *, uid: str = "", job: str = JOB, **more: Any) -> dict[str, Any]:
    labels = {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_JOB_NAME: "mnist",
        names.LABEL_JOB_UID: job,
    }
    meta = {"namespace": "default", "name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": meta | {"labels": labels} | more}


def names_of(cache: Cache) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in cache.pods(JOB))


def test_the_newer_version_wins_whichever_comes_last() -> None:
    cache = Cache()
    assert cache.put(names.PODS, a_pod("a", 20))
    assert not cache.put(names.PODS, a_pod("a", 9))
    known = cache.get(names.PODS, "default", "a")
    assert known is not None
    assert known["metadata"]["resourceVersion"] == "20"


def test_a_repetition_wakes_nobody() -> None:
    woken: list[Key] = []
    cache = Cache(woken.append)
    cache.put(names.PODS, a_pod("a", 1))
    cache.put(names.PODS, a_pod("a", 1))
    assert woken == [Key("default", "mnist")]


def test_a_late_answer_does_not_raise_the_dead() -> None:
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 5))
    cache.remove(names.PODS, "default", "a", "uid-a")
    assert not cache.put(names.PODS, a_pod("a", 7))
    assert names_of(cache) == []


def test_a_deletion_may_be_told_before_the_creation() -> None:
    cache = Cache()
    cache.remove(names.PODS, "default", "a", "uid-a")
    assert not cache.put(names.PODS, a_pod("a", 5))


def test_a_deletion_of_the_former_bearer_of_a_name_spares_the_present_one() -> None:
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 9, uid="second"))
    assert not cache.remove(names.PODS, "default", "a", "first")
    assert names_of(cache) == ["a"]


def test_a_new_bearer_of_a_name_buries_the_former_one() -> None:
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 5, uid="first"))
    cache.put(names.PODS, a_pod("a", 9, uid="second"))
    assert not cache.put(names.PODS, a_pod("a", 30, uid="first"))
    known = cache.get(names.PODS, "default", "a")
    assert known is not None
    assert known["metadata"]["uid"] == "second"


def test_a_pod_whose_label_moves_to_another_job_is_counted_there_alone() -> None:
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 1))
    cache.put(names.PODS, a_pod("a", 2, job="other"))
    assert names_of(cache) == []
    assert len(cache.pods("other")) == 1


def test_a_list_heals_a_deletion_that_no_event_told() -> None:
    woken: list[Key] = []
    cache = Cache(woken.append)
    cache.put(names.PODS, a_pod("a", 1))
    cache.put(names.PODS, a_pod("b", 2))
    woken.clear()
    assert cache.replace(names.PODS, ObjectList((a_pod("a", 1),), "10")) == 1
    assert names_of(cache) == ["a"]
    assert woken == [Key("default", "mnist")]


def test_a_list_does_not_lose_what_was_created_after_it_was_read() -> None:
    cache = Cache()
    cache.put(names.PODS, a_pod("new", 11))
    assert cache.replace(names.PODS, ObjectList((), "10")) == 0
    assert names_of(cache) == ["new"]


def test_a_list_with_a_selector_says_nothing_of_objects_it_does_not_select() -> None:
    cache = Cache()
    cache.put(names.CLAIMS, a_pod("claim", 1, labels={}))
    cache.replace(names.CLAIMS, ObjectList((), "10"), is_labelled)
    assert cache.get(names.CLAIMS, "default", "claim")
    assert len(cache.unlabelled(names.CLAIMS)) == 1


def test_managed_fields_are_not_kept() -> None:
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 1, managedFields=[{"manager": "kubectl"}]))
    assert "managedFields" not in cache.pods(JOB)[0]["metadata"]


def test_jobs_are_counted_by_state() -> None:
    cache = Cache()
    for number, state in enumerate(("Running", "Running", "Failed", None)):
        job = a_pod(f"job-{number}", number + 1) | ({"status": {"state": state}} if state else {})
        cache.put(names.DDPJOBS, job)
    assert cache.count_states() == {"Running": 2, "Failed": 1, "New": 1}


@given(st.data())
def test_any_order_of_events_with_any_repetitions_ends_in_the_same_state(data: st.DataObject) -> None:
    """Three lives of one name: each object is created, changed and (but the last) deleted, told in any order."""
    history: list[tuple[str, dict[str, Any]]] = []
    version = 0
    for life in range(3):
        for _ in range(data.draw(st.integers(1, 3))):
            version += 1
            history.append(("put", a_pod("a", version, uid=f"life-{life}")))
        if life < 2:
            history.append(("remove", a_pod("a", version, uid=f"life-{life}")))
    told = data.draw(st.permutations(history + data.draw(st.lists(st.sampled_from(history)))))
    cache = Cache()
    for kind, obj in told:
        if kind == "put":
            cache.put(names.PODS, a_pod("a", int(obj["metadata"]["resourceVersion"]), uid=obj["metadata"]["uid"]))
        else:
            cache.remove(names.PODS, "default", "a", obj["metadata"]["uid"])
    known = cache.get(names.PODS, "default", "a")
    assert known is not None
    assert (known["metadata"]["uid"], known["metadata"]["resourceVersion"]) == ("life-2", str(version))
    assert names_of(cache) == ["a"]


@pytest.mark.parametrize("version", ["", "not-a-number"])
def test_a_version_that_is_no_number_is_older_than_any(version: str) -> None:
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 1))
    odd = a_pod("a", 2)
    odd["metadata"]["resourceVersion"] = version
    assert not cache.put(names.PODS, odd)
