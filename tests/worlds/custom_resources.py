"""Minimal definitions of the kinds of other projects."""

from ddpjob.api.names import Resource
from ddpjob.api.objects import Json


def pod_groups(kind: Resource) -> Json:
    """Return the definition of the PodGroups of Volcano or coscheduling."""
    text = {"type": "string"}
    spec = {"minMember": {"type": "integer"}, "queue": text, "priorityClassName": text}
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": {"type": "object", "properties": spec}, "status": anything}}
    return custom_resource(kind, schema, "scheduler-plugins/pull/50")


def custom_resource(
    kind: Resource, schema: Json, approved: str, *, scope: str = "Namespaced", has_status: bool = True
) -> Json:
    """Return a CustomResourceDefinition. approved: of groups below k8s.io, the change that was reviewed."""
    group, version = kind.api_version.split("/")
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}} if has_status else {},
    }
    approval = {"api-approved.kubernetes.io": f"https://github.com/kubernetes-sigs/{approved}"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{group}", "annotations": approval},
        "spec": {
            "group": group,
            "names": {"kind": kind.kind, "plural": kind.plural, "singular": kind.kind.lower()},
            "scope": scope,
            "versions": [served],
        },
    }
