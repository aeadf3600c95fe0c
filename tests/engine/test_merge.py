"""Merging parts of a pod: maps by key, known lists by their key field; all else is replaced."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.engine.actions import patch_between
from ddpjob.engine.merge import merge

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=10,
)
objects = st.dictionaries(st.sampled_from("abcd"), json_values, max_size=4)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return value


@given(objects)
def test_empty_overlay_changes_nothing(base: dict[str, Any]) -> None:
    assert merge(base, {}) == base


@given(objects, objects)
def test_merge_changes_neither_argument(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    before = copy.deepcopy((base, overlay))
    merge(base, overlay)
    assert (base, overlay) == before


@given(objects, objects)
def test_a_status_patch_turns_the_old_status_into_the_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Apply an RFC 7396 merge patch like the API server."""

    def apply(target: Any, patch: Any) -> Any:
        if not isinstance(patch, dict):
            return patch
        result = dict(target) if isinstance(target, dict) else {}
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = apply(result.get(key), value)
        return result

    old, new = without_nulls(old), without_nulls(new)
    assert apply(old, patch_between(old, new)) == new


def test_equal_statuses_need_no_patch() -> None:
    assert patch_between({"a": {"b": [1]}}, {"a": {"b": [1]}}) == {}


def test_containers_merge_by_name_and_others_are_kept() -> None:
    base = {"containers": [{"name": "trainer", "image": "a", "tty": True}, {"name": "side", "image": "s"}]}
    overlay = {"containers": [{"name": "trainer", "image": "b"}]}
    assert merge(base, overlay)["containers"] == [
        {"name": "trainer", "image": "b", "tty": True},
        {"name": "side", "image": "s"},
    ]


def test_variable_has_one_source_after_a_merge() -> None:
    base = {"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}, {"name": "B", "value": "1"}]}
    merged = merge(base, {"env": [{"name": "A", "value": "x"}]})
    assert merged["env"] == [{"name": "A", "value": "x"}, {"name": "B", "value": "1"}]


def test_volume_is_replaced_completely() -> None:
    merged = merge(
        {"volumes": [{"name": "v", "emptyDir": {}}]}, {"volumes": [{"name": "v", "persistentVolumeClaim": {}}]}
    )
    assert merged["volumes"] == [{"name": "v", "persistentVolumeClaim": {}}]


def test_tolerations_append_without_duplicates() -> None:
    merged = merge({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "a"}, {"key": "b"}]})
    assert merged["tolerations"] == [{"key": "a"}, {"key": "b"}]


@pytest.mark.parametrize("key", ["command", "args", "capabilities"])
def test_lists_without_a_key_are_replaced(key: str) -> None:
    assert merge({key: ["a", "b"]}, {key: ["c"]}) == {key: ["c"]}


def test_ports_without_a_name_are_kept() -> None:
    merged = merge({"ports": [{"containerPort": 1}]}, {"ports": [{"name": "r", "containerPort": 2}]})
    assert {"containerPort": 1} in merged["ports"] and len(merged["ports"]) == 2
