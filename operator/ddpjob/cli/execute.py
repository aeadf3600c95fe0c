"""``ddpjob run``: from its options to a finished job. It brings the operator and the API's schema, so it comes late."""

import asyncio
import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ddpjob.cli import data, documents, jobfile
from ddpjob.cli.assign import assign
from ddpjob.cli.audience import Audience
from ddpjob.cli.display import Display
from ddpjob.cli.ending import Outcome
from ddpjob.cli.errors import did_you_mean
from ddpjob.cli.jobfile import JobFile
from ddpjob.cli.ndjson import JsonDisplay
from ddpjob.cli.places import Places
from ddpjob.cli.plain import PlainDisplay
from ddpjob.cli.printable import one_line
from ddpjob.cli.watch import watched
from ddpjob.local import gpus
from ddpjob.local.errors import LocalError
from ddpjob.local.session import Options, Session, render
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
class _Prepared:
    file: JobFile
    places: Places
    notes: list[str] = field(default_factory=list)


def execute(request: Request) -> int:
    """Run, or with ``dry_run`` only show, the job. Returns the exit code; raises ``LocalError``."""
    audience = Audience(sys.stdout)
    prepared = _prepare(request)
    if request.dry_run:
        return _dry_run(request, prepared)
    _require_programs(prepared.file.job)
    display = _display(request.output, audience)
    begin = time.monotonic()
    with display:
        for note in prepared.notes:
            display.note(note)
        if lack := _lack_of_gpus(prepared.file.job):
            display.note(lack, loud=True)
        if request.digits_if_offline:
            warn = partial(display.note, loud=True)
            data.digits_if_offline(prepared.places, fresh=request.fresh, say=display.note, warn=warn)
        options = Options(fresh=request.fresh, volumes=prepared.places.volumes, directory=prepared.file.directory)
        shows_output = not data.runs_ddptrain(prepared.file.job)
        job, stopped_by = asyncio.run(
            watched(
                lambda on_change: Session(
                    prepared.file.job,
                    prepared.file.others,
                    prepared.places.folder,
                    options,
                    on_change=on_change,
                    say=display.note,
                ),
                display,
                audience,
                prepared.places.record if shows_output else None,
            )
        )
        outcome = Outcome(job, prepared.places, time.monotonic() - begin, request.again, stopped_by)
        display.end(outcome)
    if request.output == "yaml":
        print(documents.dump(job), end="", file=audience.stream)
    return outcome.exit_code


def _prepare(request: Request) -> _Prepared:
    """The job with everything that the options change in it."""
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
    folder = StateFolder(request.state_dir)
    bare = Places(file.job, folder)
    places = Places(file.job, folder, _volumes(request.volumes, bare))
    if request.data_dir is not None:
        data.use_directory(places, request.data_dir)
    notes = [f"{len(file.ignored)} other documents are ignored: {', '.join(file.ignored)}"] if file.ignored else []
    return _Prepared(file, places, notes)


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


def _dry_run(request: Request, prepared: _Prepared) -> int:
    """The objects that a cluster would hold, the user's ConfigMaps included; Secrets stay where they are."""
    shown = [other for other in prepared.file.others if other.get("kind") != "Secret"]
    objects = [*render(prepared.file.job), *shown]
    for note in prepared.notes:
        print(f"· {one_line(note)}", file=sys.stderr)
    if len(shown) < len(prepared.file.others):
        print("· Secrets are left out", file=sys.stderr)
    if request.digits_if_offline:
        print("· --digits-if-offline looks for MNIST when the job runs, not now", file=sys.stderr)
    if request.output == "json":
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2))
    else:
        print(documents.dump(*objects), end="")
    return 0


def _display(output: str | None, audience: Audience) -> Display:
    if output == "json":
        return JsonDisplay(audience.stream)
    if output == "yaml":
        return PlainDisplay(Audience(sys.stderr).stream)
    if output == "table" or (output is None and audience.is_terminal()):
        from rich.console import Console

        from ddpjob.cli.live import LiveDisplay

        return LiveDisplay(Console(file=audience.stream, highlight=False, emoji=False, markup=False))
    return PlainDisplay(audience.stream)


def _require_programs(job: Json) -> None:
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


def _lack_of_gpus(job: Json) -> str:
    """Empty where this machine has the GPUs that each node asks for."""
    wanted, found = gpus.wanted(job["spec"]), len(gpus.available())
    if wanted <= found:
        return ""
    return (
        f"each node asks for {wanted} GPUs, this machine has {found or 'none'}: --nproc N sets the processes of a node"
    )


def _on_path(program: str) -> bool:
    return bool(shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent)))
