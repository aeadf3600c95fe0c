"""``DDPJob``: a job, built from keyword arguments, YAML or a script, or as a client returned it."""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self, cast

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.status import DDPJobStatus, recorded_status
from ddpjob.errors import InvalidJobError

if TYPE_CHECKING:
    from symtable import SymbolTable

    from ddpjob.api.spec import DDPJobSpec
    from ddpjob.client.jobfile import JobFile


OF_FUNCTIONS = ".ddpjob"
"""Folder of a script that ``DDPJob.from_function`` wrote, also in the working directory of a pod."""


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
    def from_function(
        cls,
        function: Callable[..., object],
        arguments: Mapping[str, object] | None = None,
        **options: Any,
    ) -> Self:
        """Return a job whose ranks call a function of a notebook or a file, named as the function without ``name``.

        Its source is written as a script to the state folder of this machine, and sent as by ``from_script``. So the
        function imports and defines in itself what it uses; what it returns is lost.

        Args:
            arguments: its keyword arguments, as values that JSON has.
            options: as of ``from_script``.

        Raises:
            InvalidJobError: it is no function whose source suffices, an argument is wrong, or a field.
        """
        return cls.from_script(_script_of(function, arguments), **options)

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
        from ddpjob.client.jobfile import dump_yaml, without_server_fields

        return dump_yaml(*self.others, without_server_fields(self.manifest))

    def __repr__(self) -> str:
        place = f", namespace={self.namespace!r}" if self.namespace else ""
        return f"DDPJob({self.name!r}{place}, state={self.state!r})"


def _script_of(function: Callable[..., object], given: Mapping[str, object] | None) -> Path:
    """Return a script in the state folder that calls a function with these arguments."""
    import inspect
    from hashlib import sha256

    from ddpjob.local.state import StateFolder, make_private, usable

    called = getattr(function, "__name__", repr(function))
    source = _source_of(function, called)
    try:
        arguments = dict(given or {})
        inspect.signature(function).bind(**arguments)
        text = json.dumps(arguments)
        if (kept := json.loads(text)) != arguments:
            wrong = next(key for key in arguments if kept.get(key) != arguments[key])
            raise TypeError(f"JSON makes {kept.get(wrong)!r} of its argument {wrong}, {arguments[wrong]!r}")
    except (TypeError, ValueError) as error:
        raise InvalidJobError(
            f"{called} cannot be called with these arguments: {error}",
            "they are sent as JSON: numbers, texts, true, false, None, lists, and dicts with texts as keys",
            f"pass them by name: DDPJob.from_function({called}, {{'lr': 0.1}})",
        ) from error
    source += (
        '\n\nif __name__ == "__main__":\n    import json as _json, os as _os, sys as _sys\n\n'
        "    _sys.path.insert(0, _os.getcwd())  # as in a notebook\n"
        f"    {called}(**_json.loads({text!r}))\n"
    )
    root = StateFolder().root
    # The folder of a script is the first that Python searches, so torch.py would take the place of torch. This machine
    # does not know the modules of the pod; no import statement has a name that ends with "-".
    file = f"{called}-.py"
    try:
        digest = sha256(source.encode()).hexdigest()[:16]
    except UnicodeEncodeError as error:
        raise _no_script(called, f"its source is no valid text: {error}") from error
    script = root / "functions" / digest / OF_FUNCTIONS / file
    with usable(root):
        make_private(script.parent)
        script.write_text(source, encoding="utf-8")
    return script


def _source_of(function: Callable[..., object], called: str) -> str:
    """Return the source of a function; its lines have the numbers that they have in the file or the cell."""
    import builtins
    import inspect
    import symtable

    if not isinstance(function, FunctionType):
        raise _no_script(called, "it is a method, a class, or a function that is not written in Python")
    if called == "<lambda>" or "." in function.__qualname__.rpartition("<locals>.")[2]:
        raise _no_script(called, "it is a lambda or a method")
    if function.__code__.co_name != called and not hasattr(function, "__wrapped__"):
        raise _no_script(called, "its __name__ was changed")
    makers = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(makes(function) for makes in makers):
        raise _no_script(called, "a call of it only makes a coroutine or a generator")
    try:
        lines, first = inspect.getsourcelines(function)
        # Its indentation stays, because lines of a text in it may have less.
        head = "if True:\n" if lines[0][0].isspace() else "\n"
        source = (("\n" * (first - 2) + head) if first > 1 else "") + "".join(lines)
        table = symtable.symtable(source, called, "exec")
        if called not in {name.get_name() for name in table.get_symbols() if name.is_namespace()}:
            raise SyntaxError("its file was changed since it was imported")
        read = _names_outside(table)
    except (OSError, TypeError, ValueError, SyntaxError) as error:
        raise _no_script(called, f"its source is not known: {error}") from error
    if hasattr(function, "__wrapped__") or lines[0].lstrip().startswith("@"):
        raise _no_script(called, "it is decorated")
    known = {name for name, value in vars(builtins).items() if _is_of_python(value)}  # IPython adds display and others
    if outer := {*function.__code__.co_freevars} | read - {called, "__file__", *known}:
        raise _no_script(called, f"it uses {', '.join(sorted(outer))} from outside of it")
    return source


def _names_outside(table: "SymbolTable") -> set[str]:
    """Return the global names that code reads and does not set, and those that it declares global."""
    found = table.get_symbols()
    own = {
        name.get_name()
        for name in found
        if name.is_declared_global() or (name.is_global() and name.is_referenced() and not name.is_assigned())
    }
    return own.union(*map(_names_outside, table.get_children()))


def _is_of_python(value: object) -> bool:
    return getattr(value, "__module__", None) in (None, "builtins", "_io", "_sitebuiltins")


def _no_script(function: str, why: str) -> InvalidJobError:
    return InvalidJobError(
        f"{function} cannot be sent as a job: {why}",
        "the ranks get the source of one function, without what is around it",
        "write a plain function with def that imports and defines in itself what it uses, or use DDPJob.from_script",
    )
