"""The signature of ``ddpjob run``; ``execute`` does it."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from ddpjob.cli.options import StateDir


def run(
    source: Annotated[
        str, Argument(metavar="FILE|SCRIPT.py", help="A YAML file with one DDPJob, - for standard input, or a script.")
    ],
    script_args: Annotated[
        list[str] | None,
        Argument(metavar="SCRIPT_ARGS", help="Its arguments; those that begin with - after a --.", show_default=False),
    ] = None,
    *,
    nodes: Annotated[
        int | None, Option("--nodes", min=1, metavar="N", help="Number of nodes (spec.numNodes).", show_default=False)
    ] = None,
    nproc: Annotated[
        int | None,
        Option("--nproc", min=1, metavar="N", help="Processes per node (spec.nprocPerNode).", show_default=False),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Set a field below spec to a YAML value, for example restartPolicy.maxRestarts=0 or 'args[2]=5'. "
            "null removes it. May be repeated.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, Option("--name", metavar="NAME", help="Another name for the job.", show_default=False)
    ] = None,
    volumes: Annotated[
        list[str] | None,
        Option(
            "--volume",
            metavar="CLAIM=DIR",
            help="A directory that stands for a claim. May be repeated.",
            show_default=False,
        ),
    ] = None,
    data_dir: Annotated[
        str | None,
        Option("--data-dir", metavar="DIR", help="Train ddptrain with the data in DIR.", show_default=False),
    ] = None,
    digits_if_offline: Annotated[
        bool,
        Option(
            "--digits-if-offline",
            help="Where ddptrain would download MNIST and cannot, train on scikit-learn's digits.",
        ),
    ] = False,
    fresh: Annotated[
        bool, Option("--fresh", help="Begin anew: forget the job's state and the checkpoints on its own claim.")
    ] = False,
    state_dir: StateDir = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print what a cluster would be asked for, and run nothing.")
    ] = False,
    output: Annotated[
        Literal["table", "plain", "json", "yaml"] | None,
        Option(
            "--output",
            "-o",
            metavar="FORM",
            help="table (on a terminal), plain (elsewhere), json: one object a line, yaml: the finished job.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Run a DDPJob, or a script under torchrun, on this machine.

    It runs as a cluster would run it: the same pods, restarts and status. Run it again to resume what was interrupted.

    \b
    Exit codes:
      0         it succeeded
      1         it failed
      2         it was refused: the command line, or the spec
      130, 143  it was stopped by Ctrl-C or SIGTERM; run it again to resume

    \b
    Example:
      ddpjob run manifests/examples/mnist-cpu.yaml --digits-if-offline
    """
    from ddpjob.cli.execute import execute
    from ddpjob.cli.prepare import Request

    words = [word for word in sys.argv[1:] if word != "--fresh"]
    return execute(
        Request(
            source=source,
            script_args=script_args or (),
            nodes=nodes,
            nproc=nproc,
            assignments=assignments or (),
            name=name,
            volumes=volumes or (),
            data_dir=data_dir,
            digits_if_offline=digits_if_offline,
            fresh=fresh,
            state_dir=Path(state_dir) if state_dir else None,
            dry_run=dry_run,
            output=output,
            again=shlex.join(["ddpjob", *words]),
        )
    )
