"""Objects and patches for the random requests: those of the operator and sound ones, and wrong DDPJobs."""

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


# The API server refuses the pods of a job with the longest keys that the CRD accepts.
_GOOD_SPECS = [spec for name, spec in GOOD.items() if name != "longest keys"]
_RENDERED = [_rendered(spec | ({"numNodes": 2} if spec.get("numNodes", 1) > 2 else {})) for spec in _GOOD_SPECS]

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
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}]},
        {"containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "ErrImagePull"}}}]},
        {},
    ],
    "Service": [{"loadBalancer": {}}],
    "NetworkPolicy": [{"conditions": []}],
    "PersistentVolumeClaim": [{"phase": "Bound"}],
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
    "Pod": [{"spec": {"activeDeadlineSeconds": 5}}, {"status": {"phase": "Running"}}],
    "Service": [{"spec": {"selector": {"a": "c"}}}, {"spec": {"publishNotReadyAddresses": True}}],
    "NetworkPolicy": [
        {"spec": {"podSelector": {"matchLabels": {"a": "c"}}}},
        {"spec": {"ingress": [{"from": [{"podSelector": {"matchLabels": {"a": "c"}}}]}]}},
    ],
    "PersistentVolumeClaim": [{"status": {"phase": "Bound"}}],
    "Event": [{"lastTimestamp": "2026-03-01T14:00:00Z"}, {"lastTimestamp": None}, {"count": 2}],
}

UNUSED_UID = UID
