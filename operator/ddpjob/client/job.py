"""``DDPJob``: a job, built from keyword arguments, YAML or a script, or as a client returned it."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from ddpjob.api import names
from ddpjob.api.objects import SET_BY_SERVER, Json
from ddpjob.api.status import DDPJobStatus, recorded_status

if TYPE_CHECKING:
    from ddpjob.api.spec import DDPJobSpec
    from ddpjob.client.jobfile import JobFile


class DDPJob:
    """A job: what it asks for, and as a client returned it, its status. It is never changed.

    manifest: the DDPJob as JSON, with the names of docs/reference/fields.md. others: Secrets and ConfigMaps of the same
    YAML.
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

        Fields are those of docs/reference/fields.md, as ``num_nodes`` or ``numNodes``.
        ``env`` may be a dict, and ``checkpoint`` ``"10Gi"``, ``"10Gi:my-storage-class"`` or the name of a claim.

        Args:
            spec: also ``gpus`` and ``memory`` of each node, and ``max_restarts``.

        Raises:
            InvalidJobError: a field is unknown or wrong.
        """
        from ddpjob.client.jobspec import require_texts, spec_of

        given = {"namespace": namespace, "labels": dict(labels or {}), "annotations": dict(annotations or {})}
        require_texts("metadata.labels", labels or {})
        require_texts("metadata.annotations", annotations or {})
        metadata = {"name": name, **{key: value for key, value in given.items() if value}}
        head = {"apiVersion": names.API_VERSION, "kind": names.DDPJOBS.kind, "metadata": metadata}
        self._take(head | {"spec": spec_of(name, spec)})

    @classmethod
    def from_yaml(cls, source: str | Path) -> Self:
        """Return the one job of a YAML file, or of YAML or JSON text, which has more than one line or begins with {.

        Raises:
            InvalidJobError: it cannot be read, is not YAML, holds no or several jobs, or a field is unknown or wrong.
        """
        from ddpjob.client import jobfile

        if isinstance(source, str) and ("\n" in source or source.strip()[:1] in ("", "{")):
            return cls.from_file(jobfile.from_text(source, Path.cwd()))
        return cls.from_file(jobfile.read(str(source)))

    @classmethod
    def from_script(
        cls,
        script: str | Path,
        *args: str,
        name: str = "",
        launcher: names.ScriptLauncher = "ddprun",
        **options: Any,
    ) -> Self:
        """Return a job that runs a Python script of this machine, named as the file without ``name``.

        ``submit`` sends the script to the pods of a cluster, and with ``workdir`` the directory that holds it.

        Args:
            launcher: ``ddprun``, which the pods get from the operator, or the ``torchrun`` of the image.
            options: namespace, labels, annotations, and fields of the spec, as of ``DDPJob``.

        Raises:
            InvalidJobError: there is no such file, or a field is unknown or wrong.
        """
        from ddpjob.client import jobfile

        file = jobfile.read(str(script), args, launcher)
        made = cls(name or file.job["metadata"]["name"], **file.job["spec"] | options)
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
    def from_file(cls, file: "JobFile") -> Self:
        """Return the job of a file that was read. Raises ``InvalidJobError``."""
        made = cls.__new__(cls)
        made.others, made.directory, made.script = tuple(file.others), file.directory, file.script
        made._take(file.job)
        return made

    def _take(self, manifest: Json) -> None:
        from ddpjob.local.admission import require_valid

        require_valid(manifest)
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
    def spec(self) -> "DDPJobSpec":
        """The spec, without fields that this release does not know. Raises ``pydantic.ValidationError``."""
        from ddpjob.api.spec import parse_spec

        return parse_spec(self.manifest, ignore_unknown=True)

    @cached_property
    def status(self) -> DDPJobStatus:
        """The status; without any field before the operator has seen the job."""
        recorded = recorded_status(self.manifest.get("status") or {})
        return recorded if self._seen_state is None else recorded.changed(state=self._seen_state)

    @property
    def state(self) -> str:
        """State in one word: Pending, Running, Succeeded, … (docs/reference/status.md)."""
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
        from ddpjob.client.jobfile import dump_yaml

        metadata = {key: value for key, value in self.manifest["metadata"].items() if key not in SET_BY_SERVER}
        job = {key: value for key, value in self.manifest.items() if key != "status"} | {"metadata": metadata}
        return dump_yaml(*self.others, job)

    def __repr__(self) -> str:
        place = f", namespace={self.namespace!r}" if self.namespace else ""
        return f"DDPJob({self.name!r}{place}, state={self.state!r})"
