"""From the options of ``ddpjob run`` to a job that can be run, or to the first thing that is wrong with it."""

import ctypes
import importlib.util
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from ddpjob.api import names
from ddpjob.cli import jobfile
from ddpjob.cli.host_paths import HostPaths, in_template
from ddpjob.cli.jobfile import JobFile, Loader, child, no_such_field, problem, schema
from ddpjob.cli.options import Request
from ddpjob.cli.text import did_you_mean
from ddpjob.local.errors import LocalError
from ddpjob.local.resources import gpu_limit, visible_gpus
from ddpjob.local.session import render
from ddpjob.local.state import StateFolder

Json = dict[str, Any]


@dataclass
class Prepared:
    """What is to run. notes, warnings: what its user should know before it does."""

    file: JobFile
    paths: HostPaths
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def prepare(request: Request) -> Prepared:
    """The job with everything that the options change in it. Raises ``LocalError``."""
    file = jobfile.read(request.source, request.script_args)
    spec = file.job["spec"]
    if request.nodes is not None:
        spec["numNodes"] = request.nodes
    if request.nproc is not None:
        spec["nprocPerNode"] = request.nproc
    if request.name is not None:
        file.job["metadata"]["name"] = request.name
    for assignment in request.assignments:
        assign(file.job, assignment)
    if not file.job["metadata"].get("name"):
        raise LocalError(
            f"{request.source}: metadata.name is missing", "a job is known by its name", "give it a --name"
        )
    file.job["spec"] = render(file.job)[0]["spec"]
    folder = StateFolder(request.state_dir)
    bare = HostPaths(file.job, folder)
    paths = HostPaths(file.job, folder, _volumes(request.volumes, bare))
    if request.data_dir is not None:
        use_directory(paths, request.data_dir)
    notes = [f"{len(file.ignored)} other documents are ignored: {', '.join(file.ignored)}"] if file.ignored else []
    return Prepared(file, paths, notes, warnings=_lack_of_gpus(file.job))


def _volumes(given: Sequence[str], paths: HostPaths) -> Mapping[str, Path]:
    volumes: dict[str, Path] = {}
    claims = paths.claims()
    for word in given:
        claim, equals, directory = word.partition("=")
        path = Path(directory).expanduser().absolute()
        if not equals or not directory:
            raise LocalError(
                f"--volume {word}: there is no =DIR", "it takes CLAIM=DIR", "--volume my-claim=./my-folder"
            )
        if claim not in claims:
            hint = did_you_mean(claim, claims, f"it mounts {', '.join(claims)}" if claims else "it mounts no claim")
            raise LocalError(f"--volume {word}: the job mounts no claim {claim}", hint, "name a claim of the job's")
        if not path.is_dir():
            raise LocalError(
                f"--volume {word}: no such directory", f"{path} is to stand for the claim", f"mkdir -p {path}"
            )
        volumes[claim] = path
    return volumes


def require_programs(job: Json) -> None:
    """Refuse at once what would only fail, restart and fail again."""
    if runs_ddptrain(job):
        missing = next((m for m in ("ddptrain", "torch", "numpy") if importlib.util.find_spec(m) is None), None)
        if missing:
            raise LocalError(
                f"the job runs ddptrain, which needs {missing}, and that is not installed in {sys.prefix}",
                "images are not used in local mode: programs of this machine run",
                "in the repository's folder: pip install -e '.[trainer]'",
            )
    elif (job["spec"].get("command") or [None])[0] == "torchrun" and not _on_path("torchrun"):
        raise LocalError(
            "the job runs torchrun, which is not installed here",
            "it comes with PyTorch; images are not used in local mode",
            "pip install torch",
        )


def _lack_of_gpus(job: Json) -> list[str]:
    """Nothing where this machine has the GPUs that each node asks for."""
    wanted, found = gpu_limit(job["spec"]), len(visible_gpus())
    if wanted <= found:
        return []
    has = found or "none"
    return [f"each node asks for {wanted} GPUs, this machine has {has}: --nproc N sets the processes of a node"]


def _on_path(program: str) -> bool:
    return bool(shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent)))


Step = str | int
_STEP = re.compile(r'\.?([A-Za-z0-9_/-]+)|\[(\d+)\]|\[(?:"([^"]+)"|\'([^\']+)\')\]')
_ROOTS = ("metadata", "spec")
_EXAMPLES = "for example --set numNodes=3, --set 'args[2]=\"5\"', --set metadata.labels.team=a"


