"""What of a job on a cluster is read for a bundle, with the rights of the user; what they do not allow is named."""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import cast

from ddpjob.api import names
from ddpjob.api.log_failure import LogFailure, log_failure
from ddpjob.api.objects import Json
from ddpjob.client.bundle.recording import Assumed, Recording, Unread, needs_logs, operator_environment
from ddpjob.client.cluster_reader import Reader
from ddpjob.client.connection import Connection, Query, RequestError
from ddpjob.client.verdict.operator import serves
from ddpjob.engine.actions import EngineSettings
from ddpjob.version import __version__
from ddpjob_operator.controller.settings import Settings, SettingsError, parse

_SECONDS = 20.0
_AT_ONCE = 8
_PAGE, _PAGES = 500, 40
_LOG_LINES, _LOG_BYTES = 50_000, 32 * 2**20
_MOST_LOGS = 64


def read_recording(connection: Connection, job: Json, now: datetime | None, *, logs: bool) -> Recording:
    """Return what can be read of a job. now: the time of the API server's response with the job."""
    reader = _JobReader(connection, job)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ddpjob-bundle") as pool:
        pods, former = pool.submit(reader.pods_of_job), pool.submit(reader.former)
        service = pool.submit(reader.object, "service", names.SERVICES)
        policy = pool.submit(reader.object, "networkPolicy", names.NETWORK_POLICIES)
        claims, events = pool.submit(reader.claims), pool.submit(reader.events_of_job)
        operators, version = pool.submit(reader.serving), pool.submit(reader.version)
        found = Recording(
            job=job,
            now=now or datetime.now(UTC),
            place="cluster",
            settings=reader.settings(operators.result()),
            pods=pods.result(),
            former=former.result(),
            service=service.result(),
            policy=policy.result(),
            claims=claims.result(),
            events=events.result(),
            operators=operators.result(),
            versions={"ddpjob": __version__, **version.result(), **_versions(operators.result())},
        )
        texts = reader.operator_log(found.operators)
        found = replace(found, assumed=frozenset(reader.assumed), logs=dict(pool.map(reader.failure, _unread(found))))
        if logs:
            texts |= dict(pool.map(reader.end_of_log, _pods_with_logs(found)))
    reader.unread["metrics"] = "they are on the volume of the job, not on this machine"
    unread = [Unread(what=kind, reason=why) for kind, why in sorted(reader.unread.items())]
    return replace(found, texts={path: text for path, text in texts.items() if text}, unread=unread)


