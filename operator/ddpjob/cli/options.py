"""Options that several commands share, and the options of ``ddpjob run``."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Literal

from typer import Argument, Option

from ddpjob.api.names import ScriptLauncher

Namespace = Annotated[
    str | None,
    Option("--namespace", "-n", metavar="NAME", help="The namespace, also instead of the namespace in a file."),
]
Context = Annotated[
    str | None, Option("--context", metavar="NAME", help="Jobs of the cluster of this context of the kubeconfig.")
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
Names = Annotated[list[str] | None, Argument(metavar="NAME", help="Names of the jobs.")]
Selector = Annotated[
    str | None,
    Option(
        "--selector",
        "-l",
        metavar="LABELS",
        help="Jobs with these labels, as team=a; on a cluster also 'stage in (a, b)'.",
    ),
]
Form = Annotated[Literal["text", "json"], Option("--output", "-o", metavar="FORM", help="text or json.")]
Timeout = Annotated[float | None, Option("--timeout", min=0, metavar="SECONDS", help="Give up waiting after it.")]
# Of a new job.
Source = Annotated[
    str,
    Argument(metavar="FILE|SCRIPT.py", help="YAML file with one DDPJob, - for standard input, or a Python script."),
]


@dataclass(frozen=True)
class NewJob:
    """A job of a file or for a script, with the options that change it."""

    source: Source
    script_args: Annotated[
        list[str] | None,
        Argument(
            metavar="SCRIPT_ARGS",
            help="Arguments of the script, or after spec.args; put -- before those that begin with -.",
        ),
    ] = None
    nodes: Annotated[int | None, Option("--nodes", min=1, metavar="N", help="Number of nodes (spec.numNodes).")] = None
    nproc: Annotated[
        int | None, Option("--nproc", min=1, metavar="N", help="Processes per node (spec.nprocPerNode).")
    ] = None
    gpus: Annotated[
        int | None,
        Option("--gpus", min=1, metavar="N", help="GPUs of each node (limit nvidia.com/gpu), with a process for each."),
    ] = None
    memory: Annotated[
        str | None, Option("--memory", metavar="SIZE", help="Memory of each node, for example 8Gi (request and limit).")
    ] = None
    checkpoint: Annotated[
        str | None,
        Option(
            "--checkpoint",
            metavar="SIZE[:CLASS]|CLAIM",
            help="Volume of the checkpoints: a new one, for example 10Gi, or an existing claim (spec.checkpoint).",
        ),
    ] = None
    max_restarts: Annotated[
        int | None,
        Option("--max-restarts", min=0, metavar="N", help="Restarts that count (restartPolicy.maxRestarts)."),
    ] = None
    env: Annotated[
        list[str] | None,
        Option("--env", metavar="NAME=VALUE", help="Environment variable (spec.env). May be repeated."),
    ] = None
    launcher: Annotated[
        ScriptLauncher | None,
        Option("--launcher", help="What starts the processes of a script.", show_default="ddprun"),
    ] = None
    assignments: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Set a field below spec to a YAML value, for example restartPolicy.maxRestarts=0 or 'args[2]=5'. "
            "null removes it. May be repeated.",
        ),
    ] = None
    name: Annotated[str | None, Option("--name", metavar="NAME", help="Name of the job (metadata.name).")] = None

    @property
    def words(self) -> dict[str, Any]:
        """The fields and short words of the spec that the options set."""
        words = {"numNodes": self.nodes, "nprocPerNode": self.nproc, "gpus": self.gpus, "memory": self.memory}
        return words | {"checkpoint": self.checkpoint, "maxRestarts": self.max_restarts, "env": self.env}


@dataclass(frozen=True)
class RunOptions(NewJob):
    """The options of ``ddpjob run``."""

    volumes: Annotated[
        list[str] | None,
        Option("--volume", metavar="CLAIM=DIR", help="Use DIR as the claim CLAIM. May be repeated."),
    ] = None
    fresh: Annotated[
        bool,
        Option(
            "--fresh", help="Start from scratch: first remove the job's state and the checkpoints on its own claim."
        ),
    ] = False
    output: Form = "text"


def expanded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command whose parameters that are dataclasses are replaced by their fields, as Typer needs them."""
    given = {name: one.annotation for name, one in inspect.signature(command).parameters.items()}
    groups = {
        name: inspect.signature(made).parameters
        for name, made in given.items()
        if isinstance(made, type) and is_dataclass(made)
    }

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        made = {name: given[name](**{key: values.pop(key) for key in group}) for name, group in groups.items()}
        return command(**values, **made)

    flat = [
        part.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, one in inspect.signature(command).parameters.items()
        for part in groups.get(name, {name: one}).values()
    ]
    call.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in flat}
    return call
