"""From the options of ``ddpjob run`` to a job that can be run, or to the first thing that is wrong with it."""

import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpjob.cli import data, jobfile
from ddpjob.cli.assign import assign
from ddpjob.cli.errors import did_you_mean
from ddpjob.cli.jobfile import JobFile
from ddpjob.cli.places import Places
from ddpjob.local import gpus
from ddpjob.local.errors import LocalError
from ddpjob.local.session import render
from ddpjob.local.state import StateFolder

Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """The options of ``ddpjob run`` as they were given. again: the command that resumes what this one leaves."""

    source: str
    script_args: Sequence[str] = ()
    nodes: int | None = None
    nproc: int | None = None
    assignments: Sequence[str] = ()
    name: str | None = None
    volumes: Sequence[str] = ()
    data_dir: str | None = None
    digits_if_offline: bool = False
    fresh: bool = False
    state_dir: Path | None = None
    dry_run: bool = False
    output: str | None = None
    again: str = ""


@dataclass
class Prepared:
    """What is to run. notes, warnings: what its user should know before it does."""

    file: JobFile
    places: Places
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
    bare = Places(file.job, folder)
    places = Places(file.job, folder, _volumes(request.volumes, bare))
    if request.data_dir is not None:
        data.use_directory(places, request.data_dir)
    notes = [f"{len(file.ignored)} other documents are ignored: {', '.join(file.ignored)}"] if file.ignored else []
    return Prepared(file, places, notes, warnings=_lack_of_gpus(file.job))


def _volumes(given: Sequence[str], places: Places) -> Mapping[str, Path]:
    volumes: dict[str, Path] = {}
    claims = places.claims()
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
    if data.runs_ddptrain(job):
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
    wanted, found = gpus.wanted(job["spec"]), len(gpus.available())
    if wanted <= found:
        return []
    has = found or "none"
    return [f"each node asks for {wanted} GPUs, this machine has {has}: --nproc N sets the processes of a node"]


def _on_path(program: str) -> bool:
    return bool(shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent)))