class _JobReader(Reader):
    """Reads what belongs to one job. assumed: what of the inputs of a plan could not be read."""

    def __init__(self, connection: Connection, job: Json) -> None:
        meta = job["metadata"]
        super().__init__(connection, str(meta["namespace"]), _SECONDS)
        self._job = job
        self._name, self._uid = str(meta["name"]), str(meta["uid"])
        self.assumed: set[Assumed] = set()

    def pods_of_job(self) -> Sequence[Json] | None:
        return self._all("pods", "pods", names.PODS, f"{names.LABEL_JOB_UID}={self._uid}")

    def former(self) -> Sequence[Json]:
        """Return the pods of a deleted job of the same name, which a first attempt waits for."""
        if (self._job.get("status") or {}).get("attempt"):
            return ()
        selector = f"{names.LABEL_JOB_NAME}={self._name},{names.LABEL_JOB_UID}!={self._uid}"
        return self._all("pods", "pods", names.PODS, selector) or ()

    def object(self, kind: Assumed, resource: names.Resource) -> Json | None:
        """Return the Service or the NetworkPolicy of the job, which have the same name."""
        found = self.one(kind, f"the {resource.kind}", resource, names.service_name(self._name, self._uid))
        if isinstance(found, str):
            self.assumed.add(kind)
            return None
        return found

    def claims(self) -> dict[str, Json | None]:
        """Return the claims of checkpoints and data."""
        spec = self._job["spec"]
        checkpoint, data = spec.get("checkpoint"), spec.get("data") or {}
        own = (checkpoint.get("claimName") or names.claim_name(self._name)) if checkpoint else None
        found: dict[str, Json | None] = {}
        for name in filter(None, (own, data.get("claimName"))):
            claim = self.claim(str(name))
            if isinstance(claim, str):
                self.assumed.add("claim")
            else:
                found[str(name)] = claim
        return found

    def events_of_job(self) -> Sequence[Json]:
        """Return the Events about the job, its pods, its Service and its claims, the oldest first."""
        query: Query = {"limit": _PAGE}
        listed = self.items("events", "events", names.EVENTS, self.namespace, query, pages=_PAGES) or ()
        prefix = names.service_name(self._name, self._uid)
        mine = {self._name, prefix, names.claim_name(self._name)}
        mine |= {str((self._job["spec"].get(part) or {}).get("claimName")) for part in ("checkpoint", "data")}
        return [e for e in listed if (about := _about(e)) in mine or about.startswith(f"{prefix}-")]

    def serving(self) -> Sequence[Json]:
        """Return the Deployments of operators that serve the namespace."""
        return [one for one in self.operators() or () if serves(one, self.namespace)]

    def settings(self, operators: Sequence[Json]) -> EngineSettings:
        """Return what plans of the operator depend on; its defaults if its Deployment does not say."""
        for deployment in operators:
            try:
                return parse([], operator_environment(deployment)).engine
            except (SettingsError, SystemExit) as error:  # a later release has other settings
                self.unread["settings"] = f"those of the operator are not known, the defaults are used: {error}"
        if not operators:
            self.unread["settings"] = "those of the operator are not known, the defaults are used"
        return Settings().engine

    def version(self) -> dict[str, str]:
        try:
            answer = self._connection.once("GET", "/version", seconds=self._seconds).body
        except RequestError:
            return {}
        return {"kubernetes": str(answer.get("gitVersion"))}

    def operator_log(self, operators: Sequence[Json]) -> dict[str, str]:
        """Return what the operator logged about the job, or an earlier one of its name."""
        lines: list[str] = []
        what = "the log of the operator"
        for namespace in dict.fromkeys(str(one["metadata"]["namespace"]) for one in operators):
            query: Query = {"labelSelector": names.OPERATOR_SELECTOR, "limit": _PAGE}
            for pod in self.items("operator.log", what, names.PODS, namespace, query) or ():
                asked: Query = {"container": "operator", "tailLines": _LOG_LINES, "limitBytes": _LOG_BYTES}
                text = self.text("operator.log", what, namespace, str(pod["metadata"]["name"]), asked)
                lines += (line for line in text.splitlines() if is_about(line, self.namespace, self._name))
        if not operators:
            self.unread.setdefault("operator.log", "no operator was found, or its Deployment may not be read")
        return {"operator.log": "".join(f"{line}\n" for line in sorted(lines))}

    def failure(self, pod: tuple[str, str]) -> tuple[str, LogFailure | None]:
        """Return the uid of a failed pod, and what its log says."""
        name, uid = pod
        return uid, log_failure(self.log(name))

    def end_of_log(self, pod: str) -> tuple[str, str]:
        """Return the path in the bundle, and the end of the log of a pod."""
        return f"logs/{pod}.log", self.log(pod)

    def _all(self, kind: str, what: str, resource: names.Resource, selector: str) -> Sequence[Json] | None:
        query: Query = {"labelSelector": selector, "limit": _PAGE}
        return self.items(kind, what, resource, self.namespace, query, pages=_PAGES)


def is_about(line: str, namespace: str, job: str) -> bool:
    """Return whether a line of the operator's log is about a job, in one of its two formats."""
    if line.startswith("{"):
        try:
            found = json.loads(line)
        except ValueError:
            return False
        return isinstance(found, dict) and (found.get("namespace"), found.get("job")) == (namespace, job)
    return f"namespace={namespace} job={job} " in f"{line.rstrip(']')} "


def _unread(recording: Recording) -> Sequence[tuple[str, str]]:
    """Return the pods whose logs the operator reads before it decides."""
    if recording.pods is None:
        return ()
    try:
        return needs_logs(recording)
    except (ValueError, KeyError, TypeError):  # an object of another release; the replay says so
        return ()


def _pods_with_logs(recording: Recording) -> list[str]:
    return [str(pod["metadata"]["name"]) for pod in recording.pods or ()][:_MOST_LOGS]


def _about(event: Json) -> str:
    return str((event.get("involvedObject") or {}).get("name"))


def _versions(operators: Iterable[Json]) -> Mapping[str, str]:
    """Return release and image of the operator."""
    found: dict[str, str] = {}
    for one in operators:
        containers = cast(list[Json], one["spec"]["template"]["spec"].get("containers") or [])
        found["operator"] = str((one["metadata"].get("labels") or {}).get("app.kubernetes.io/version") or "unknown")
        found["operatorImage"] = ", ".join(str(container.get("image")) for container in containers)
    return found
