"""Prepares a run: applies the options of ``ddpjob run`` to the job of the file and admits the result.

Holds ``--set``, ``--volume``, ``--data-dir`` and ``--digits-if-offline``; used by ``run``.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddpjob.api.objects import Json
from ddpjob.cli.options import Request
from ddpjob.client import jobfile
from ddpjob.client.jobfile import JobFile, Loader, child, require_known_fields, schema, yaml_problem
from ddpjob.engine.launcher import injection_warning, launch_warning
from ddpjob.errors import DDPJobError, did_you_mean
from ddpjob.local import LocalError
from ddpjob.local.admission import EXAMPLE_UID, AdmittedJob, admit
from ddpjob.local.pod_process import ENTRYPOINT
from ddpjob.local.programs import runs_ddptrain
from ddpjob.local.resources import visible_gpus
from ddpjob.local.shim import die_with_parent
from ddpjob.local.state import HostPaths, StateFolder

Part = str | int
"""One part of a field's path: the name of a field, or the index of a list's entry."""
_PART = re.compile(r'\.?([A-Za-z0-9_/-]+)|\[(\d+)\]|\[(?:"([^"]+)"|\'([^\']+)\')\]')
_ROOTS = ("metadata", "spec")
_EXAMPLES = "for example --set numNodes=3, --set 'args[2]=\"5\"', --set metadata.labels.team=a"

FETCH_SECONDS = 120.0  # for 11 MB; on a slower network a copy of the files is the better way


@dataclass
class Prepared:
    """What to run. notes, warnings: lines to print before the run begins."""

    file: JobFile
    admitted: AdmittedJob
    paths: HostPaths
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def prepare(request: Request) -> Prepared:
    """Return the admitted job with every change that the options make. Raises ``LocalError``."""
    file = jobfile.read(request.source, request.script_args or ())
    for assignment in request.assignments:
        assign(file.job, assignment)
    if not file.job["metadata"].get("name"):
        raise LocalError(f"{request.source}: metadata.name is missing", "every job needs a name", "add --name NAME")
    admitted = admit(file.job, uid=EXAMPLE_UID if request.dry_run else None)
    root = Path(request.state_dir).expanduser() if request.state_dir else None
    paths = HostPaths(admitted.job, StateFolder(root), _volumes(request.volumes or (), admitted.claims))
    if request.data_dir is not None:
        admitted = use_directory(admitted, paths, request.data_dir)
    notes = [f"ignored {len(file.ignored)} other documents: {', '.join(file.ignored)}"] if file.ignored else []
    warnings = [_missing_gpus(admitted), launch_warning(admitted.job), injection_warning(admitted.job)]
    return Prepared(file, admitted, paths, notes, [warning for warning in warnings if warning])


def _volumes(given: Sequence[str], claims: Sequence[str]) -> Mapping[str, Path]:
    """Return claim name to directory for each ``--volume CLAIM=DIR``. Raises ``LocalError``."""
    volumes: dict[str, Path] = {}
    for text in given:
        claim, equals, directory = text.partition("=")
        path = Path(directory).expanduser().absolute()
        if not equals or not directory:
            raise LocalError(
                f"--volume {text}: =DIR is missing", "--volume takes CLAIM=DIR", "--volume my-claim=./mine"
            )
        if claim not in claims:
            hint = did_you_mean(claim, claims, f"claims of the job: {', '.join(claims) or 'none'}")
            raise LocalError(f"--volume {text}: the job mounts no claim {claim}", hint, "name a claim of the job")
        if not path.is_dir():
            # Not created, so that a typo cannot look like an empty volume.
            raise LocalError(
                f"--volume {text}: no such directory", f"{path} must exist: it is not created", f"mkdir -p {path}"
            )
        volumes[claim] = path
    return volumes


def differences(admitted: AdmittedJob, paths: HostPaths) -> Iterator[str]:
    """Yield what differs from a cluster, and which directories serve as claims that the job did not create."""
    yield (
        "local mode: images, resource limits, security contexts, probes, placement and network policies are not "
        "enforced, and mount paths are translated into directories of this machine"
    )
    if not admitted.command:
        yield f"the job has no command: running `{ENTRYPOINT}`, the entrypoint of this project's image"
    for claim in admitted.claims:
        if claim != admitted.own_claim and claim not in paths.volumes:
            yield f"claim {claim} is {paths.claim(claim)}; use another directory with --volume {claim}=DIR"


def _missing_gpus(admitted: AdmittedJob) -> str | None:
    """Return a warning if this machine has fewer GPUs than each node requests."""
    wanted, found = admitted.job.spec.devices_per_node, len(visible_gpus())
    machine = f"each node requests {wanted} GPUs, this machine has {found or 'none'}"
    return f"{machine}: --nproc N sets the number of processes per node" if wanted > found else None


def assign(job: Json, assignment: str) -> None:
    """Carry out one ``--set FIELD=VALUE``: a path below spec, and a YAML value. ``null`` removes the field.

    Raises:
        LocalError: there is no such field or entry, or the value is missing or not YAML.
    """
    path, equals, text = assignment.partition("=")
    try:
        if not equals:
            raise LocalError("the = is missing", "it takes FIELD=VALUE")
        parts = _parts(path.strip())
        _put(job, parts, _value(text, _schema_of(parts)))
        require_known_fields(job)
    except DDPJobError as error:
        raise LocalError(f"--set {assignment}: {error.error}", error.hint, error.next_step or _EXAMPLES) from error


def _parts(path: str) -> list[Part]:
    parts: list[Part] = []
    position = 0
    while position < len(path):
        found = _PART.match(path, position)
        if found is None:
            raise LocalError(f'"{path[position:]}" is not part of a path', "dots separate fields")
        name, index, double, single = found.groups()
        parts.append(int(index) if index is not None else name or double or single)
        position = found.end()
    if not parts or isinstance(parts[0], int):
        raise LocalError("it names no field", "it takes FIELD=VALUE")
    return parts if parts[0] in _ROOTS and len(parts) > 1 else ["spec", *parts]


def _schema_of(parts: list[Part]) -> Json:
    """Return the schema of the value at a path, {} if it allows anything or there is no such field."""
    node = schema()
    for part in parts:
        node = (node.get("items") if isinstance(part, int) else child(node, part)) or {}
    return node


def _value(text: str, node: Json) -> Any:
    """Return the YAML value; a number is text if the field takes text, so that ``--set args[2]=5`` needs no quotes."""
    try:
        value = yaml.load(text, Loader)  # noqa: S506 - derived from SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LocalError(
            f"the value is not YAML: {yaml_problem(error)}",
            "quotes, brackets and braces are YAML syntax",
            "quote the value for the shell and for YAML: --set 'field=\"value\"'",
        ) from error
    if node.get("type") == "string" and isinstance(value, int | float):
        return text.strip()
    if isinstance(value, list) and node.get("items", {}).get("type") == "string":
        return [str(item) if type(item) is int else item for item in value]
    return value


def _put(job: Json, parts: list[Part], value: Any) -> None:
    """Set the value at a path. Missing objects on the way are added, and the entry after the last of a list."""
    holder: Any = job
    path = ""
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        if isinstance(part, int):
            _require_entry(holder, part, path)
        elif not isinstance(holder, dict):
            raise LocalError(f"{path} is not a mapping here", "it has no fields")
        path = f"{path}[{part}]" if isinstance(part, int) else f"{path}.{part}".lstrip(".")
        if after is not None:
            if (holder.get(part) if isinstance(holder, dict) else holder[part]) is None:
                holder[part] = [] if isinstance(after, int) else {}
            holder = holder[part]
    holder[part] = value
    if value is None:
        del holder[part]


def _require_entry(entries: Any, index: int, path: str) -> None:
    if not isinstance(entries, list):
        raise LocalError(f"{path} is not a list", "[n] selects a list's entry")
    length, field = len(entries), path.removeprefix("spec.")
    if index > length:
        raise LocalError(
            f"{field} has no entry [{index}]",
            f"it has {length}, counted from 0" if length else "it has none",
            f"--set '{field}[{length}]=…' adds one" if length else f"--set '{field}=[a, b]' sets the whole list",
        )
    if index == length:
        entries.append(None)


def use_directory(admitted: AdmittedJob, paths: HostPaths, given: str) -> AdmittedJob:
    """Return the job with the data of ``--data-dir``. Raises ``LocalError`` if it cannot use that directory."""
    _require_ddptrain(admitted, "--data-dir")
    directory = Path(given).expanduser().absolute()
    if not directory.is_dir():
        raise LocalError(
            f"--data-dir {given}: no such directory",
            "the directory must hold the four MNIST files, gzipped or not",
            f"ddptrain data fetch --data-dir {given} downloads the files; without a network, use --digits-if-offline",
        )
    for mount in paths.mounts():
        if directory.is_relative_to(mount):
            raise LocalError(
                f"--data-dir {given} is below {mount}, where the job mounts a volume",
                "local mode translates that path into the volume's directory",
                "--volume CLAIM=DIR uses a directory as the volume",
            )
    return _with_data_dir(admitted, directory)


def digits_if_offline(
    admitted: AdmittedJob, paths: HostPaths, *, fresh: bool, say: Callable[[str], None], warn: Callable[[str], None]
) -> AdmittedJob:
    """Return the job with MNIST on this machine instead of ``--download``, or with scikit-learn's digits."""
    _require_ddptrain(admitted, "--digits-if-offline")
    options, others = _data_options(admitted)
    if not options.download:
        return admitted
    # --fresh empties the volume of the claimTemplate, and the data in it.
    if options.data_dir and not fresh and _is_complete(paths.on_host(options.data_dir)):
        return admitted
    kept = paths.folder.root / "datasets" / "mnist"
    say("looking for MNIST")
    problem = _fetch(kept)
    if problem is None:
        return _with_data_dir(admitted, kept)
    warn(f"NOT MNIST: it is not on this machine and cannot be downloaded ({problem})")
    warn("training on scikit-learn's digits instead (1,797 images of 8×8)")
    warn("ddpjob run --data-dir DIR trains on MNIST files that you have")
    return admitted.with_args([*others, "--data", "digits"])


