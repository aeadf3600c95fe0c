"""Every refusal that a user of local mode can get from the in-memory cluster, with the field that it names.

``tests/api/specs.py`` has the table of wrong specs and forbidden edits, with ``test_memory_verdicts.py``. Here are the
rest: documents as a whole, metadata, statuses, and pods, Services, NetworkPolicies, claims and Events made from a job
or by hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import ClusterError
from tests.worlds.memory import MemoryCluster

SPEC: Json = {"image": "trainer:1"}
JOB: Json = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": "job"}, "spec": SPEC}
CONTAINER: Json = {"name": "main", "image": "image:1"}
POD: Json = {"metadata": {"name": "pod"}, "spec": {"containers": [CONTAINER]}}
SERVICE: Json = {"metadata": {"name": "service"}, "spec": {"clusterIP": "None", "ports": [{"port": 80}]}}
POLICY: Json = {"metadata": {"name": "policy"}, "spec": {"podSelector": {"matchLabels": {"a": "b"}}}}
CLAIM: Json = {
    "metadata": {"name": "claim"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}
EVENT: Json = {"metadata": {"name": "event"}, "involvedObject": {"namespace": "default", "name": "job"}}
TIME = "2026-03-01T12:00:00Z"
CONDITION = {"type": "Running", "status": "True", "reason": "A", "message": "b", "lastTransitionTime": TIME}
OWNER = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "name": "job", "uid": "u"}


@dataclass(frozen=True)
class Refusal:
    """A request that must be refused. ``field``: of a cause, or else part of the message.

    body: of a create; the object is ``body`` laid over a good one. patch, status: of a patch of the good object.
    """

    id: str
    field: str
    code: int
    body: Json = field(default_factory=dict)
    patch: Json | None = None
    status: Any = None


def job(name: str, where: str, code: int = 422, /, **body: Any) -> Refusal:
    return Refusal(name, where, code, body)


def spec(name: str, where: str, code: int = 422, /, **fields: Any) -> Refusal:
    return Refusal(name, where, code, {"spec": SPEC | fields})


def pod(name: str, where: str, code: int = 422, /, **fields: Any) -> Refusal:
    return Refusal(name, where, code, {"spec": POD["spec"] | fields})


def container(name: str, where: str, code: int = 422, /, **fields: Any) -> Refusal:
    return pod(name, f"spec.containers[0].{where}", code, containers=[CONTAINER | fields])


def meta(name: str, where: str, code: int = 422, /, **fields: Any) -> Refusal:
    return Refusal(name, where, code, {"metadata": {"name": "a"} | fields})


METADATA = (
    meta("no name", "metadata.name", name=None),
    meta("name that is not text", "metadata.name", 400, name=5),
    meta("name with an underscore", "metadata.name", name="a_b"),
    meta("name of 254 characters", "metadata.name", name="x" * 254),
    meta("unknown field", "metadata.foo", 400, foo=1),
    meta("another namespace", "namespace", 400, namespace="elsewhere"),
    meta("label key with a space", "metadata.labels", labels={"a b": "c"}),
    meta("label value with a space", "metadata.labels", labels={"a": "c d"}),
    meta("label value of 64 characters", "metadata.labels", labels={"a": "x" * 64}),
    meta("label key with an empty prefix", "metadata.labels", labels={"/a": ""}),
    meta("label value that is not text", "metadata.labels.a", 400, labels={"a": 5}),
    meta("labels as a list", "metadata.labels", 400, labels=[]),
    meta("annotation key with a space", "metadata.annotations", annotations={"a b": "c"}),
    meta("annotation that is not text", "metadata.annotations.a", 400, annotations={"a": True}),
    meta("annotations of 256 KiB", "metadata.annotations", annotations={"a": "x" * 2**18}),
    meta("finalizer with a space", "metadata.finalizers", finalizers=["a b"]),
    meta("owner without a uid", "metadata.ownerReferences.uid", ownerReferences=[OWNER | {"uid": ""}]),
    meta("owner of no version", "metadata.ownerReferences.apiVersion", ownerReferences=[OWNER | {"apiVersion": ""}]),
    meta(
        "two controllers",
        "metadata.ownerReferences",
        ownerReferences=[OWNER | {"controller": True, "uid": u} for u in "ab"],
    ),
    meta("owner with an unknown field", "metadata.ownerReferences[0].foo", 400, ownerReferences=[OWNER | {"foo": 1}]),
    meta("time that is none", "metadata.creationTimestamp", 400, creationTimestamp="yesterday"),
    meta("version on create", "resourceVersion", 500, resourceVersion="7"),
)

JOBS = (
    job("no kind", "Kind", 400, kind=None),
    job("another kind", "kind", 422, kind="Job"),
    job("another version", "API version", 400, apiVersion="v1"),
    job("unknown field next to spec", "foo", 400, foo=1),
    job("no spec", "spec", spec=None),
    job("spec as a list", "spec", spec=[]),
    spec("unknown field", "spec.nodes", 400, nodes=2),
    spec("unknown nested field", "spec.restartPolicy.retries", 400, restartPolicy={"retries": 2}),
    spec("unknown field of an element", "spec.env[0].foo", 400, env=[{"name": "A", "foo": 1}]),
    spec("field by its name in Python", "spec.num_nodes", 400, num_nodes=2),
    spec("integer as true", "spec.numNodes", numNodes=True),
    spec("integer beyond 64 bits", "spec.numNodes", numNodes=2**70),
    spec("null in a list", "spec.command[1]", command=["a", None]),
    spec("null in a list of objects", "spec.env[0]", env=[None]),
    spec("list as an object", "spec.env", env={}),
    spec("object as text", "spec.template", template="x"),
    spec("quantity as a list", "spec.resources.limits.cpu", resources={"limits": {"cpu": [1]}}),
    spec("quantity as an object", "spec.resources.limits.cpu", resources={"limits": {"cpu": {}}}),
    spec("image with a newline", "spec.image", image="image\n"),
    spec("path with a newline", "spec.workingDir", workingDir="a\n"),
    spec("513 variables", "spec.env", env=[{"name": f"A{n}"} for n in range(513)]),
    spec("33 limits", "spec.resources.limits", resources={"limits": {f"a{n}": 1 for n in range(33)}}),
    spec("an argument of 65,537 characters", "spec.args[0]", args=["x" * 65537]),
    spec("pull secret twice", "spec.imagePullSecrets[1]", imagePullSecrets=[{"name": "a"}] * 2),
    spec(
        "grace below zero",
        "spec.template.spec.terminationGracePeriodSeconds",
        template={"spec": {"terminationGracePeriodSeconds": -1}},
    ),
    Refusal("edit to an unknown field", "spec.foo", 422, patch={"spec": {"foo": 1}}),
    Refusal("edit to a wrong type", "spec.suspend", 422, patch={"spec": {"suspend": "yes"}}),
    Refusal("edit that removes the spec", "spec", 422, patch={"spec": None}),
    Refusal("edit of an immutable field", "spec", 422, patch={"spec": {"numNodes": 2}}),
    Refusal("edit of the kind", "kind", 422, patch={"kind": "Job"}),
    Refusal("edit of the version", "apiVersion", 422, patch={"apiVersion": "v1"}),
)

STATUSES = (
    Refusal("status as text", "status", 422, status="Running"),
    Refusal("status as a list", "status", 422, status=[]),
    Refusal("number as text", "status.attempt", 422, status={"attempt": "1"}),
    Refusal("half an attempt", "status.attempt", 422, status={"attempt": 2.5}),
    Refusal("state that is a number", "status.state", 422, status={"state": 1}),
    Refusal("condition without a type", "status.conditions[0].type", 422, status={"conditions": [{"status": "True"}]}),
    Refusal("condition twice", "status.conditions[1]", 422, status={"conditions": [CONDITION] * 2}),
)
# The CRD accepts them, so that an operator of another release can write its status.
OPEN_STATUSES: tuple[Json, ...] = (
    {"foo": 1},
    {"world": {"foo": {"bar": 1}}},
    {"state": "Nowhere"},
    {"startTime": "yesterday"},
    {"conditions": [CONDITION | {"type": "Done", "message": "x" * 2049, "foo": 1}, {"type": "Failed"}]},
    {"failures": [{"attempt": 1}] * 6},
)

MOUNT = {"volumeMounts": [{"name": "v", "mountPath": "/x"}]}
PODS = (
    Refusal("another kind", "Kind=Job", 400, {"kind": "Job"}),
    pod("unknown field", "spec.hostNetwrok", 400, hostNetwrok=True),
    container("unknown field of a container", "foo", 400, foo=1),
    pod("host name that is not text", "spec.hostname", 400, hostname=5),
    pod("containers as an object", "spec.containers", 400, containers={}),
    container("environment value that is not text", "env[0].value", 400, env=[{"name": "A", "value": 1}]),
    container("quantity that is not a number", "resources.limits.cpu", 400, resources={"limits": {"cpu": "two"}}),
    container("port that is not a number", "ports[0].containerPort", 400, ports=[{"containerPort": "x"}]),
    pod("no containers", "spec.containers", containers=[]),
    pod("container without a name", "spec.containers[0].name", containers=[{"image": "i"}]),
    pod("container without an image", "spec.containers[0].image", containers=[{"name": "a"}]),
    pod("container twice", "spec.containers[1].name", containers=[CONTAINER] * 2),
    pod("init container of the same name", "spec.initContainers[0].name", initContainers=[CONTAINER]),
    container("container name in capitals", "name", name="Main"),
    container("image with spaces around it", "image", image=" i "),
    container("unknown pull policy", "imagePullPolicy", imagePullPolicy="Sometimes"),
    container("unknown message policy", "terminationMessagePolicy", terminationMessagePolicy="X"),
    container("variable without a name", "env[0].name", env=[{"name": ""}]),
    container("variable with an equals sign", "env[0].name", env=[{"name": "a=b"}]),
    container(
        "value and valueFrom",
        "env[0].valueFrom",
        env=[{"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}],
    ),
    container("valueFrom of nothing", "env[0].valueFrom", env=[{"name": "A", "valueFrom": {}}]),
    container("mount of no volume", "volumeMounts[0].name", **MOUNT),
    container("mount without a path", "volumeMounts[0].mountPath", volumeMounts=[{"name": "v"}]),
    pod(
        "one path mounted twice",
        "spec.containers[0].volumeMounts[1].mountPath",
        volumes=[{"name": "v"}],
        containers=[CONTAINER | {"volumeMounts": MOUNT["volumeMounts"] * 2}],
    ),
    container(
        "subPath out of the volume",
        "volumeMounts.subPath",
        volumeMounts=[{"name": "v", "mountPath": "/x", "subPath": "../y"}],
    ),
    pod("volume without a name", "spec.volumes[0].name", volumes=[{"emptyDir": {}}]),
    pod("volume twice", "spec.volumes[1].name", volumes=[{"name": "v"}] * 2),
    pod("volume name in capitals", "spec.volumes[0].name", volumes=[{"name": "V"}]),
    container("port out of range", "ports[0].containerPort", ports=[{"containerPort": 70000}]),
    container("port of zero", "ports[0].containerPort", ports=[{"containerPort": 0}]),
    container("port name twice", "ports[1].name", ports=[{"containerPort": n, "name": "a"} for n in (1, 2)]),
    container("port name in capitals", "ports[0].name", ports=[{"containerPort": 1, "name": "A"}]),
    container("unknown protocol", "ports[0].protocol", ports=[{"containerPort": 1, "protocol": "X"}]),
    container(
        "request above the limit", "resources.requests", resources={"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}
    ),
    container("limit below zero", "resources.limits[memory]", resources={"limits": {"memory": "-1"}}),
    pod("unknown restart policy", "spec.restartPolicy", restartPolicy="Sometimes"),
    pod("unknown DNS policy", "spec.dnsPolicy", dnsPolicy="Sometimes"),
    pod("host name with a dot", "spec.hostname", hostname="a.b"),
    pod("subdomain with a dot", "spec.subdomain", subdomain="a.b"),
    pod("service account with a space", "spec.serviceAccountName", serviceAccountName="a b"),
    pod("node name with a space", "spec.nodeName", nodeName="a b"),
    pod(
        "unknown toleration operator", "spec.tolerations[0].operator", tolerations=[{"key": "a", "operator": "Perhaps"}]
    ),
    pod(
        "toleration Exists with a value",
        "spec.tolerations[0].operator",
        tolerations=[{"key": "a", "operator": "Exists", "value": "b"}],
    ),
    pod("deadline of zero", "spec.activeDeadlineSeconds", activeDeadlineSeconds=0),
    pod("node selector with a space", "spec.nodeSelector", nodeSelector={"a b": "c"}),
    Refusal("edit of the host name", "spec", 422, patch={"spec": {"hostname": "other"}}),
    Refusal(
        "edit that adds a container",
        "spec.containers",
        422,
        patch={"spec": {"containers": [CONTAINER, {"name": "b", "image": "i"}]}},
    ),
    Refusal("finalizer without a prefix", "metadata.finalizers[0]", 422, patch={"metadata": {"finalizers": ["hold"]}}),
    Refusal("edit of the uid", "metadata.uid", 422, patch={"metadata": {"uid": "made-up"}}),
    Refusal("edit of the name", "name", 400, patch={"metadata": {"name": "other"}}),
    Refusal("edit to a deletion", "metadata.deletionTimestamp", 422, patch={"metadata": {"deletionTimestamp": TIME}}),
    Refusal("status with an unknown field", "status.foo", 422, status={"foo": 1}),
    Refusal("status with a phase that is not text", "status.phase", 422, status={"phase": 5}),
    Refusal("status with a wrong address", "status.podIPs[0]", 422, status={"podIP": "nowhere"}),
    Refusal("status with another QoS class", "status.qosClass", 422, status={"qosClass": "Guaranteed"}),
)


def of_spec(good: Json, name: str, where: str, code: int = 422, /, **fields: Any) -> Refusal:
    return Refusal(name, where, code, {"spec": good["spec"] | fields})


SERVICES = (
    of_spec(SERVICE, "unknown field", "spec.foo", 400, foo=1),
    of_spec(SERVICE, "port that is not a number", "spec.ports[0].port", 400, ports=[{"port": "x"}]),
    of_spec(SERVICE, "port of zero", "spec.ports[0].port", ports=[{"port": 0}]),
    of_spec(SERVICE, "two ports without names", "spec.ports[0].name", ports=[{"port": 1}, {"port": 2}]),
    of_spec(SERVICE, "port name twice", "spec.ports[1].name", ports=[{"name": "a", "port": p} for p in (1, 2)]),
    of_spec(SERVICE, "port twice", "spec.ports[1]", ports=[{"name": n, "port": 1} for n in "ab"]),
    of_spec(SERVICE, "unknown protocol", "spec.ports[0].protocol", ports=[{"port": 1, "protocol": "X"}]),
    of_spec(SERVICE, "unknown type", "spec.type", type="X"),
    of_spec(SERVICE, "unknown affinity", "spec.sessionAffinity", sessionAffinity="X"),
    of_spec(SERVICE, "selector with a space", "spec.selector", selector={"a b": "c"}),
    of_spec(SERVICE, "address", "spec.clusterIP", clusterIP="10.0.0.1"),
    Refusal("name that begins with a digit", "metadata.name", 422, {"metadata": {"name": "1a"}}),
    Refusal("edit of the address", "spec.clusterIPs[0]", 422, patch={"spec": {"clusterIP": "10.0.0.1"}}),
)

POLICIES = (
    of_spec(POLICY, "unknown field", "spec.foo", 400, foo=1),
    of_spec(POLICY, "selector with a space", "spec.podSelector.matchLabels", podSelector={"matchLabels": {"a b": "c"}}),
    of_spec(POLICY, "peer without a selector", "spec.ingress[0].from[0]", ingress=[{"from": [{}]}]),
    of_spec(POLICY, "port of zero", "spec.ingress[0].ports[0].port", ingress=[{"ports": [{"port": 0}]}]),
    of_spec(POLICY, "unknown protocol", "spec.egress[0].ports[0].protocol", egress=[{"ports": [{"protocol": "X"}]}]),
    of_spec(POLICY, "unknown type", "spec.policyTypes[0]", policyTypes=["X"]),
    of_spec(POLICY, "three types", "spec.policyTypes", policyTypes=["Ingress"] * 3),
    of_spec(
        POLICY,
        "unknown operator",
        "spec.podSelector.matchExpressions[0].operator",
        podSelector={"matchExpressions": [{"key": "a", "operator": "Perhaps"}]},
    ),
    Refusal("edit that empties a peer", "spec.ingress[0].from[0]", 422, patch={"spec": {"ingress": [{"from": [{}]}]}}),
)

CLAIMS = (
    of_spec(CLAIM, "unknown field", "spec.foo", 400, foo=1),
    of_spec(
        CLAIM,
        "size in letters",
        "spec.resources.requests.storage",
        400,
        resources={"requests": {"storage": "much"}},
    ),
    of_spec(CLAIM, "no size", "spec.resources[storage]", resources={}),
    of_spec(CLAIM, "size of zero", "spec.resources[storage]", resources={"requests": {"storage": "0"}}),
    of_spec(CLAIM, "no access modes", "spec.accessModes", accessModes=[]),
    of_spec(CLAIM, "unknown access mode", "spec.accessModes", accessModes=["Everything"]),
    of_spec(CLAIM, "exclusive and shared", "spec.accessModes", accessModes=["ReadWriteOncePod", "ReadWriteOnce"]),
    of_spec(CLAIM, "unknown volume mode", "spec.volumeMode", volumeMode="X"),
    of_spec(CLAIM, "selector with a space", "spec.selector.matchLabels", selector={"matchLabels": {"a b": "c"}}),
    Refusal("edit of the spec", "spec", 422, patch={"spec": {"accessModes": ["ReadWriteOnce"]}}),
)

EVENTS = (
    Refusal("unknown field", "foo", 400, {"foo": 1}),
    Refusal("count as text", "count", 400, {"count": "1"}),
    Refusal("time that is none", "lastTimestamp", 400, {"lastTimestamp": "yesterday"}),
    Refusal("object of another namespace", "involvedObject.namespace", 422, {"involvedObject": {"namespace": "other"}}),
    Refusal("name with a slash", "metadata.name", 422, {"metadata": {"name": "a/b"}}),
)

GOOD: Mapping[Resource, Json] = {
    names.DDPJOBS: JOB,
    names.PODS: POD,
    names.SERVICES: SERVICE,
    names.NETWORK_POLICIES: POLICY,
    names.CLAIMS: CLAIM,
    names.EVENTS: EVENT,
}
TABLE = [
    *((names.DDPJOBS, refusal) for refusal in (*METADATA, *JOBS, *STATUSES)),
    *((names.PODS, refusal) for refusal in (*METADATA, *PODS)),
    *((names.SERVICES, refusal) for refusal in SERVICES),
    *((names.NETWORK_POLICIES, refusal) for refusal in POLICIES),
    *((names.CLAIMS, refusal) for refusal in CLAIMS),
    *((names.EVENTS, refusal) for refusal in EVENTS),
]


@pytest.mark.parametrize("resource", GOOD, ids=lambda resource: resource.kind)
def test_the_good_object_of_the_table_is_accepted(resource: Resource) -> None:
    MemoryCluster().server.create(resource, "default", GOOD[resource])


@pytest.mark.parametrize(("resource", "refusal"), TABLE, ids=lambda value: getattr(value, "kind", None) or value.id)
def test_a_wrong_object_is_refused_at_its_field(resource: Resource, refusal: Refusal) -> None:
    with pytest.raises(ClusterError) as caught:
        send(resource, refusal)
    assert caught.value.code == refusal.code, caught.value
    fields = [cause["field"] for cause in caught.value.details.get("causes", ())]
    assert refusal.field in fields or (refusal.field in str(caught.value) and fields in ([], ["patch"])), caught.value


@pytest.mark.parametrize("status", OPEN_STATUSES, ids=lambda status: next(iter(status)))
def test_a_status_of_another_release_is_stored_as_it_is(status: Json) -> None:
    server = MemoryCluster().server
    server.create(names.DDPJOBS, "default", JOB)
    assert server.patch_status(names.DDPJOBS, "default", "job", {"status": status})["status"] == status


def send(resource: Resource, refusal: Refusal) -> None:
    server = MemoryCluster().server
    good = GOOD[resource]
    if refusal.patch is None and refusal.status is None:
        server.create(resource, "default", good | refusal.body)
        return
    name = server.create(resource, "default", good)["metadata"]["name"]
    if refusal.patch is not None:
        server.patch(resource, "default", name, refusal.patch)
    else:
        server.patch_status(resource, "default", name, {"status": refusal.status})
