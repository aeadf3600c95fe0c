"""``ddpjob delete``: stops a job, and removes it with its logs and on request its volume."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ddpjob.cli.change import labels_of, on_each
from ddpjob.cli.options import Names, Selector
from ddpjob.cli.place import Where, chosen, is_of_this_machine
from ddpjob.cli.text import one_line

if TYPE_CHECKING:
    from ddpjob.client.base import Client
    from ddpjob.client.job import DDPJob

_REFUSED = 1


def delete(
    name: Names = None,
    selector: Selector = None,
    *,
    volumes: Annotated[
        bool, Option("--volumes", help="Also delete the volume made for it: checkpoints, metrics, data.")
    ] = False,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False,
    where: Where,
) -> int:
    """Stop jobs if they run, and delete their records and logs.

    The volume of a job is kept without --volumes, unless claimRetention of its checkpoint is Delete. On a terminal it
    says where the jobs are and asks; elsewhere it never asks.

    \b
    Exit codes:
      0  all jobs are deleted
      1  you answered no, or the cluster refused to delete one

    \b
    Example:
      ddpjob delete mnist-cpu
    """
    jobs = chosen(name, selector, where)
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        places = " and ".join(dict.fromkeys(client.place for client, _ in jobs))
        what = ", ".join(labels_of(jobs)) + (" with volumes" if volumes else "")
        if not typer.confirm(f"delete {one_line(what)} ({one_line(places)})?", err=True):
            typer.echo("nothing is deleted", err=True)
            return _REFUSED
    return on_each(jobs, lambda client, job: _delete(client, job, volume=volumes), "deleted")


def _delete(client: "Client", job: "str | DDPJob", *, volume: bool) -> str | None:
    """Delete a job, and return what became of its volume on this machine."""
    if not is_of_this_machine(client):
        client.delete(job, volume=volume)
        return None
    record = client.record(job)
    if (pid := record.runner()) is not None:
        typer.echo(f"stopping {record.name} (process {pid}): waiting for its trainer to save and exit", err=True)
    directory = client.volume(record)
    client.delete(job, volume=volume)
    if directory is None:
        return None
    if client.volume(record) is None:
        return f"volume {directory.name} deleted"
    return f"the volume of {record.name} is kept: {one_line(directory)}"
