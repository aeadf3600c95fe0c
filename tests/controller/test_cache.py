"""The cache keeps the newest state, in any order of events."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob.api.objects import Json, owner_uid
from ddpjob.engine.actions import Change, Plan
from ddpjob.engine.desired import Job
from ddpjob.engine.network import desired_service, service_change
from ddpjob_operator.cluster.base import Conflict, Page
from ddpjob_operator.controller.apply import Executor
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.listing import VersionsWentBackError, list_into
from tests.builders import a_job, ended, running

JOB = "11111111-job"


class Listed:
    """A cluster that answers a LIST with these pages; functions between them are called when they are due."""

    def __init__(self, *steps: Page | Callable[[], object]) -> None:
        self._steps = steps

    async def pages(self, *_: Any) -> AsyncIterator[Page]:
        for step in self._steps:
            if isinstance(step, Page):
                yield step
            else:
                step()


def apply_list(cache: Cache, resource: names.Resource, *steps: Page | Callable[[], object], job_uid: str = "") -> int:
    """Apply a LIST; return the number of changed objects."""
    cluster: Any = Listed(*steps)
    changes, _ = asyncio.run(list_into(cache, cluster, resource, None, job_uid=job_uid))
    return changes


def a_pod(name: str, version: int, *, uid: str = "", job: str = JOB, **more: Any) -> dict[str, Any]:
    labels = {
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
        names.LABEL_JOB_NAME: "mnist",
        names.LABEL_JOB_UID: job,
        names.LABEL_ATTEMPT: "1",
    }
    meta = {"namespace": "default", "name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": meta | {"labels": labels} | more}


def names_of(cache: Cache) -> list[str]:
    return sorted(pod.name for pod in cache.pods("default", JOB))


def known(cache: Cache, name: str) -> tuple[str, int]:
    """Return uid and version of the cached pod."""
    (entry,) = [entry for entry in cache.entries(names.PODS) if entry.name == name]
    return entry.uid, entry.version


def test_groups_follow_their_owner_and_wake_a_job_only_with_news() -> None:
    woken: list[Key] = []
    cache = Cache(on_change=lambda key: None, on_update=woken.append)

    def put(owner: str, version: int, message: str) -> None:
        meta: Json = {"name": "g-1", "namespace": "default", "uid": "g", "resourceVersion": str(version)}
        meta |= {"labels": {names.LABEL_JOB_NAME: "mnist", names.LABEL_JOB_UID: "a"}}
        meta |= {"ownerReferences": [{"kind": "DDPJob", "name": "mnist", "uid": owner, "controller": True}]}
        status = {"conditions": [{"type": "Unschedulable", "status": "True", "message": message, "id": version}]}
        cache.put(names.VOLCANO_GROUPS, {"metadata": meta, "spec": {"minMember": 2}, "status": status})

    put("a", 1, "full")
    put("a", 2, "full")
    assert not woken
    put("a", 3, "still full")
    put("b", 4, "still full")
    assert len(woken) == 2 and not cache.groups("default", "a")
    [group] = cache.groups("default", "b")[names.VOLCANO_GROUPS]
    assert group["status"]["conditions"] == [{"type": "Unschedulable", "status": "True", "message": "still full"}]
    cache.remove(names.VOLCANO_GROUPS, "default", "g-1", "g")
    assert not cache.groups("default", "b")


def test_pod_of_another_namespace_is_no_pod_of_the_job() -> None:
    """Whoever can read the job's uid can copy its labels and its owner reference to a pod that fails."""
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 20))
    forged = a_pod("b", 21)
    forged["metadata"] |= {"namespace": "another"}
    cache.put(names.PODS, forged)
    assert names_of(cache) == ["a"]
    cache.take(
        names.PODS, {"type": "DELETED", "object": forged | {"metadata": forged["metadata"] | {"resourceVersion": "22"}}}
    )
    assert names_of(cache) == ["a"]


def test_pod_whose_label_was_removed_and_restored_is_seen_again() -> None:
    """A watch with a label selector reports the removed label as a deletion; a LIST leaves the pod out."""
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 5))
    cache.take(names.PODS, {"type": "DELETED", "object": a_pod("a", 8)})
    assert not cache.put(names.PODS, a_pod("a", 8)), "an older response, for example to a DELETE"
    assert cache.put(names.PODS, a_pod("a", 9)) and names_of(cache) == ["a"]
    apply_list(cache, names.PODS, Page((), "12"))
    assert not cache.put(names.PODS, a_pod("a", 12)) and names_of(cache) == []
    assert cache.put(names.PODS, a_pod("a", 13)) and names_of(cache) == ["a"]


