"""Options that several verbs share."""

from typing import Annotated

from typer import Argument, Option

StateDir = Annotated[
    str | None,
    Option(
        "--state-dir",
        metavar="DIR",
        help="Where jobs and volumes are kept, instead of $DDPJOB_STATE_DIR or ~/.local/state/ddpjob.",
        show_default=False,
    ),
]
Namespace = Annotated[
    str | None,
    Option("--namespace", "-n", metavar="NAME", help="Namespace to look in; all without it.", show_default=False),
]
Name = Annotated[str, Argument(metavar="NAME", help="Name of the job.", show_default=False)]
