"""Options that several commands share, the options of ``ddpjob run``, and the lookup of a job by its name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ddpjob.cli.text import did_you_mean
from ddpjob.local import LocalError
from ddpjob.local.state import JobFolder, StateFolder

StateDir = Annotated[
    str | None,
    Option(
        "--state-dir",
        metavar="DIR",
        help="Directory of jobs and volumes, instead of $DDPJOB_STATE_DIR or ~/.local/state/ddpjob.",
    ),
]
Namespace = Annotated[
    str | None,
    Option("--namespace", "-n", metavar="NAME", help="Look in this namespace only."),
]
Name = Annotated[str, Argument(metavar="NAME", help="Name of the job.")]


@dataclass(frozen=True)
class Request:
    """The options of ``ddpjob run``.

    assignments: FIELD=VALUE of ``--nodes``, ``--nproc``, ``--name`` and ``--set``.
    again: the command that resumes the job.
    """

    source: str
    script_args: Sequence[str] | None = None
    assignments: Sequence[str] = ()
    volumes: Sequence[str] | None = None
    data_dir: str | None = None
    digits_if_offline: bool = False
    fresh: bool = False
    state_dir: str | None = None
    dry_run: bool = False
    output: str | None = None
    again: str = ""


def state_folder(state_dir: str | None) -> StateFolder:
    """Return the folder of ``--state-dir``, or the default one."""
    return StateFolder(Path(state_dir).expanduser() if state_dir else None)


def find(folder: StateFolder, name: str, namespace: str | None) -> JobFolder:
    """Return the job of that name. Raises ``LocalError`` if there is none, or one in each of several namespaces."""
    jobs = [job for job in folder.jobs() if namespace in (None, job.namespace)]
    found = [job for job in jobs if job.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        spaces = ", ".join(job.namespace for job in found)
        raise LocalError(
            f"there are {len(found)} jobs named {name}, in the namespaces {spaces}",
            "names are unique only within a namespace",
            f"add --namespace {found[0].namespace}",
        )
    where = f" in namespace {namespace}" if namespace else ""
    raise LocalError(
        f"there is no job {name}{where} in {folder.root}",
        did_you_mean(name, [job.name for job in jobs], "it never ran here, or it was deleted"),
        "ddpjob get lists the jobs",
    )