def test_pods_of_a_deleted_job_of_the_same_name_are_found_until_they_are_gone() -> None:
    cache = Cache()
    owner = [{"kind": "DDPJob", "name": "mnist", "uid": JOB, "controller": True}]
    cache.put(names.PODS, a_pod("a", 1, ownerReferences=owner))
    cache.put(names.PODS, a_pod("orphan", 2))
    forged = {names.LABEL_JOB_NAME: "mnist", names.LABEL_JOB_UID: "another"}
    cache.put(names.PODS, a_pod("forged", 3, labels=forged, ownerReferences=owner))
    mnist = Key("default", "mnist")
    assert sorted(pod.name for pod in cache.former_pods(mnist, "new")) == ["a", "orphan"]
    assert not cache.former_pods(mnist, JOB) and not cache.former_pods(Key("other", "mnist"), "new")
    cache.remove(names.PODS, "default", "a", "uid-a")
    assert [pod.name for pod in cache.former_pods(mnist, "new")] == ["orphan"]


def test_late_plan_of_a_deleted_job_leaves_no_trace_of_its_claim() -> None:
    """A plan may read pods while its job is deleted, and created again with another claim."""
    cache = Cache()

    def put(name: str, uid: str) -> None:
        meta = {"namespace": "default", "name": name, "uid": uid, "resourceVersion": "1"}
        cache.put(names.DDPJOBS, {"metadata": meta, "spec": {}})

    put("mnist", JOB)
    put("other", "other")
    cache.put(names.PODS, a_pod("a", 1, status=running()))
    assert cache.sharing(Key("default", "mnist"), "c/") == []
    assert cache.sharing(Key("default", "other"), "c/") == ["mnist"]
    cache.remove(names.DDPJOBS, "default", "mnist", JOB)
    cache.sharing(Key("default", "mnist"), "c/")
    put("mnist", "new")
    cache.put(names.PODS, a_pod("b", 2, job="new", status=running()))
    assert cache.sharing(Key("default", "other"), "c/") == []
    cache.sharing(Key("default", "mnist"), "c/")
    cache.sharing(Key("default", "mnist"), "another/")
    assert cache.sharing(Key("default", "other"), "c/") == []


def test_pod_with_a_changed_job_label_belongs_only_to_the_new_job() -> None:
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 1))
    cache.put(names.PODS, a_pod("a", 2, job="other"))
    assert names_of(cache) == []
    assert len(cache.pods("default", "other")) == 1


@pytest.mark.parametrize(
    ("listed", "version"),
    [
        pytest.param([("kept", 20), ("deleted", 21)], "30", id="older than the cache"),
        pytest.param([("kept", 20)], "80", id="used since, and a pod is older than what was seen of it"),
        pytest.param([("kept", 50), ("deleted", 40)], "80", id="used since, and a deleted pod is there again"),
    ],
)
def test_list_of_an_etcd_that_was_restored_is_not_taken(listed: list[tuple[str, int]], version: str) -> None:
    """Seen: new versions passed the old ones, and a group restarted although all its pods ran."""
    cache = Cache()
    cache.put(names.PODS, a_pod("kept", 50) | RUNNING)
    cache.take(names.PODS, {"type": "DELETED", "object": a_pod("deleted", 55)})
    with pytest.raises(VersionsWentBackError):
        apply_list(cache, names.PODS, Page(tuple(a_pod(*each) for each in listed), version))


def test_list_keeps_what_was_seen_after_it() -> None:
    cache = Cache()

    def see() -> None:
        cache.put(names.PODS, a_pod("a", 50) | RUNNING)
        cache.take(names.PODS, {"type": "DELETED", "object": a_pod("b", 51)})
        cache.put(names.PODS, a_pod("new", 52))

    assert apply_list(cache, names.PODS, see, Page((a_pod("a", 20), a_pod("b", 21)), "49")) == 0
    assert known(cache, "a")[1] == 50 and names_of(cache) == ["a", "new"]


def test_live_list_replaces_a_pod_whose_version_stands_for_another_state_since_a_restore() -> None:
    """Seen: a pod that ran was taken for lost, and its group restarted (two operators, etcd restored twice)."""
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 5) | RUNNING)
    page = Page((a_pod("a", 5) | {"status": ended(1)},), "5")
    for job_uid, has_ended in (("", False), (JOB, True)):
        apply_list(cache, names.PODS, page, job_uid=job_uid)
        assert [pod.ended for pod in cache.pods("default", JOB)] == [has_ended]


def test_list_with_a_selector_keeps_objects_outside_of_it() -> None:
    cache = Cache()
    cache.put(names.CLAIMS, a_pod("claim", 1, labels={}))
    apply_list(cache, names.CLAIMS, Page((), "10"))
    assert cache.get(names.CLAIMS, "default", "claim")
    assert [entry.is_labelled for entry in cache.entries(names.CLAIMS)] == [False]


