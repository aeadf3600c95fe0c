"""Objects and patches for the random requests: those of the operator, and wrong ones."""

from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.desired import Job, desired_claim, desired_pods
from ddpjob.engine.network import desired_policy, desired_service
from tests.api.specs import BAD, GOOD, ILLEGAL_EDITS, LEGAL_EDITS
from tests.builders import SETTINGS, UID, a_job, ended, running

OPERATOR_IN_CLUSTER = EngineSettings(pod_namespace="ddpjob-system", pod_labels={"app.kubernetes.io/name": "ddpjob"})
NAMESPACE = "contract"
"""Requests contain it in place of the namespace of their sequence."""
CLAIM_SPEC = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}


def job(**spec: Any) -> Json:
    return {"apiVersion": names.API_VERSION, "kind": "DDPJob", "spec": {"image": "trainer:1"} | spec}


def pod(**spec: Any) -> Json:
    # Without the token volume, which a plugin of kube-apiserver adds.
    base = {"automountServiceAccountToken": False, "containers": [{"name": "main", "image": "image:1"}]}
    return {"apiVersion": "v1", "kind": "Pod", "spec": base | spec}


def container(**fields: Any) -> Json:
    return pod(containers=[{"name": "main", "image": "image:1"} | fields])


def service(**spec: Any) -> Json:
    base = {"clusterIP": "None", "selector": {"a": "b"}, "ports": [{"port": 80}]}
    return {"apiVersion": "v1", "kind": "Service", "spec": base | spec}


def policy(**spec: Any) -> Json:
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": {"podSelector": {}} | spec}


def claim(**spec: Any) -> Json:
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": CLAIM_SPEC | spec}


def event(**fields: Any) -> Json:
    involved = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "namespace": NAMESPACE, "name": "a"}
    base = {"involvedObject": involved, "type": "Normal", "reason": "Started", "message": "it began"}
    return {"apiVersion": "v1", "kind": "Event"} | base | fields


def _without_identity(body: Json) -> Json:
    """Return a rendered object without its name, its namespace and the uid of an owner that does not exist."""
    kept = ("labels", "annotations")
    return body | {"metadata": {key: body["metadata"][key] for key in kept if key in body["metadata"]}}


def _rendered(spec: Json) -> dict[str, list[Json]]:
    """Return the objects that the operator creates for a job."""
    made = a_job(**spec)
    parsed = Job.of(made)
    claims = [claim.body for claim in (desired_claim(parsed),) if claim is not None]
    pods = [create.body for create in desired_pods(parsed, 2, SETTINGS)[:2]]
    policies = [made.body for made in (desired_policy(parsed, OPERATOR_IN_CLUSTER),) if made is not None]
    return {
        "NetworkPolicy": [_without_identity(body) for body in policies],
        "Pod": [_without_identity(body) for body in pods],
        "Service": [_without_identity(desired_service(parsed).body)],
        "PersistentVolumeClaim": [_without_identity(body) for body in claims],
    }


_GOOD_SPECS = [spec | ({"numNodes": 2} if spec.get("numNodes", 1) > 2 else {}) for spec in GOOD.values()]
_RENDERED = [_rendered(spec) for spec in _GOOD_SPECS]

JOBS: list[Json] = [
    *(job(**bad.spec) for bad in BAD),
    *({**job(), "spec": bad.spec} for bad in BAD),
    job(foo=1),
    job(numNodes=2.0),
    job(numNodes="2"),
    job(numNodes=2**70),
    job(numNodes=None, command=None),
    job(command=["a", None]),
    job(rendezvous={"port": None}),
    job(rendezvous=None),
    job(rendezvous=[]),
    job(suspend=True),
    job(resources={"limits": {"cpu": None, "memory": "1Gi"}}),
    job(env=[{"name": "A", "value": "\u2028 é 😀"}]),
    job(template={"metadata": {"x": None}, "spec": {"foo": {"bar": None, "baz": 2.0}, "containers": []}}),
    job() | {"status": {"state": "Running"}},
    job() | {"status": {"state": "Nowhere"}},
    job() | {"status": {"foo": 1}},
    job() | {"foo": 1},
    job() | {"spec": None},
    job() | {"spec": []},
    job() | {"kind": "Job"},
    job() | {"apiVersion": "v1"},
    {"spec": {"image": "trainer:1"}},
    {"apiVersion": names.API_VERSION, "kind": "DDPJob"},
]