def assign(job: Json, assignment: str) -> None:
    """Carry out one ``--set``; the value ``null`` removes the field.

    Raises:
        LocalError: no such field or entry, or no value.
    """
    path, equals, text = assignment.partition("=")
    if not equals:
        raise LocalError(f"--set {assignment}: there is no =", "it takes FIELD=VALUE", _EXAMPLES)
    steps = _steps(path.strip(), assignment)
    node = _schema_of(steps, assignment)
    _put(job, steps, _value(text, node, assignment), assignment)


def _steps(path: str, assignment: str) -> list[Step]:
    steps: list[Step] = []
    position = 0
    while position < len(path):
        found = _STEP.match(path, position)
        if found is None:
            raise LocalError(
                f'--set {assignment}: "{path[position:]}" is no part of a path', "fields are joined by dots", _EXAMPLES
            )
        name, index, double, single = found.groups()
        steps.append(int(index) if index is not None else name or double or single)
        position = found.end()
    if not steps or isinstance(steps[0], int):
        raise LocalError(f"--set {assignment}: it names no field", "it takes FIELD=VALUE", _EXAMPLES)
    return steps if steps[0] in _ROOTS and len(steps) > 1 else ["spec", *steps]


def _schema_of(steps: list[Step], assignment: str) -> Json:
    node, path = schema(), ""
    for step in steps:
        if isinstance(step, int):
            if node and node.get("type") != "array":
                raise LocalError(f"--set {assignment}: {path} is no list", "[n] is an entry of a list", _EXAMPLES)
            node, path = node.get("items", {}), f"{path}[{step}]"
            continue
        below = child(node, step) if node.get("type") != "array" else None
        if below is None:
            error, hint = no_such_field(path, step, node)
            raise LocalError(
                f"--set {assignment}: {error}", hint, "docs/fields.md lists all; flags of the trainer belong into args"
            )
        node, path = below, f"{path}.{step}" if path else step
    return node


def _value(text: str, node: Json, assignment: str) -> Any:
    try:
        value = yaml.load(text, Loader)  # noqa: S506 - derived from SafeLoader
    except yaml.YAMLError as error:
        raise LocalError(
            f"--set {assignment}: the value is not YAML: {problem(error)}",
            "quotes, brackets and braces mean something in YAML",
            "put the value in quotes, for the shell and for YAML: --set 'field=\"value\"'",
        ) from error
    return _fitting(value, node, text.strip())


def _fitting(value: Any, node: Json, text: str) -> Any:
    """A number where the field takes text is text: ``--set args[2]=5`` means what it says."""
    if node.get("type") == "string" and isinstance(value, int | float):
        return text
    if isinstance(value, list) and node.get("items", {}).get("type") == "string":
        return [str(item) if type(item) is int else item for item in value]
    return value


def _put(job: Json, steps: list[Step], value: Any, assignment: str) -> None:
    place: Any = job
    holder = ""
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if isinstance(step, int):
            _reach(place, step, holder, assignment)
        elif not isinstance(place, dict):
            raise LocalError(f"--set {assignment}: {holder} is no mapping in this job", "it has no fields", _EXAMPLES)
        if after is None:
            _write(place, step, value)
            return
        if (place.get(step) if isinstance(place, dict) else place[step]) is None:
            place[step] = [] if isinstance(after, int) else {}
        place, holder = place[step], str(step)


def _reach(place: Any, index: int, holder: str, assignment: str) -> None:
    """One past the end is a new entry; anything further would leave holes."""
    if not isinstance(place, list) or index > len(place):
        length = len(place) if isinstance(place, list) else 0
        raise LocalError(
            f"--set {assignment}: {holder} has no entry [{index}]",
            f"it has {length}, counted from 0" if length else "it has none",
            f"--set '{holder}[{length}]=…' adds one" if length else f"--set '{holder}=[a, b]' sets the whole list",
        )
    if index == len(place):
        place.append(None)


def _write(place: Any, step: Step, value: Any) -> None:
    if value is not None:
        place[step] = value
    elif isinstance(step, int):
        del place[step]
    else:
        place.pop(step, None)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
FETCH_SECONDS = 120.0  # 11 MB; whoever has less than 100 KB/s is better off with a copy of the files


def runs_ddptrain(job: Json) -> bool:
    """Whether the job's program is the trainer of this repository: by name, or as the entrypoint of its image."""
    spec = job["spec"]
    containers = in_template(job, "containers")
    templates = next((c.get("command") for c in containers if c.get("name") == names.TRAINER_CONTAINER), None)
    command = spec.get("command") or templates
    return not command or (len(command) == 1 and PurePosixPath(str(command[0])).name == "ddptrain")


