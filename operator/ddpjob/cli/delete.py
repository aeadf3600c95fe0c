"""``ddpjob delete``: stops a job, and removes it with its logs and on request its volume."""

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ddpjob.cli.change import labels_of, on_each
from ddpjob.cli.options import Names, Selector
from ddpjob.cli.place import Where, chosen, is_of_this_machine
from ddpjob.cli.text import one_line
from ddpjob.errors import DDPJobError, InvalidJobError, JobNotFoundError
from ddpjob.local import LocalError

if TYPE_CHECKING:
    from ddpjob.client.base import Client
    from ddpjob.client.job import DDPJob

_REFUSED = 1
_KEPT = "Retain"


def delete(
    name: Names = None,
    selector: Selector = None,
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
    where: Where,
) -> int:
    """Stop jobs if they run, and delete their records and logs. --volumes also deletes their checkpoints.

    On a terminal it asks before it deletes, also about the volume unless an option decides; elsewhere it never asks.

    \b
    Exit codes:
      0  all jobs are deleted
      1  you answered no, or the cluster refused to delete one

    \b
    Example:
      ddpjob delete mnist-cpu
    """
    jobs = chosen(name, selector, where)
    asks = not yes and sys.stdin.isatty() and sys.stderr.isatty()
    found = _volumes(jobs) if asks or volumes is False else {}
    with_job = [label for label, retention in found.items() if retention == "Delete"]
    if volumes is False and with_job:
        raise InvalidJobError(
            f"the volume of {', '.join(with_job)} cannot be kept",
            "checkpoint.claimRetention is Delete, so it is deleted with the job",
            "copy what you need with ddpjob pull, then delete without --keep-volume",
        )
    if asks:
        places = " and ".join(dict.fromkeys(client.place for client, _ in jobs))
        if found and not typer.confirm(f"delete {one_line(_named(found, with_job))} ({one_line(places)})?", err=True):
            typer.echo("nothing is deleted", err=True)
            return _REFUSED
        kept = sum(retention == _KEPT for retention in found.values())
        if volumes is None and kept:
            whose = "its volume" if len(found) == 1 else f"the volumes of {kept}"
            volumes = typer.confirm(f"also delete {whose}: checkpoints, metrics, data?", err=True)
    return on_each(jobs, lambda client, job: _delete(client, job, volume=bool(volumes)), "deleted")


def _named(jobs: Collection[str], with_job: Collection[str]) -> str:
    """Return the jobs for a question. with_job: those whose volumes are deleted with them."""
    if len(jobs) == 1:
        return "".join(jobs) + (" with its volume" if with_job else "")
    volumes = f", with the volumes of {', '.join(with_job)}" if with_job else ""
    return f"{len(jobs)} jobs, {', '.join(jobs)}{volumes}"


def _volumes(jobs: "list[tuple[Client, str | DDPJob]]") -> dict[str, str | None]:
    """Return the names of the jobs, and ``claimRetention`` of the volume made for each; None for a job without one."""
    found: dict[str, str | None] = {}
    for job, label in zip(jobs, labels_of(jobs), strict=True):
        try:
            found[label] = _retention(*job)
        except DDPJobError as error:
            if len(jobs) == 1 or not isinstance(error, (JobNotFoundError, LocalError)):
                raise  # else the summary names it
    return found


def _retention(client: "Client", job: "str | DDPJob") -> str | None:
    """Return ``claimRetention`` of the volume made for a job; None without one.

    Raises ``JobNotFoundError``: nothing is asked about no job.
    """
    if not is_of_this_machine(client):
        checkpoint = client.get(job).manifest["spec"].get("checkpoint") or {}
        return checkpoint.get("claimRetention", _KEPT) if checkpoint.get("claimTemplate") else None
    record = client.record(job)
    if client.volume(record) is None:
        return None
    try:
        recorded = record.job() or {}
    except LocalError:  # a damaged record, whose job can be deleted
        return _KEPT
    return str(((recorded.get("spec") or {}).get("checkpoint") or {}).get("claimRetention", _KEPT))


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
