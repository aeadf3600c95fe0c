"""Admission of a user's DDPJob: the models of the API accept it, or ``InvalidJobError`` says why not.

``admit`` runs once for each job; everything after it reads the ``AdmittedJob``.
"""

import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated

from pydantic import AfterValidator, StringConstraints, ValidationError

from ddpjob.api import names
from ddpjob.api.model import OpenModel
from ddpjob.api.objects import Json
from ddpjob.api.pods import DNS_LABEL
from ddpjob.api.spec import NAME_RULE, DDPJobSpec, Location, field_path, is_job_name, message_of
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import Create, EngineSettings
from ddpjob.engine.desired import Job, desired_claim, desired_pods
from ddpjob.engine.inplace import grant
from ddpjob.engine.merge import template_faults
from ddpjob.engine.network import desired_policy, desired_service
from ddpjob.errors import InvalidJobError

EXAMPLE_UID = "00000000-0000-4000-8000-000000000000"
"""The uid in what ``ddpjob render`` prints; a cluster would choose a random one."""
LOGS_COMMAND = "ddpjob logs {job} --node {node_rank} --attempt {attempt}"
SETTINGS = EngineSettings(logs_command=LOGS_COMMAND, launcher_image="", gang_scheduler=None, kueue=None, is_local=True)
"""Of all plans of local mode, where the jobs find ``ddprun`` on this machine."""


def _job_name(name: str) -> str:
    if not is_job_name(name):
        raise ValueError(NAME_RULE.message.removeprefix("metadata.name "))
    return name


class _Metadata(OpenModel):
    name: Annotated[str, AfterValidator(_job_name)]
    namespace: Annotated[str, StringConstraints(max_length=63, pattern=DNS_LABEL)] = "default"
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _Document(OpenModel):
    metadata: _Metadata
    spec: DDPJobSpec


@dataclass(frozen=True)
class AdmittedJob:
    """A DDPJob that passed admission.

    body: the object as an API server would store it, defaults included. job: its name and its parsed spec.
    """

    body: Json
    job: Job

    @cached_property
    def pods(self) -> tuple[Json, ...]:
        """The pods of attempt 1 as local mode runs them, rendered once."""
        return tuple(create.body for create in self._first_pods(SETTINGS))

    def _first_pods(self, settings: EngineSettings) -> Iterable[Create]:
        return desired_pods(self.job, 1, settings, granted=grant(None, 0, self.job.spec.restart_policy))

    @property
    def command(self) -> list[str]:
        """The trainer's command without its arguments; empty if the image's entrypoint runs."""
        return [str(part) for part in self.pods[0]["spec"]["containers"][0].get("command") or ()]

    @property
    def own_claim(self) -> str | None:
        """The claim made from ``checkpoint.claimTemplate``, or None if the job has no such template."""
        checkpoint = self.job.spec.checkpoint
        return self.job.claim if checkpoint is not None and checkpoint.claim_template is not None else None

    @property
    def claims(self) -> list[str]:
        """Every claim that the pods mount."""
        # The API accepts any value in a template's volumes; a kubelet rejects those that are not volumes.
        volumes = [volume for volume in self.pods[0]["spec"].get("volumes") or () if isinstance(volume, dict)]
        sources = [volume.get("persistentVolumeClaim") for volume in volumes]
        names_given = [source.get("claimName") for source in sources if isinstance(source, dict)]
        return list(dict.fromkeys(name for name in names_given if isinstance(name, str)))

    def created(self) -> list[Json]:
        """Return what an operator with default settings creates: Service, policy, claim, and the pods of attempt 1."""
        settings = EngineSettings()
        parts = (desired_service(self.job), desired_policy(self.job, settings), desired_claim(self.job))
        creates = [*(create for create in parts if create is not None), *self._first_pods(settings)]
        return [dict(sorted(create.body.items())) for create in creates]  # apiVersion and kind first


@dataclass(frozen=True)
class Fault:
    """A value of a DDPJob that an API server refuses, or of which no pod can be made.

    location: of the value, empty if the fault is not about a single value. is_warning: it is only a probable mistake.
    """

    location: Location
    message: str
    hint: str = ""
    is_warning: bool = False

    def __str__(self) -> str:
        path = field_path("", self.location).removeprefix(".")
        return f"{path}: {self.message}" if path else self.message


def faults(document: Json) -> list[Fault]:
    """Return why a document is refused; none if it is a DDPJob that runs."""
    return _checked(document)[1]


def _checked(document: Json) -> tuple[_Document | None, list[Fault]]:
    """Return the typed document, or None, and its faults."""
    try:
        document = json.loads(json.dumps(document, allow_nan=False))
        given = _Document.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as error:
        return None, [Fault(item["loc"], message_of(item)) for item in error.errors()]
    except (TypeError, ValueError) as error:
        return None, [Fault((), str(error))]
    found = [_template_fault(line) for line in template_faults(given.spec.wire().get("template") or {})]
    try:
        _ = given.spec.devices_per_node  # a number that the scheduler can count
    except ValueError as error:
        found.append(Fault((), str(error)))
    return given, found


def _template_fault(line: str) -> Fault:
    """Return the fault for ``spec.template.spec.volumes[0]: message``; such a path has fixed names only."""
    path, _, message = line.partition(": ")
    parts = re.findall(r"(\w+)|\[(\d+)\]", path)
    return Fault(tuple(name or int(index) for name, index in parts), message)


def require_valid(document: Json) -> _Document:
    """Return the typed document. Raises ``InvalidJobError`` if it is refused; the error names each field and rule."""
    given, found = _checked(document)
    if given is None or found:
        name = (document.get("metadata") or {}).get("name") or "(without a name)"
        raise InvalidJobError(
            f"the DDPJob {name} is refused: {'; '.join(map(str, found))}",
            "an API server refuses it for the same reason, or no pod can be made from it",
            "correct the field; docs/reference/fields.md lists what each field may hold",
        )
    return given


def admit(document: Json, *, uid: str | None = None) -> AdmittedJob:
    """Return the document as an API server would store it, under ``uid`` or a random one.

    Raises:
        InvalidJobError: the document is refused; the error names the field and the rule.
    """
    given = require_valid(document)
    meta, spec = given.metadata, given.spec
    if spec.managed_by not in (None, names.CONTROLLER):
        raise InvalidJobError(
            f"the DDPJob {meta.name} has managedBy: {spec.managed_by}",
            "this operator leaves the job to that controller, so no pod would start",
            "add --set managedBy=null",
        )
    job = Job(meta.name, meta.namespace, uid or str(uuid.uuid4()), 1, spec, spec.num_nodes, spec.wire())
    server = {"uid": job.uid, "creationTimestamp": timestamp(datetime.now(UTC)), "generation": job.generation}
    metadata = meta.wire() | {"namespace": meta.namespace} | server
    head = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind}
    return AdmittedJob(head | {"metadata": metadata, "spec": job.stored_spec}, job)
