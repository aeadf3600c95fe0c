"""``DDPJob``: a job, built from keyword arguments, YAML or a script, or as a client returned it."""

import html
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

from pydantic import BaseModel, ValidationError

from ddpjob.api import names
from ddpjob.api.objects import SET_BY_SERVER, Json
from ddpjob.api.spec import NAME_RULE, DDPJobSpec, explain, is_job_name, parse_spec
from ddpjob.api.status import DDPJobStatus, recorded_status
from ddpjob.client import jobfile
from ddpjob.client.jobfile import JobFile
from ddpjob.errors import InvalidJobError, did_you_mean

_REFERENCE = "docs/fields.md lists every field and what it may hold"
_CORRECT = "correct the field"


class DDPJob:
    """A job: what it asks for, and as a client returned it, its status. It is never changed.

    manifest: the DDPJob as JSON, with the names of docs/fields.md. others: Secrets and ConfigMaps of the same YAML.
    directory: where programs without ``workingDir`` run on this machine. script: the script of this machine that its
    command runs; a cluster's pods get it when the job is submitted.
    """

    manifest: Json
    others: tuple[Json, ...] = ()
    directory: Path | None = None
    script: Path | None = None
    _seen_state: str | None = None

    def __init__(
        self,
        name: str,
        *,
        namespace: str | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> None:
        """Make a job from the fields of its spec, for example ``DDPJob("mnist", image="mnist:1", num_nodes=2)``.

        Fields are those of docs/fields.md, as ``num_nodes`` or ``numNodes``; ``env`` may be a dict.

        Raises:
            InvalidJobError: a field is unknown or wrong.
        """
        given = {"namespace": namespace, "labels": dict(labels or {}), "annotations": dict(annotations or {})}
        metadata = {"name": name, **{key: value for key, value in given.items() if value}}
        head = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": metadata}
        self._take(head | {"spec": _spec(name, spec)})

    @classmethod
    def from_yaml(cls, source: str | Path) -> Self:
        """Return the one job of a YAML file, or of YAML text, which has more than one line.

        Raises:
            InvalidJobError: it cannot be read, is not YAML, holds no or several jobs, or a field is unknown or wrong.
        """
        if isinstance(source, str) and "\n" in source:
            return cls.from_file(jobfile.from_text(source, Path.cwd()))
        return cls.from_file(jobfile.read(str(source)))

    @classmethod
    def from_script(
        cls, script: str | Path, *args: str, name: str = "", namespace: str | None = None, **spec: Any
    ) -> Self:
        """Return a job that runs a Python script of this machine, named as the file without ``name``.

        ``ddprun`` starts its processes, in place of torchrun, unless ``launcher`` is None. ``submit`` sends the script
        to the pods of a cluster, and with ``workdir`` the directory that holds it.

        Raises:
            InvalidJobError: there is no such file, or a field is unknown or wrong.
        """
        file = jobfile.read(str(script), args)
        given = file.job["spec"] | jobfile.SCRIPT_LAUNCHER | spec
        made = cls(name or file.job["metadata"]["name"], namespace=namespace, **given)
        made.directory, made.script = file.directory, file.script
        return made

    @classmethod
    def from_manifest(cls, manifest: Json, *, state: str | None = None) -> Self:
        """Return a job as an API server stores it. It is not checked, so that jobs of other releases can be shown.

        Args:
            state: shown in place of the state in the manifest, which may be older.
        """
        made = cls.__new__(cls)
        made.manifest, made._seen_state = manifest, state
        return made

    @classmethod
    def from_file(cls, file: JobFile) -> Self:
        """Return the job of a file that was read. Raises ``InvalidJobError``."""
        made = cls.__new__(cls)
        made.others, made.directory, made.script = tuple(file.others), file.directory, file.script
        made._take(file.job)
        return made

    def _take(self, manifest: Json) -> None:
        name = (manifest.get("metadata") or {}).get("name")
        if not name or not isinstance(name, str) or not is_job_name(name):
            raise InvalidJobError(
                f"metadata.name is {name!r}" if name else "metadata.name is missing",
                NAME_RULE.message,
                "give the job another name" if name else "give the job a name",
            )
        try:
            parse_spec(manifest)
        except ValidationError as error:
            raise InvalidJobError(
                f"the DDPJob {name} is wrong: {'; '.join(explain(error))}", _REFERENCE, _CORRECT
            ) from error
        self.manifest = manifest

    @property
    def name(self) -> str:
        """The name."""
        return str(self.manifest["metadata"]["name"])

    @property
    def namespace(self) -> str | None:
        """The namespace; None if it is left to the client."""
        return cast(str | None, self.manifest["metadata"].get("namespace"))

    @property
    def uid(self) -> str | None:
        """Identity of a submitted job; a job of the same name that is submitted later has another uid."""
        return cast(str | None, self.manifest["metadata"].get("uid"))

    @cached_property
    def spec(self) -> DDPJobSpec:
        """The spec, without fields that this release does not know. Raises ``pydantic.ValidationError``."""
        return parse_spec(self.manifest, ignore_unknown=True)

    @cached_property
    def status(self) -> DDPJobStatus:
        """The status; without any field before the operator has seen the job."""
        recorded = recorded_status(self.manifest.get("status") or {})
        return recorded if self._seen_state is None else recorded.changed(state=self._seen_state)

    @property
    def state(self) -> str:
        """State in one word: Pending, Running, Succeeded, … (docs/status.md)."""
        return self.status.state or "Pending"

    @property
    def succeeded(self) -> bool:
        """Whether the job has finished with success."""
        return self.status.is_true("Succeeded")

    @property
    def finished(self) -> bool:
        """Whether the job has succeeded or failed."""
        return self.status.is_true("Finished")

    def to_yaml(self) -> str:
        """Return the job as YAML for ``kubectl apply``, without its status and what a server added."""
        metadata = {key: value for key, value in self.manifest["metadata"].items() if key not in SET_BY_SERVER}
        job = {key: value for key, value in self.manifest.items() if key != "status"} | {"metadata": metadata}
        return jobfile.dump_yaml(*self.others, job)

    def __repr__(self) -> str:
        place = f", namespace={self.namespace!r}" if self.namespace else ""
        return f"DDPJob({self.name!r}{place}, state={self.state!r})"

    def _repr_html_(self) -> str:
        """Return state, progress and last failure, as a notebook shows them."""
        status, progress = self.status, self.status.progress
        rows = [
            ("state", self.state),
            ("nodes", status.nodes_ready),
            ("progress", progress and progress.display),
            ("loss", progress and progress.loss),
            ("restarts", status.restarts),
            *((last.reason, last.message) for last in (status.failures or ())[-1:]),
            *(("hint", last.hint) for last in (status.failures or ())[-1:]),
        ]
        bar = f'<progress max="100" value="{progress.percent}"></progress>' if progress and progress.percent else ""
        cells = "".join(
            f'<tr><th style="text-align:left">{_text(label)}</th><td style="text-align:left">{_text(value)}</td></tr>'
            for label, value in rows
            if value not in (None, "")
        )
        return f"<b>{_text(self.name)}</b> {bar}<table>{cells}</table>"


def _text(value: object) -> str:
    """Return a text as HTML. ``bdi`` limits characters that change the direction of writing to this text."""
    return f"<bdi>{html.escape(str(value))}</bdi>"


def _spec(name: str, given: Mapping[str, Any]) -> Json:
    """Return the spec as JSON, with the names of the API. Raises ``InvalidJobError``."""
    fields = {text for key, field in DDPJobSpec.model_fields.items() for text in (key, field.alias or key)}
    for key in given:
        if key not in fields:
            hint = did_you_mean(key, sorted(fields), _REFERENCE)
            raise InvalidJobError(f'a DDPJob has no field "{key}"', hint, "options of the trainer belong into args")
    values: dict[str, Any] = {key: _json(value) for key, value in given.items() if value is not None}
    if isinstance(values.get("env"), dict):
        values["env"] = [{"name": key, "value": value} for key, value in values["env"].items()]
    try:
        spec = DDPJobSpec.model_validate(values, by_alias=True, by_name=True)
    except ValidationError as error:
        raise InvalidJobError(
            f"the DDPJob {name} is wrong: {'; '.join(explain(error))}", _REFERENCE, _CORRECT
        ) from error
    return spec.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)


def _json(value: Any) -> Any:
    """Return a value as JSON has it: a tuple as a list, and a model as its fields."""
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_unset=True, exclude_none=True)
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_json(item) for item in value]
    return value