_MOUNT = {"volumeMounts": [{"name": "v", "mountPath": "/x"}]}
_TWICE = {"volumeMounts": 2 * _MOUNT["volumeMounts"]}
PODS: list[Json] = [
    pod(containers=[]),
    pod(containers=None),
    pod(containers={}),
    pod(hostNetwrok=True),
    container(foo=1),
    pod(hostname=5),
    pod(containers=[{"image": "i"}]),
    pod(containers=[{"name": "main"}]),
    pod(containers=[{"name": "main", "image": "i"}] * 2),
    pod(initContainers=[{"name": "main", "image": "i"}]),
    container(env=[{"name": "A", "value": "x"}, {"name": "A", "value": ""}, {"name": "B", "value": None}]),
    container(env=[{"name": "A", "value": 1}]),
    container(**_MOUNT),
    pod(volumes=[{"name": "v"}], containers=[{"name": "main", "image": "i", **_MOUNT}]),
    pod(
        volumes=[{"name": "v"}], containers=[{"name": "main", "image": "i", "volumeMounts": _MOUNT["volumeMounts"] * 2}]
    ),
    pod(volumes=[{"name": "v", "emptyDir": {}}] * 2),
    pod(volumes=[{"name": "v", "emptyDir": {"sizeLimit": 1.5}}, {"name": "w", "secret": {"secretName": "s"}}]),
    container(ports=[{"containerPort": "x"}]),
    container(resources={"limits": {"cpu": 1.5, "memory": "1.5Gi"}}),
    container(
        resources={"limits": {"cpu": "1000m", "memory": 1024, "nvidia.com/gpu": "1"}, "requests": {"cpu": "0.5"}}
    ),
    container(resources={"limits": {"cpu": "x"}}),
    container(image="r.io:50/i"),
    container(image="i@sha256:" + "a" * 64),
    container(command=[], args=None, workingDir=""),
    pod(hostNetwork=False, nodeSelector={}, tolerations=None, volumes=[]),
    pod(tolerations=[{"operator": "Exists"}]),
    pod(tolerations=[{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}]),
    pod(terminationGracePeriodSeconds=-1),
    pod(securityContext={"runAsUser": 0, "fsGroup": None}),
    pod() | {"status": {"phase": "Running"}},
    pod() | {"status": {"foo": 1}},
    pod() | {"foo": 1},
    pod() | {"kind": "Job"},
    {"apiVersion": "v1", "kind": "Pod"},
]

SERVICES: list[Json] = [
    service(ports=[{"name": "a", "port": 1}, {"name": "b", "port": 2, "targetPort": "x", "protocol": "UDP"}]),
    service(ports=[{"port": "x"}]),
    service(publishNotReadyAddresses=False),
    service(foo=1),
    service() | {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}},
]

POLICIES: list[Json] = [
    policy(podSelector=None),
    policy(policyTypes=["Ingress", "Egress"]),
    policy(ingress=[]),
    policy(ingress=[{"from": [{"podSelector": {"matchLabels": {"a": "b"}}}], "ports": [{"port": 1}]}]),
    policy(egress=[{"to": [{"namespaceSelector": {}}]}]),
    policy(ingress={}),
    policy(foo=1),
    policy() | {"status": {"conditions": []}},
    {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"},
]

CLAIMS: list[Json] = [
    claim(resources={}),
    claim(resources=None),
    claim(accessModes=[]),
    claim(storageClassName="", volumeName="v"),
    claim(storageClassName="fast", volumeMode="Block"),
    claim(resources={"requests": {"storage": 1024}}),
    claim(resources={"requests": {"storage": "x"}}),
    claim(selector={"matchLabels": {"a": "b"}}),
    claim(foo=1),
    claim() | {"status": {"phase": "Bound"}},
]

EVENTS: list[Json] = [
    event(firstTimestamp="2026-03-01T12:00:00.5Z", lastTimestamp="2026-03-01T13:00:00+01:00"),
    event(message="x" * 2000, source={"component": "ddpjob-operator"}),
    event(count="1"),
    event(lastTimestamp="yesterday"),
    event(foo=1),
    event(count=0, message="", reason=""),
]

# Objects that are accepted, so that enough of them exist.
SOUND: dict[str, list[Json]] = {
    "DDPJob": [{**job(), "spec": spec} for spec in GOOD.values()] + [job(), job(suspend=True), job(numNodes=2)],
    "Pod": [
        *(body for rendered in _RENDERED for body in rendered["Pod"]),
        *[pod(), pod(nodeName="worker"), pod(restartPolicy="Never"), pod(restartPolicy="OnFailure")] * 4,
        *[pod(nodeName="worker", restartPolicy="Never", terminationGracePeriodSeconds=n) for n in (0, 1, 60)],
        *[pod(volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "a"}}], nodeName=n) for n in ("n", None)]
        * 3,
    ],
    "Service": [service(), *(body for rendered in _RENDERED for body in rendered["Service"])],
    "NetworkPolicy": [policy(), *(body for rendered in _RENDERED for body in rendered["NetworkPolicy"])],
    "PersistentVolumeClaim": [claim(), *(body for r in _RENDERED for body in r["PersistentVolumeClaim"])],
    "Event": [event(), event(lastTimestamp="2026-03-01T13:00:00Z", count=1)],
}

BODIES = {
    "DDPJob": JOBS,
    "Pod": PODS,
    "Service": SERVICES,
    "NetworkPolicy": POLICIES,
    "PersistentVolumeClaim": CLAIMS,
    "Event": EVENTS,
}