def test_pages_of_a_list_remove_only_what_no_page_contained() -> None:
    woken: list[Key] = []
    cache = Cache(woken.append)
    for number, name in enumerate("abcd"):
        cache.put(names.PODS, a_pod(name, number + 1))

    def change() -> None:
        assert names_of(cache) == ["a", "b", "c", "d"]
        cache.put(names.PODS, a_pod("new", 11))  # created while the pages arrive
        cache.put(names.PODS, a_pod("c", 11))  # changed since the first page

    second = Page((a_pod("b", 9),), "12", is_first=False)  # the version of the first page counts
    changes = apply_list(cache, names.PODS, Page((a_pod("a", 1),), "10"), change, second, woken.clear)
    assert changes == 2  # b changed, d is gone
    assert woken == [Key("default", "mnist")]
    assert names_of(cache) == ["a", "b", "c", "new"]


def test_list_that_begins_again_forgets_its_earlier_pages() -> None:
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 1))
    first, second = Page((a_pod("a", 1), a_pod("b", 2)), "10"), Page((a_pod("b", 2),), "20")
    apply_list(cache, names.PODS, first, second)  # a was deleted before the second LIST
    assert names_of(cache) == ["b"]


RUNNING = {"status": running()}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, a_pod("a", 2), ["at once"]),
        (a_pod("a", 1), a_pod("a", 1), []),
        (a_pod("a", 1), a_pod("a", 2, uid="second"), ["at once"]),
        (a_pod("a", 1), a_pod("a", 2, deletionTimestamp="2026-03-01T12:00:00Z"), ["at once"]),
        (a_pod("a", 1), a_pod("a", 2, job="other"), ["at once"]),
        (a_pod("a", 1) | RUNNING, a_pod("a", 2) | {"status": ended(1)}, ["at once"]),
        (a_pod("a", 1), a_pod("a", 2) | {"status": {"phase": "Failed", "reason": "Evicted"}}, ["at once"]),
        (a_pod("a", 1), a_pod("a", 2) | RUNNING, ["soon"]),
        (a_pod("a", 1) | RUNNING, a_pod("a", 2) | {"status": running(podIP="192.0.2.9")}, ["soon"]),
        (a_pod("a", 1) | RUNNING, a_pod("a", 2, annotations={"a": "b"}) | RUNNING, []),
        (a_pod("a", 1) | RUNNING, None, ["at once"]),
    ],
)
def test_only_a_step_of_a_pod_that_no_decision_waits_for_is_handled_later(
    before: dict[str, Any] | None, after: dict[str, Any] | None, expected: list[str]
) -> None:
    woken: list[str] = []
    cache = Cache(lambda key: woken.append("at once"), lambda key: woken.append("soon"))
    if before is not None:
        cache.put(names.PODS, before)
    woken.clear()
    if after is None:
        cache.remove(names.PODS, "default", "a", "uid-a")
    else:
        cache.put(names.PODS, after)
    assert woken == expected


@given(st.data())
def test_any_order_and_repetition_of_events_gives_the_same_state(data: st.DataObject) -> None:
    """Three objects of one name, one after the other: created, changed and (except the last) deleted, in any order."""
    history: list[tuple[str, dict[str, Any]]] = []
    version = 0
    for life in range(3):
        for _ in range(data.draw(st.integers(1, 3))):
            version += 1
            history.append(("put", a_pod("a", version, uid=f"life-{life}")))
        if life < 2:
            history.append(("remove", a_pod("a", version, uid=f"life-{life}")))
    events = data.draw(st.permutations(history + data.draw(st.lists(st.sampled_from(history)))))
    cache = Cache()
    for kind, obj in events:
        if kind == "put":
            cache.put(names.PODS, a_pod("a", int(obj["metadata"]["resourceVersion"]), uid=obj["metadata"]["uid"]))
        else:
            cache.remove(names.PODS, "default", "a", obj["metadata"]["uid"])
    assert known(cache, "a") == ("life-2", version)
    assert names_of(cache) == ["a"]


@pytest.mark.parametrize("version", ["", "not-a-number"])
def test_version_that_is_not_a_number_is_the_oldest(version: str) -> None:
    cache = Cache()
    cache.put(names.PODS, a_pod("a", 1))
    odd = a_pod("a", 2)
    odd["metadata"]["resourceVersion"] = version
    assert not cache.put(names.PODS, odd)


def test_cached_service_has_all_that_its_repair_compares() -> None:
    """Otherwise each plan would repair a Service that nobody edited."""
    job = Job.of(a_job())
    body, stored = desired_service(job).body, {"uid": "1", "resourceVersion": "5"}
    cache = Cache()
    cache.put(names.SERVICES, body | {"metadata": body["metadata"] | stored})
    assert service_change(job, cache.get(names.SERVICES, "default", job.service)) is None


