"""The Service and the NetworkPolicy of a job, which all its attempts use, and what restores them after an edit."""

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

from ddpjob.api import names
from ddpjob.api.objects import Json, owner_uid
from ddpjob.engine.actions import Change, Create, Delete, EngineSettings, patch_between
from ddpjob.engine.desired import Job, owned_object
from ddpjob.engine.template import render

_SERVICES = 1024  # as many jobs are planned again without a rendered template


def desired_service(job: Job, *, after_first: bool = False) -> Create:
    """Return the headless Service of the job, which all its attempts use."""
    spec = deepcopy(_service_spec(job.uid, job.spec.rendezvous.port))
    return replace(owned_object(job, names.SERVICES, job.service, spec), after_first=after_first)


@lru_cache(_SERVICES)
def _service_spec(uid: str, port: int) -> Json:
    """Return the spec of a job's Service, for comparison in each plan; it must not be changed."""
    return render("service.yaml.j2", selector={names.LABEL_JOB_UID: uid}, port=port)


def service_change(job: Job, service: Json) -> Change | None:
    """Return what restores the job's Service after an edit; None if nothing does, or if it belongs to another owner."""
    spec = service.get("spec") or {}
    if not _is_live_object_of(job, service):
        return None
    wanted = _service_spec(job.uid, job.spec.rendezvous.port)
    is_whole = all(spec.get(key) == value for key, value in wanted.items() if key != "ports")
    ports = [{key: port.get(key) for key in wanted["ports"][0]} for port in spec.get("ports") or ()]
    if is_whole and ports == wanted["ports"]:
        return None
    others = dict.fromkeys(spec.get("selector") or ())  # null removes a key
    restored = wanted | {"externalName": None, "selector": others | wanted["selector"]}
    return Change(names.SERVICES, job.service, service["metadata"]["uid"], restored)


def _is_live_object_of(job: Job, body: Json) -> bool:
    return owner_uid(body) == job.uid and "deletionTimestamp" not in body["metadata"]


def desired_policy(job: Job, settings: EngineSettings) -> Create | None:
    """Return the NetworkPolicy of the job, which all its attempts use, or None if the spec asks for none."""
    if job.spec.network_policy is None:
        return None
    spec = render(
        "networkpolicy.yaml.j2",
        pods={"matchLabels": {names.LABEL_JOB_UID: job.uid}},
        operator_namespace=settings.pod_namespace,
        operator_pods={"matchLabels": dict(settings.pod_labels)} if settings.pod_labels else {},
        progress_port=job.spec.rendezvous.progress_port,
    )
    return owned_object(job, names.NETWORK_POLICIES, job.service, spec)


def policy_change(job: Job, policy: Json, settings: EngineSettings) -> Change | Delete | None:
    """Return what restores the job's NetworkPolicy after an edit, or deletes it when the spec asks for none any more.

    None if nothing is to do, or if the policy belongs to another owner.
    """
    if not _is_live_object_of(job, policy):
        return None
    wanted, uid = desired_policy(job, settings), policy["metadata"]["uid"]
    if wanted is None:
        return Delete(names.NETWORK_POLICIES, job.service, uid)
    patch = patch_between(policy.get("spec") or {}, wanted.body["spec"])
    return Change(names.NETWORK_POLICIES, job.service, uid, patch) if patch else None
