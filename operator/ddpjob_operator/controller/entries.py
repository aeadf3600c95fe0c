"""What the cache keeps of each kind of object, and which of its changes matter to a plan.

A job is kept encoded, because a decoded spec takes up to 60 times the memory of its JSON: a thousand jobs of a tenant
must not take the memory of the operator. Metadata that the operator does not use, for example annotations of 256 KiB,
is left out, and so is the spec of a job whose spec is too large (``cluster.job_json``).
"""

import zlib
from collections.abc import Mapping
from sys import intern
from typing import Any, NamedTuple

from ddpjob.api import names
from ddpjob.api.names import Key, Resource
from ddpjob.api.objects import Json
from ddpjob.api.pod_view import PodView, pod_view
from ddpjob.api.text import shorten
from ddpjob_operator.cluster import job_json
from ddpjob_operator.cluster.kubernetes import decode, encode
from ddpjob_operator.controller.job_facts import JobFacts, facts_of

MAX_CONDITIONS = 16  # of a PodGroup
MAX_TEXT = 1024  # of each of their messages
MAX_SPEC_BYTES = 16 * 1024
"""Of the spec of a Service, policy or claim. The operator's own have less than 1 KB; a larger one counts as changed."""
_LONG_BYTES = 4096  # a longer spec of a job is compressed
_METADATA = ("name", "namespace", "uid", "resourceVersion", "deletionTimestamp")
_SPEC: Mapping[Resource, tuple[str, ...]] = {
    names.SERVICES: ("type", "clusterIP", "selector", "ports", "publishNotReadyAddresses"),
    names.CLAIMS: (),
}
"""The fields of the specs that plans read; of other kinds all."""
_VERDICTS = frozenset({"Admitted", "Evicted"})


class Entry(NamedTuple):
    """What is cached of an object.

    job: the key of its job, by its label, or by its owner if a user removed the label.
    is_labelled: the operator's own label selector of this kind finds it.
    value: of a pod its view, of a job its ``StoredJob``, of any other object the part of its JSON that plans read.
    """

    namespace: str
    name: str
    uid: str
    version: int
    job: Key | None
    is_labelled: bool
    value: Any


class StoredJob(NamedTuple):
    """One job. ``head`` is the JSON of all but spec and resourceVersion.

    spec: the JSON of the spec, compressed if it is long; the number of its bytes if it was too large to be kept.
    """

    facts: JobFacts
    version: str
    head: bytes
    spec: bytes | int


def stored(job: Json) -> StoredJob:
    """Return what is stored of a job."""
    meta, given = job["metadata"], job.get("spec") or {}
    kept = {key: meta[key] for key in job_json.METADATA if key in meta and key != "resourceVersion"}
    kept |= {
        "labels": job_json.labels_in_use(meta.get("labels") or {}),
        "finalizers": job_json.finalizers_in_use(meta),
    }
    head = {key: value for key, value in job.items() if key != "spec"}
    head["metadata"] = {key: value for key, value in kept.items() if value}
    spec = given if isinstance(given, int) else given.encode() if isinstance(given, str) else encode(given)
    if not isinstance(spec, int) and len(spec) > _LONG_BYTES:
        spec = zlib.compress(spec, 1)
    return StoredJob(facts_of(job), meta.get("resourceVersion", ""), encode(head), spec)


def restored(job: StoredJob) -> Json:
    """Return a job as JSON, with its decoded spec, or with the size of a spec that was too large."""
    body = decode(job.head)
    body["metadata"]["resourceVersion"] = job.version
    if isinstance(job.spec, int):
        body["spec"] = job.spec
    else:
        body["spec"] = decode(job.spec if job.spec.startswith(b"{") else zlib.decompress(job.spec))
    return body


def entry_of(resource: Resource, obj: Json) -> Entry:
    """Return what is cached of an object."""
    meta = obj["metadata"]
    namespace, name, labels = intern(meta["namespace"]), meta["name"], meta.get("labels") or {}
    job = name if resource is names.DDPJOBS else labels.get(names.LABEL_JOB_NAME) or owning_job(meta)
    if resource in names.SCHEDULING_KINDS:  # any user of a queue may have the right to edit the labels
        job = owning_job(meta) or job
    value: Any
    if resource is names.PODS:
        value = pod_view(obj)
    else:
        value = stored(obj) if resource is names.DDPJOBS else _part_in_use(resource, obj)
    return Entry(
        namespace,
        name,
        meta["uid"],
        version_number(meta.get("resourceVersion", "")),
        Key(namespace, intern(job)) if job else None,
        not has_lost_label(resource, meta),
        value,
    )