@pytest.mark.parametrize(
    ("resource", "spec"),
    [
        (names.SERVICES, {"externalIPs": ["192.0.2.1"] * 50_000}),
        (names.SERVICES, {"selector": {f"key-{n}": "" for n in range(50_000)}}),
        (names.CLAIMS, {"accessModes": ["ReadWriteOnce"] * 50_000}),
    ],
)
def test_large_object_with_the_label_of_a_job_takes_little_memory(resource: names.Resource, spec: Json) -> None:
    """Every tenant may create Services and claims, of which each may have 1.5 MB."""
    labels = {names.LABEL_JOB_UID: JOB, names.LABEL_JOB_NAME: "mnist"}
    owners = [{"kind": "DDPJob", "name": "mnist", "uid": f"{n}", "controller": n == 9_999} for n in range(10_000)]
    meta = {"name": "a", "namespace": "default", "uid": "1", "resourceVersion": "5", "ownerReferences": owners}
    meta["managedFields"] = [{"manager": "kubectl"}] * 10_000
    obj = {"metadata": meta | {"labels": labels | {f"x-{n}": "" for n in range(10_000)}}, "spec": spec}
    cache = Cache()
    cache.put(resource, obj)
    kept = cache.get(resource, "default", "a")
    assert len(json.dumps(kept)) < 20_000
    assert owner_uid(kept) == "9999" and kept["metadata"]["labels"][names.LABEL_JOB_NAME] == "mnist"


def a_workload(version: int, owner: str = "j", **labels: str) -> Json:
    meta: Json = {"name": "w", "namespace": "default", "uid": "u", "resourceVersion": str(version), "labels": labels}
    meta["ownerReferences"] = [{"kind": "DDPJob", "name": "mnist", "uid": owner, "controller": True}]
    return {"metadata": meta, "spec": {}, "status": {}}


def test_a_workload_belongs_to_its_owner_whatever_the_labels_say_and_others_are_not_kept() -> None:
    woken: list[Key] = []
    assert names.WORKLOADS not in names.SELECTORS, "any user of a queue may edit the labels of its Workloads"
    cache = Cache(woken.append)
    label = {names.LABEL_JOB_UID: "another", names.LABEL_JOB_NAME: "another"}
    cache.put(names.WORKLOADS, a_workload(1, **label))
    cache.take(names.WORKLOADS, {"type": "MODIFIED", "object": a_workload(2)})
    assert [entry.name for entry in cache.entries(names.WORKLOADS)] == ["w"] and cache.groups("default", "j")
    of_another_kind = a_workload(3, **label)
    of_another_kind["metadata"] |= {"name": "of-a-batch-job", "uid": "o", "ownerReferences": [{"kind": "Job"}]}
    assert not cache.put(names.WORKLOADS, of_another_kind)
    woken.clear()
    apply_list(cache, names.WORKLOADS, Page((of_another_kind,), "9"))
    assert woken == [Key("default", "mnist")] and not cache.entries(names.WORKLOADS)


def test_admission_and_eviction_are_planned_at_once_and_other_edits_of_a_workload_are_paced() -> None:
    at_once: list[str] = []
    paced: list[str] = []
    cache = Cache(on_change=lambda key: at_once.append(step), on_update=lambda key: paced.append(step))
    conditions: dict[str, str] = {}
    steps = (("QuotaReserved", "True"), ("Admitted", "True"), ("PodsReady", "True"), ("Evicted", "True"))
    for number, (step, status) in enumerate((*steps, ("Admitted", "False"), ("Admitted", "False")), start=1):
        conditions[step] = status
        found = [{"type": kind, "status": status} for kind, status in conditions.items()]
        cache.put(names.WORKLOADS, a_workload(number) | {"status": {"conditions": found}})
    assert at_once == ["QuotaReserved", "Admitted", "Evicted", "Admitted"], "the first is that the Workload exists"
    assert paced == ["PodsReady"]


async def test_a_workload_that_changed_only_in_what_plans_do_not_read_is_read_and_planned_again() -> None:
    woken: list[Key] = []
    cache = Cache(woken.append)
    cache.put(names.WORKLOADS, a_workload(1))
    woken.clear()

    class Changed:
        async def patch_status(self, *_: object) -> Json:
            raise Conflict("the object has been modified", code=409)

        async def get(self, *_: object) -> Json:
            return a_workload(2) | {"status": {"schedulingStats": {}}}

    change = Change(names.WORKLOADS, "w", "u", {"conditions": []}, part="status", version="1")
    job = {"metadata": {"namespace": "default", "name": "mnist", "uid": "j"}}
    outcome = await Executor(Changed(), cache, 1).act(job, Plan(changes=(change,)))  # type: ignore[arg-type]
    assert not outcome.problems and woken == [Key("default", "mnist")]
    assert cache.get(names.WORKLOADS, "default", "w")["metadata"]["resourceVersion"] == "2"