def _data_options(admitted: AdmittedJob) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of ``ddptrain train`` that choose its data, and its other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--data", nargs="?")
    parser.add_argument("--data-dir", nargs="?")
    parser.add_argument("--download", action="store_true")
    return parser.parse_known_args(admitted.job.spec.args or ["train"])


def _with_data_dir(admitted: AdmittedJob, directory: Path) -> AdmittedJob:
    options, others = _data_options(admitted)
    data = ["--data", options.data] if options.data else []
    return admitted.with_args([*others, *data, "--data-dir", str(directory)])


def _require_ddptrain(admitted: AdmittedJob, option: str) -> None:
    if not runs_ddptrain(admitted):
        raise LocalError(
            f"{option} is for jobs that run ddptrain; this job runs {' '.join(admitted.command)}",
            "other programs have other options for their data",
            "--set 'args[0]=…' changes an argument, --volume CLAIM=DIR gives a volume a directory",
        )


def _is_complete(directory: Path) -> bool:
    return directory.is_dir() and _ddptrain("verify", directory).returncode == 0


def _fetch(directory: Path) -> str | None:
    """Download MNIST. Return None on success, otherwise a short reason."""
    try:
        done = _ddptrain("fetch", directory, "--tries", "1")
    except subprocess.TimeoutExpired:
        return f"no answer for {FETCH_SECONDS:g} s"
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return errors[0].removeprefix("error: ").split(";")[0] if errors else "ddptrain data fetch failed"


def _ddptrain(verb: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # A separate program: the trainer is not part of the operator's package and may not be installed.
    command = [sys.executable, "-m", "ddptrain", "data", verb, "--data-dir", str(directory), *options]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=FETCH_SECONDS,
        check=False,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )
