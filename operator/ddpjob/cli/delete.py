"""``ddpjob delete``: stops a job, and removes it with its logs and on request its volume."""

from typing import Annotated

import typer
from typer import Option

from ddpjob.cli.options import Name, Namespace, StateDir
from ddpjob.cli.place import Context, Local, find
from ddpjob.cli.text import one_line


def delete(
    name: Name,
    *,
    volumes: Annotated[
        bool, Option("--volumes", help="Also delete the volume made for it: checkpoints, metrics, data.")
    ] = False,
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Stop a job if it runs, and delete its record and logs. --volumes also deletes its checkpoints.

    \b
    Example:
      ddpjob delete mnist-cpu
    """
    from ddpjob.client.local import LocalClient

    client = find(name, local=local, context=context, namespace=namespace, state_dir=state_dir)
    if not isinstance(client, LocalClient):
        with client:
            client.delete(name, volume=volumes)
        typer.echo(f"{name} deleted ({client.place})")
        return 0
    record = client.record(name)
    if (pid := record.runner()) is not None:
        typer.echo(f"stopping {name} (process {pid}): waiting for its trainer to save and exit", err=True)
    volume = client.volume(record)
    client.delete(name, volume=volumes)
    typer.echo(f"{name} deleted ({client.place})")
    if volume is not None and volumes:
        typer.echo(f"volume {volume.name} deleted")
    elif volume is not None:
        typer.echo(f"the volume of {name} is kept: {one_line(volume)}")
    return 0
