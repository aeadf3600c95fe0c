"""``ddpjob delete``: stops a job, and removes it with its logs and on request its volume."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ddpjob.cli.options import Name, Namespace, StateDir
from ddpjob.cli.place import Context, Local, find
from ddpjob.cli.text import one_line

if TYPE_CHECKING:
    from ddpjob.client.base import Client
    from ddpjob.client.local import LocalClient

_REFUSED = 1


def delete(
    name: Name,
    *,
    volumes: Annotated[
        bool | None,
        Option(
            "--volumes/--keep-volume",
            help="Also delete the volume made for it: checkpoints, metrics, data; or keep it.",
            show_default="keep it",
        ),
    ] = None,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Stop a job if it runs, and delete its record and logs. --volumes also deletes its checkpoints.

    On a terminal it asks before it deletes, also about the volume unless an option decides; elsewhere it never asks.

    \b
    Exit codes:
      0  the job is deleted
      1  you answered no, or the cluster refused it

    \b
    Example:
      ddpjob delete mnist-cpu
    """
    from ddpjob.client.local import LocalClient

    with find(name, local=local, context=context, namespace=namespace, state_dir=state_dir) as client:
        if not yes and sys.stdin.isatty() and sys.stderr.isatty():
            has_volume = _has_volume(client, name)
            if not typer.confirm(f"delete {one_line(name)} ({one_line(client.place)})?", err=True):
                typer.echo("nothing is deleted", err=True)
                return _REFUSED
            if volumes is None and has_volume:
                volumes = typer.confirm("also delete its volume: checkpoints, metrics, data?", err=True)
        if isinstance(client, LocalClient):
            _delete_here(client, name, volume=bool(volumes))
        else:
            client.delete(name, volume=bool(volumes))
            typer.echo(f"{name} deleted ({client.place})")
    return 0


def _has_volume(client: "Client", name: str) -> bool:
    """Return whether a volume was made for the job. Raises ``JobNotFoundError``: nothing is asked about no job."""
    from ddpjob.client.local import LocalClient

    if isinstance(client, LocalClient):  # its record may be damaged
        return client.volume(client.record(name)) is not None
    return bool((client.get(name).manifest["spec"].get("checkpoint") or {}).get("claimTemplate"))


def _delete_here(client: "LocalClient", name: str, *, volume: bool) -> None:
    record = client.record(name)
    if (pid := record.runner()) is not None:
        typer.echo(f"stopping {name} (process {pid}): waiting for its trainer to save and exit", err=True)
    directory = client.volume(record)
    client.delete(name, volume=volume)
    typer.echo(f"{name} deleted ({client.place})")
    if directory is not None and volume:
        typer.echo(f"volume {directory.name} deleted")
    elif directory is not None:
        typer.echo(f"the volume of {name} is kept: {one_line(directory)}")
