"""What is read of a job on a cluster, with the rights of the user: to explain it, to tell its story, or all of it."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import cast

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, is_true
from ddpjob.api.status import recorded_status
from ddpjob.client.cluster_reader import MANY_NODES, Reader, Requests
from ddpjob.client.connection import Answer, ApiConnection, Query, RequestError, path_of
from ddpjob.client.snapshot import Snapshot
from ddpjob.client.verdict.explain import needed
from ddpjob.client.verdict.operator import serves
from ddpjob.engine.actions import EngineSettings
from ddpjob.engine.claims import claim_of_checkpoints
from ddpjob.version import __version__

_SETTINGS = EngineSettings(gang_scheduler=None, kueue=None)
_SECONDS = 20.0
_MOST_OBJECTS = 10_000  # pods, or Events, of a job
_LOG_LINES, _LOG_BYTES = 50_000, 32 * 2**20
_MOST_LOGS = 64


def read_needed(connection: ApiConnection, requests: Requests, answer: Answer) -> Snapshot:
    """Return what explains a job, in two rounds of parallel requests."""
    job = answer.body
    reader = Reader(connection, str(job["metadata"]["namespace"]))
    is_finished = is_true(job.get("status"), "Finished")
    pods = requests.submit(reader.pods, job, _attempts(job))
    operators = None if is_finished else requests.submit(reader.operators)
    found = Snapshot(
        job=job,
        now=answer.time or datetime.now(UTC),
        settings=_SETTINGS,
        pods=pods.result(),
        only_waiting=int(job["spec"].get("numNodes") or 1) > MANY_NODES,
        operators=operators.result() if operators is not None else None,
        unread=reader.unread,
    )
    more = needed(found)
    events = [requests.submit(reader.events, *about) for about in more.about]
    claims = {name: requests.submit(reader.claim, name) for name in more.claims}
    logs = {name: requests.submit(reader.log, name) for name in more.logs}
    return replace(
        found,
        events=[event for each in events for event in each.result()],
        claims=_known({name: claim.result() for name, claim in claims.items()}),
        logs={name: text for name, log in logs.items() if (text := log.result())},
    )


def read_story(connection: ApiConnection, answer: Answer) -> Snapshot:
    """Return a job with its pods and Events. What cannot be read is in ``Snapshot.unread``."""
    return _story(Reader(connection, str(answer.body["metadata"]["namespace"]), _SECONDS), Requests(), answer)


def _story(reader: Reader, requests: Requests, answer: Answer) -> Snapshot:
    job = answer.body
    pods = requests.submit(reader.tried, "pods", "pods", pods_of, job)
    events = requests.submit(reader.tried, "events", "events", events_of, job)
    return Snapshot(
        job=job,
        now=answer.time or datetime.now(UTC),
        settings=_SETTINGS,
        pods=pods.result(),
        events=events.result() or (),
        unread=reader.unread,
    )


def read_all(connection: ApiConnection, answer: Answer, *, logs: bool) -> Snapshot:
    """Return what can be read of a job. What cannot be read is in ``Snapshot.unread``. logs: with the ends of logs."""
    job, namespace = answer.body, str(answer.body["metadata"]["namespace"])
    reader, requests = Reader(connection, namespace, _SECONDS), Requests()
    claims = {name: requests.submit(reader.claim, name) for name in _claims(job)}
    operators, version = requests.submit(reader.operators), requests.submit(_version, connection)
    own = names.service_name(str(job["metadata"]["name"]), str(job["metadata"]["uid"]))
    others = [
        requests.submit(reader.one, kind, f"the {resource.kind}", resource, own)
        for kind, resource in (("service", names.SERVICES), ("networkPolicy", names.NETWORK_POLICIES))
    ]
    found = _story(reader, requests, answer)
    serving = [one for one in operators.result() or () if serves(one, namespace)]
    of_pods = [str(pod["metadata"]["name"]) for pod in found.pods or ()][:_MOST_LOGS] if logs else []
    ends = {pod: requests.submit(reader.log, pod) for pod in of_pods}
    return replace(
        found,
        claims=_known({name: claim.result() for name, claim in claims.items()}),
        others=[one for other in others if isinstance(one := other.result(), dict)],
        operators=serving,
        logs={pod: text for pod, end in ends.items() if (text := end.result())},
        operator_log=_operator_log(reader, job, serving) if logs else "",
        versions={"ddpjob": __version__, **version.result(), **_versions(serving)},
    )


def pods_of(connection: ApiConnection, job: Json) -> list[Json]:
    """Return the pods of all attempts that the cluster still has. Raises ``DDPJobError``."""
    return _items(connection, names.PODS, job, {"labelSelector": f"{names.LABEL_JOB_UID}={job['metadata']['uid']}"})


def events_of(connection: ApiConnection, job: Json) -> list[Json]:
    """Return the Events about the job, its pods, also those that are gone, and its claims. Raises ``DDPJobError``."""
    meta, requests = job["metadata"], Requests()
    uid, prefix = str(meta["uid"]), f"{names.service_name(str(meta['name']), str(meta['uid']))}-"
    about = [
        f"involvedObject.kind={names.DDPJOBS.kind},involvedObject.uid={uid}",
        f"involvedObject.kind=Pod,involvedObject.namespace={meta['namespace']}",
        *(f"involvedObject.kind={names.CLAIMS.kind},involvedObject.name={name}" for name in _claims(job)),
    ]
    asked = [requests.submit(_items, connection, names.EVENTS, job, {"fieldSelector": query}) for query in about]
    of_job, of_pods, *of_claims = [one.result() for one in asked]
    own = [event for event in of_pods if str(event["involvedObject"].get("name")).startswith(prefix)]
    return [*of_job, *own, *(event for found in of_claims for event in found)]


def _items(connection: ApiConnection, resource: Resource, job: Json, query: Query) -> list[Json]:
    return connection.items(path_of(resource, str(job["metadata"]["namespace"])), query, _MOST_OBJECTS)


def _attempts(job: Json) -> set[int]:
    """Return the attempts whose pods are read: the recorded, the next, and the last that failed."""
    status = recorded_status(job.get("status") or {})
    number = status.attempt or 0
    return {number, number + 1, *(failure.attempt for failure in (status.failures or ())[-1:])}


def _claims(job: Json) -> Collection[str]:
    """Return the names of the claims of checkpoints and data."""
    data = job["spec"].get("data") or {}
    return dict.fromkeys(str(name) for name in (claim_of_checkpoints(job), data.get("claimName")) if name)


def _known(claims: Mapping[str, Json | str | None]) -> dict[str, Json | None]:
    return {name: claim for name, claim in claims.items() if not isinstance(claim, str)}


def _version(connection: ApiConnection) -> dict[str, str]:
    try:
        return {"kubernetes": str(connection.once("GET", "/version", seconds=_SECONDS).body.get("gitVersion"))}
    except RequestError:
        return {}


def _versions(operators: Iterable[Json]) -> Mapping[str, str]:
    """Return release and image of the operator."""
    found: dict[str, str] = {}
    for one in operators:
        containers = cast(list[Json], one["spec"]["template"]["spec"].get("containers") or [])
        found["operator"] = str((one["metadata"].get("labels") or {}).get("app.kubernetes.io/version") or "unknown")
        found["operatorImage"] = ", ".join(str(container.get("image")) for container in containers)
    return found


def _operator_log(reader: Reader, job: Json, operators: Sequence[Json]) -> str:
    """Return what the operator logged about the job, or an earlier one of its name."""
    lines: list[str] = []
    what = "the log of the operator"
    for namespace in dict.fromkeys(str(one["metadata"]["namespace"]) for one in operators):
        query: Query = {"labelSelector": names.OPERATOR_SELECTOR, "limit": 20}
        for pod in reader.items("operator.log", what, names.PODS, namespace, query) or ():
            asked: Query = {"container": "operator", "tailLines": _LOG_LINES, "limitBytes": _LOG_BYTES}
            text = reader.text("operator.log", what, namespace, str(pod["metadata"]["name"]), asked)
            lines += (line for line in text.splitlines() if _is_about(line, job["metadata"]))
    if not operators:
        reader.unread.setdefault("operator.log", "no operator was found, or its Deployment may not be read")
    return "".join(f"{line}\n" for line in sorted(lines))


def _is_about(line: str, meta: Json) -> bool:
    """Return whether a line of the operator's log is about a job, in one of its two formats."""
    if line.startswith("{"):
        try:
            found = json.loads(line)
        except ValueError:
            return False
        return isinstance(found, dict) and (found.get("namespace"), found.get("job")) == (
            meta["namespace"],
            meta["name"],
        )
    return f"namespace={meta['namespace']} job={meta['name']} " in f"{line.rstrip(']')} "