def _part_in_use(resource: Resource, obj: Json) -> Json:
    """Return what plans read of an object. A tenant may create Services and claims of 1.5 MB, as many as its quota."""
    given, spec = obj["metadata"], obj.get("spec") or {}
    meta = {key: given[key] for key in _METADATA if key in given}
    meta["labels"] = {key: value for key, value in (given.get("labels") or {}).items() if key == names.LABEL_JOB_NAME}
    meta["ownerReferences"] = [owner for owner in given.get("ownerReferences") or () if owner.get("controller")]
    if resource is names.WORKLOADS:
        return _workload(meta, given, spec, obj.get("status") or {})
    if resource in names.SCHEDULING_KINDS:
        meta.pop("resourceVersion", None)  # a scheduler writes its counters often
        conditions = (obj.get("status") or {}).get("conditions") or ()
        return {"metadata": meta, "status": {"conditions": [_condition(each) for each in conditions[:MAX_CONDITIONS]]}}
    used = {key: spec[key] for key in _SPEC.get(resource, spec) if key in spec}
    return {"metadata": meta, "spec": used if len(encode(used)) <= MAX_SPEC_BYTES else {}}


def is_same(resource: Resource, one: Any, other: Any) -> bool:
    """Return whether no plan can differ between two cached values of an object."""
    if resource is names.DDPJOBS:
        return bool(one._replace(version=other.version) == other)
    if resource is names.WORKLOADS:
        version = {"resourceVersion": other["metadata"].get("resourceVersion")}
        return bool(one | {"metadata": one["metadata"] | version} == other)
    return bool(one == other)


def verdicts(workload: Entry) -> frozenset[str]:
    """Return the conditions by which Kueue starts and ends attempts, if they are True. Only Kueue writes its status."""
    conditions = workload.value["status"].get("conditions") or ()
    return frozenset(each["type"] for each in conditions if each.get("status") == "True") & _VERDICTS


def _workload(meta: Json, given: Json, spec: Json, status: Json) -> Json:
    """Return what plans read of a Workload. Its conditions are whole, because a patch replaces their list."""
    notes = given.get("annotations") or {}
    meta["annotations"] = {key: notes[key] for key in names.ANNOTATIONS_OF_WORKLOADS if key in notes}
    meta["generation"] = given.get("generation", 0)
    return {
        "metadata": meta,
        "spec": {key: spec[key] for key in ("queueName", "active", "priorityClassRef") if key in spec},
        "status": {key: status[key] for key in ("conditions", "admission", "admissionChecks") if key in status},
    }


def _condition(condition: Mapping[str, Any]) -> Json:
    return {key: shorten(str(condition.get(key) or ""), MAX_TEXT) for key in ("type", "status", "message")}


def has_lost_label(resource: Resource, meta: Json) -> bool:
    """Return whether an object lacks the label that watch and LIST of its kind select."""
    selector = names.SELECTORS.get(resource)
    return selector is not None and selector not in (meta.get("labels") or {})


def owning_job(meta: Mapping[str, Any]) -> str | None:
    """Return the name of the DDPJob that owns an object, or None."""
    owners = meta.get("ownerReferences") or ()
    return next((owner.get("name") for owner in owners if owner.get("kind") == names.DDPJOBS.kind), None)


def end_of(pod: PodView) -> tuple[Any, ...]:
    """Return the part of a pod whose changes decisions wait for: its deletion, and how it ended."""
    return pod.job_uid, pod.deleting, pod.state if pod.ended else "", pod.stopped, pod.exit_code, pod.finished_at


def version_number(version: str) -> int:
    """Return a resourceVersion as a number, 0 if it is none.

    Versions of one kind compare as numbers (documented since Kubernetes 1.35, true long before).
    """
    return int(version) if version.isdecimal() else 0
