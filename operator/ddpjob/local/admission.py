"""A user's DDPJob through the in-memory API server and the renderer: accepted with its defaults, or explained."""

from typing import Any

from pydantic import ValidationError

from ddpjob.api import names
from ddpjob.api.spec import explain, parse_spec
from ddpjob.cluster.base import ClusterError, Json
from ddpjob.cluster.memory import MemoryCluster
from ddpjob.engine.actions import Create, EngineSettings
from ddpjob.engine.desired import Job, desired_claim, desired_pods, desired_service
from ddpjob.engine.merge import template_faults
from ddpjob.local.errors import LocalError

_UID = "00000000-0000-4000-8000-000000000000"
_BY_THE_SERVER = ("uid", "creationTimestamp", "resourceVersion", "generation")


def admitted(document: Json) -> Json:
    """The DDPJob as the API server would store it.

    Raises:
        LocalError: it is refused; the error names the field and the rule.
    """
    namespace = namespace_of(document)
    cluster = MemoryCluster(new_uid=lambda: _UID)
    cluster.create_namespace(namespace)
    try:
        stored = cluster.server.create(names.DDPJOBS, namespace, document)
        parse_spec(stored)
    except (ClusterError, ValidationError, ValueError) as error:
        raise _refusal(document, error) from error
    if faults := template_faults(stored["spec"].get("template") or {}):
        raise LocalError(
            f"the DDPJob {_name(document)} is refused: {'; '.join(faults)}",
            "no pod can be made from such a template",
            "compare it with `kubectl explain pod.spec`",
        )
    return stored


def namespace_of(document: Json) -> str:
    """The namespace a document asks for."""
    return str((document.get("metadata") or {}).get("namespace") or "default")


def job_of(stored: Json) -> Job:
    """The parsed job of an admitted document."""
    return Job.of(stored, parse_spec(stored))


def render(job: Json) -> list[Json]:
    """What a cluster would be asked for: the DDPJob with its defaults, Service, claim and pods of attempt 1.

    Names carry a uid of zeros, where a cluster would give one of its own.

    Raises:
        LocalError: the spec is refused.
    """
    stored = admitted(job)
    parsed = job_of(stored)
    meta = {key: value for key, value in stored["metadata"].items() if key not in _BY_THE_SERVER}
    claim = desired_claim(parsed)
    creates: list[Create] = [desired_service(parsed), *([claim] if claim else [])]
    creates += desired_pods(parsed, 1, EngineSettings())
    return [stored | {"metadata": meta}, *(create.body for create in creates)]


def _refusal(document: Json, error: Any) -> LocalError:
    if isinstance(error, ValidationError):
        lines = explain(error)
    else:
        causes = getattr(error, "details", {}).get("causes") or []
        lines = [f"{cause['field']}: {cause['message']}" for cause in causes] or [str(error)]
    return LocalError(
        f"the DDPJob {_name(document)} is refused: {'; '.join(lines)}",
        "an API server would refuse it for the same reason",
        "correct the field; `kubectl explain ddpjob.spec` and docs/fields.md say what each may hold",
    )


def _name(document: Json) -> str:
    return str((document.get("metadata") or {}).get("name") or "(without a name)")
