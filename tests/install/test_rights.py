"""The exact rights that the chart grants to the operator and to users, in both scopes."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.install.chart import NAMESPACE, Object, of_kind, template

OPERATOR = {
    *(("ddpjob.dev", "ddpjobs", verb) for verb in ("get", "list", "watch", "delete")),
    ("ddpjob.dev", "ddpjobs/status", "patch"),
    ("ddpjob.dev", "ddpjobs/finalizers", "update"),
    *(("", "pods", verb) for verb in ("create", "delete", "get", "list", "patch", "watch")),
    ("", "pods/log", "get"),
    *(("", "services", verb) for verb in ("create", "get", "list", "patch", "watch")),
    *(("networking.k8s.io", "networkpolicies", verb) for verb in ("create", "delete", "get", "list", "patch", "watch")),
    *(("", "persistentvolumeclaims", verb) for verb in ("create", "get", "list")),
    ("", "events", "create"),
}
QUEUES = {
    *(("kueue.x-k8s.io", "workloads", verb) for verb in ("create", "get", "list", "patch", "watch")),
    ("kueue.x-k8s.io", "workloads/status", "patch"),
}
GANG_GROUPS = {
    "kubernetes": "scheduling.k8s.io",
    "volcano": "scheduling.volcano.sh",
    "coscheduling": "scheduling.x-k8s.io",
}
"""API groups by the value of ``scheduling.gangScheduler``."""
CLASSES = {
    ("kueue.x-k8s.io", "resourceflavors", "get"),
    ("kueue.x-k8s.io", "workloadpriorityclasses", "get"),
    ("scheduling.k8s.io", "priorityclasses", "get"),
}
READ = {
    *(("ddpjob.dev", "ddpjobs", verb) for verb in ("get", "list", "watch")),
    ("ddpjob.dev", "ddpjobs/status", "get"),
}
WRITE = {("ddpjob.dev", "ddpjobs", verb) for verb in ("create", "delete", "deletecollection", "patch", "update")}


def gang_rights(scheduler: str) -> set[tuple[str, str, str]]:
    """Return the rights on the PodGroups of a gang scheduler."""
    return {(GANG_GROUPS[scheduler], "podgroups", verb) for verb in ("create", "delete", "get", "list", "watch")}


def triples(role: Object) -> set[tuple[str, str, str]]:
    assert all(set(rule) == {"apiGroups", "resources", "verbs"} for rule in role["rules"])
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def named(objects: Iterable[Object], suffix: str) -> Object:
    [role] = [item for item in objects if item["metadata"]["name"].endswith(suffix)]
    return role


SCOPES: dict[str, dict[str, object]] = {"cluster": {}, "namespace": {"scope": "namespace", "namespaces": ["team-a"]}}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(
    ("values", "rights"),
    [
        ({}, OPERATOR),
        ({"operator.readLogs": False}, OPERATOR - {("", "pods/log", "get")}),
        *(({"scheduling.gangScheduler": each}, OPERATOR | gang_rights(each)) for each in GANG_GROUPS),
        ({"kueue.enabled": True}, OPERATOR | QUEUES),
    ],
    ids=str,
)
def test_operator_has_exactly_the_listed_rights(
    scope: str, values: dict[str, Any], rights: set[tuple[str, str, str]]
) -> None:
    objects = template(SCOPES[scope] | values)
    kind = "ClusterRole" if scope == "cluster" else "Role"
    assert triples(named(of_kind(objects, kind), "ddpjob-operator")) == rights
    assert len(OPERATOR) == 28


@pytest.mark.parametrize("scope", SCOPES)
def test_rights_on_classes_come_with_kueue(scope: str) -> None:
    objects = template(SCOPES[scope] | {"kueue.enabled": True})
    assert triples(named(of_kind(objects, "ClusterRole"), f"-kueue-{NAMESPACE}")) == CLASSES
    [binding] = [b for b in of_kind(objects, "ClusterRoleBinding") if b["roleRef"]["name"].endswith(NAMESPACE)]
    assert binding["metadata"]["name"] == binding["roleRef"]["name"]


@pytest.mark.parametrize("scope", SCOPES)
def test_replicas_may_hold_only_their_own_lease(scope: str) -> None:
    role = named(of_kind(template(SCOPES[scope] | {"replicas": 2}), "Role"), "-lease")
    create, use = role["rules"]
    assert (create["resources"], create["verbs"]) == (["leases"], ["create"])
    assert (use["resources"], use["resourceNames"], use["verbs"]) == (["leases"], ["ddpjob-operator"], ["get", "patch"])


def test_no_role_grants_secrets_wildcards_or_escalation() -> None:
    for values in SCOPES.values():
        for role in of_kind(template(values), "Role", "ClusterRole"):
            for group, resource, verb in triples(role):
                assert "*" not in (group, resource, verb)
                assert group in ("", "ddpjob.dev", "networking.k8s.io")
                assert resource.split("/")[0] not in ("secrets", "configmaps", "serviceaccounts", "nodes")
                assert verb not in ("bind", "escalate", "impersonate")


def test_edit_role_manages_jobs_and_view_role_reads_them() -> None:
    roles = of_kind(template(), "ClusterRole")
    edit, view = named(roles, "-edit"), named(roles, "-view")
    assert triples(edit) == READ | WRITE
    assert triples(view) == READ
    aggregated = {
        label.rsplit("-", 1)[-1]
        for role in (edit, view)
        for label, value in role["metadata"]["labels"].items()
        if label.startswith("rbac.authorization.k8s.io/aggregate-to-") and value == "true"
    }
    assert aggregated == {"admin", "edit", "view"}
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]


def test_user_roles_can_be_left_out() -> None:
    names = [role["metadata"]["name"] for role in of_kind(template({"userRoles": False}), "ClusterRole")]
    assert names == ["ddpjob-operator"]
