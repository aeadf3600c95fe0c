"""Options that several commands share, and the options of ``ddpjob run``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from typer import Argument, Option

from ddpjob.api.names import ScriptLauncher

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
MetricsDir = Annotated[
    str | None,
    Option(
        "--metrics",
        metavar="DIR",
        help="Read the metrics in DIR: a checkpoint directory, or a copy of its folder metrics.",
    ),
]
Name = Annotated[str, Argument(metavar="NAME", help="Name of the job.")]
Launcher = Annotated[
    ScriptLauncher | None,
    Option("--launcher", help="What starts the processes of a script.", show_default="ddprun"),
]


@dataclass(frozen=True)
class Request:
    """The options of ``ddpjob run``.

    assignments: FIELD=VALUE of ``--nodes``, ``--nproc``, ``--name`` and ``--set``.
    again: the command that resumes the job.
    """

    source: str
    script_args: Sequence[str] | None = None
    launcher: ScriptLauncher | None = None
    assignments: Sequence[str] = ()
    volumes: Sequence[str] | None = None
    fresh: bool = False
    state_dir: str | None = None
    dry_run: bool = False
    output: str | None = None
    again: str = ""
