"""Admission of a user's DDPJob: the in-memory API server and the spec model accept it, or ``LocalError`` says why not.

``admit`` runs once for each `ddpjob run`; everything after it reads the ``AdmittedJob``.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from ddpjob.api import names
from ddpjob.api.objects import Json, element
from ddpjob.api.spec import explain
from ddpjob.cluster.base import ClusterError
from ddpjob.cluster.memory import MemoryCluster
from ddpjob.engine.actions import Create, EngineSettings
from ddpjob.engine.desired import Job, desired_claim, desired_pods, desired_service
from ddpjob.engine.merge import template_faults
from ddpjob.local import LocalError

EXAMPLE_UID = "00000000-0000-4000-8000-000000000000"
"""The uid in what ``--dry-run`` prints; a cluster would choose a random one."""
_SET_BY_SERVER = ("uid", "creationTimestamp", "resourceVersion", "generation")


@dataclass(frozen=True)
class AdmittedJob:
    """A DDPJob that passed admission.

    body: the object as an API server stores it, defaults included. job: its name and its parsed spec.
    """

    body: Json
    job: Job

    @cached_property
    def pods(self) -> tuple[Json, ...]:
        """The pods of attempt 1, rendered once."""
        return tuple(create.body for create in desired_pods(self.job, 1, EngineSettings()))

    @property
    def trainer(self) -> Json:
        """The trainer's container in the pod of node 0."""
        return element(self.pods[0]["spec"]["containers"], "name", names.TRAINER_CONTAINER)

    @property
    def command(self) -> list[str]:
        """The trainer's command without its arguments; empty if the image's entrypoint runs."""
        return [str(part) for part in self.trainer.get("command") or ()]

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

    def with_args(self, args: list[str]) -> "AdmittedJob":
        """Return the job with other ``spec.args``. Raises ``LocalError`` if the spec refuses them."""
        body = self.body | {"spec": self.body["spec"] | {"args": args}}
        return AdmittedJob(body, _parsed(body))

    def manifests(self) -> list[Json]:
        """Return what a cluster would hold: the DDPJob, its Service, its claim, and the pods of attempt 1."""
        meta = {key: value for key, value in self.body["metadata"].items() if key not in _SET_BY_SERVER}
        claim = desired_claim(self.job)
        creates: list[Create] = [desired_service(self.job), *([claim] if claim else [])]
        return [self.body | {"metadata": meta}, *(create.body for create in creates), *self.pods]


def admit(document: Json, *, uid: str | None = None) -> AdmittedJob:
    """Return the document as an API server would store it, under ``uid`` or a random one.

    Raises:
        LocalError: the document is refused; the error names the field and the rule.
    """
    namespace = str((document.get("metadata") or {}).get("namespace") or "default")
    cluster = MemoryCluster(new_uid=lambda: uid) if uid is not None else MemoryCluster()
    cluster.create_namespace(namespace)
    try:
        body = cluster.server.create(names.DDPJOBS, namespace, document)
    except (ClusterError, ValidationError, ValueError) as error:
        raise _refusal(document, error) from error
    job = _parsed(body)
    if faults := template_faults(body["spec"].get("template") or {}):
        raise LocalError(
            f"the DDPJob {_name(document)} is refused: {'; '.join(faults)}",
            "no pod can be made from this template",
            "compare it with `kubectl explain pod.spec`",
        )
    if job.spec.managed_by not in (None, names.CONTROLLER):
        raise LocalError(
            f"the DDPJob {_name(document)} has managedBy: {job.spec.managed_by}",
            "this operator leaves the job to that controller, so no pod would start",
            "add --set managedBy=null",
        )
    return AdmittedJob(body, job)


def _parsed(body: Json) -> Job:
    try:
        return Job.of(body)
    except ValidationError as error:
        raise _refusal(body, error) from error


def _refusal(document: Json, error: Any) -> LocalError:
    if isinstance(error, ValidationError):
        lines = explain(error)
    else:
        causes = getattr(error, "details", {}).get("causes") or []
        lines = [f"{cause['field']}: {cause['message']}".removeprefix("<nil>: ") for cause in causes] or [str(error)]
    return LocalError(
        f"the DDPJob {_name(document)} is refused: {'; '.join(lines)}",
        "an API server refuses it for the same reason",
        "correct the field; docs/fields.md lists what each field may hold",
    )


def _name(document: Json) -> str:
    return str((document.get("metadata") or {}).get("name") or "(without a name)")