_CONDITION = {
    "type": "Running",
    "status": "True",
    "reason": "AllRunning",
    "message": "2/2",
    "lastTransitionTime": "2026-03-01T12:00:00Z",
}

STATUSES: dict[str, list[Any]] = {
    "DDPJob": [
        {"state": "Running", "attempt": 1},
        {"state": "Pending", "attempt": 2, "conditions": [_CONDITION]},
        {"conditions": [_CONDITION, _CONDITION]},
        {"conditions": [{"type": "Running"}]},
        {"conditions": []},
        {"succeededNodes": [0, 1], "nodes": None},
        {"state": None},
        {"state": "Nowhere"},
        {"attempt": "1"},
        {"attempt": 2.0},
        {"attempt": 2.5},
        {"startTime": "2026-03-01T12:00:00Z"},
        {"startTime": "yesterday"},
        {"foo": 1},
        {"progress": {"display": "1/2", "loss": "NaN"}},
        {},
        None,
        "Running",
        [],
    ],
    "Pod": [
        *[running(), ended(0), ended(1), ended(137, reason="OOMKilled", message="killed")] * 2,
        {"phase": "Failed", "reason": "Evicted", "message": "node pressure"},
        {"phase": "Nowhere"},
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}]},
        {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull"}}}]},
        {"containerStatuses": [{"name": "trainer"}]},
        {"containerStatuses": None},
        {"podIP": "127.0.0.1"},
        {"podIP": None},
        {"podIP": "192.0.2.1"},
        {"podIPs": [{"ip": "192.0.2.2"}, {"ip": "2001:db8::1"}]},
        {"podIPs": None, "podIP": None},
        {"hostIP": "192.0.2.3"},
        {"startTime": "2026-03-01T12:00:00Z"},
        {"qosClass": None},
        {"qosClass": "Guaranteed"},
        {"observedGeneration": 1},
        {"nominatedNodeName": "worker"},
        {"foo": 1},
        {"phase": 5},
        {},
        None,
    ],
    "Service": [{"loadBalancer": {}}, {"foo": 1}, None],
    "NetworkPolicy": [{"conditions": []}],
    "PersistentVolumeClaim": [
        {"phase": "Bound"},
        {"phase": None},
        {"phase": "Nowhere"},
        {"phase": "Bound", "accessModes": ["ReadWriteMany"], "capacity": {"storage": "1024Mi"}},
        {"foo": 1},
        None,
    ],
    "Event": [{"phase": "Bound"}],
}

# Merge patches of the main resource, in addition to those of metadata.
PATCHES: dict[str, list[Json]] = {
    "DDPJob": [
        *({"spec": {key: edit.after.get(key) for key in {*edit.after, *edit.before}}} for edit in LEGAL_EDITS),
        *({"spec": {key: edit.after.get(key) for key in {*edit.after, *edit.before}}} for edit in ILLEGAL_EDITS),
        {"spec": {"suspend": True}},
        {"spec": {"suspend": None}},
        {"spec": {"suspend": "yes"}},
        {"spec": {"foo": 1}},
        {"spec": {"foo": None}},
        {"spec": None},
        {"foo": 1},
        {"status": {"state": "Running"}},
        {"status": {"foo": 1}},
        {"kind": "Job"},
        {"apiVersion": "v1"},
    ],
    "Pod": [
        {"spec": {"hostname": "other"}},
        {"spec": {"containers": [{"name": "main", "image": "image:2"}]}},
        {"spec": {"activeDeadlineSeconds": 5}},
        {"spec": {"foo": 1}},
        {"spec": {"hostname": 5}},
        {"spec": None},
        {"status": {"phase": "Running"}},
        {"status": {"foo": 1}},
    ],
    "Service": [
        {"spec": {"selector": {"a": "c"}}},
        {"spec": {"ports": [{"port": 81}]}},
        {"spec": {"publishNotReadyAddresses": True}},
        {"spec": {"foo": 1}},
    ],
    "NetworkPolicy": [
        {"spec": {"podSelector": {"matchLabels": {"a": "c"}}}},
        {"spec": {"podSelector": {"matchLabels": None}}},
        {"spec": {"ingress": [{"from": [{"podSelector": {}}]}]}},
        {"spec": {"ingress": None, "policyTypes": None}},
        {"spec": {"policyTypes": ["Egress"]}},
        {"spec": {"foo": 1}},
        {"spec": None},
    ],
    "PersistentVolumeClaim": [
        {"spec": {"accessModes": ["ReadWriteOnce"]}},
        {"spec": {"foo": 1}},
        {"status": {"phase": "Bound"}},
    ],
    "Event": [
        {"lastTimestamp": "2026-03-01T14:00:00Z"},
        {"lastTimestamp": None},
        {"count": 2},
        {"message": 5},
        {"foo": 1},
    ],
}

UNUSED_UID = UID