def use_directory(paths: HostPaths, given: str) -> None:
    """Train with the data in a directory of this machine. Raises ``LocalError`` where that cannot be."""
    _must_run_ddptrain(paths.job, "--data-dir")
    directory = Path(given).expanduser().absolute()
    if not directory.is_dir():
        raise LocalError(
            f"--data-dir {given}: no such directory",
            "it holds the four MNIST files, gzipped or not",
            f"ddptrain data fetch --data-dir {given} downloads them; without a network, use --digits-if-offline",
        )
    for mount in paths.mounts():
        if directory.is_relative_to(mount):
            raise LocalError(
                f"--data-dir {given} lies below {mount}, where the job mounts a volume",
                "in local mode that path means the volume's directory",
                "--volume CLAIM=DIR puts a directory in the place of the volume",
            )
    _read_from(paths.job, directory)


def digits_if_offline(
    paths: HostPaths, *, fresh: bool, say: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Where a job would download MNIST: see that it is there, else train on scikit-learn's digits, and say so."""
    _must_run_ddptrain(paths.job, "--digits-if-offline")
    args = list(paths.job["spec"].get("args") or ())
    if "--download" not in args:
        return
    asked = value_of(args, "--data-dir")
    # What lies in the volume of the claimTemplate will not survive --fresh.
    if asked and not fresh and _is_whole(paths.on_host(asked)):
        return
    kept = paths.folder.root / "datasets" / "mnist"
    say("looking for MNIST")
    problem = _fetch(kept)
    if problem is None:
        _read_from(paths.job, kept)
        return
    args = without(without(args, "--data-dir", takes_value=True), "--download")
    paths.job["spec"]["args"] = [*without(args, "--data", takes_value=True), "--data", "digits"]
    warn(f"NOT MNIST: it is not here and cannot be downloaded ({problem})")
    warn("training on scikit-learn's digits instead (1,797 images of 8×8); --data-dir DIR uses files you have")


def value_of(args: list[str], flag: str) -> str | None:
    """The value that holds: of the last mention."""
    found = None
    for position, word in enumerate(args):
        if word == flag and position + 1 < len(args):
            found = args[position + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def without(args: list[str], flag: str, *, takes_value: bool = False) -> list[str]:
    """The words without a flag and, where it takes one, its value."""
    kept: list[str] = []
    skip = False
    for word in args:
        if skip or word == flag or (takes_value and word.startswith(f"{flag}=")):
            skip = not skip and word == flag and takes_value
            continue
        kept.append(word)
    return kept


def _read_from(job: Json, directory: Path) -> None:
    args = without(list(job["spec"].get("args") or ["train"]), "--download")
    job["spec"]["args"] = [*without(args, "--data-dir", takes_value=True), "--data-dir", str(directory)]


def _must_run_ddptrain(job: Json, option: str) -> None:
    if not runs_ddptrain(job):
        command = " ".join(map(str, job["spec"].get("command") or ["its template's command"]))
        raise LocalError(
            f"{option} is for jobs that run ddptrain; this one runs {command}",
            "other programs name their data in their own ways",
            "--set 'args[0]=…' changes an argument, --volume CLAIM=DIR gives a volume a directory",
        )


def _is_whole(directory: Path) -> bool:
    return directory.is_dir() and _ddptrain("verify", directory).returncode == 0


def _fetch(directory: Path) -> str | None:
    """None when the files are there; else why not, in a few words."""
    try:
        done = _ddptrain("fetch", directory, "--tries", "1")
    except subprocess.TimeoutExpired:
        return f"no answer for {FETCH_SECONDS:g} s"
    if done.returncode == 0:
        return None
    said = next((line for line in done.stderr.splitlines() if line.startswith("error:")), "ddptrain data fetch failed")
    reason = said.removeprefix("error:").split(";")[0].strip()
    # "no mirror delivered FILE: URL: <urlopen error [Errno -2] Name or service not known>": the last part says it all.
    return re.sub(r"^<urlopen error (\[Errno -?\d+\] )?|>$", "", reason.rsplit(": ", 1)[-1])


def _ddptrain(verb: str, directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # A program of its own: the trainer is no part of the operator's package, and may not even be installed.
    command = [sys.executable, "-m", "ddptrain", "data", verb, "--data-dir", str(directory), *options]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=FETCH_SECONDS,
        check=False,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def _end_with_parent() -> None:
    """A download does not outlive the run that waits for it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
