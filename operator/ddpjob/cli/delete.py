"""``ddpjob delete``: stops a job, and removes it with its logs and on request its volume."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ddpjob.cli.change import labels_of, on_each
from ddpjob.cli.options import Names, Namespace, Selector, StateDir
from ddpjob.cli.place import Context, Local, chosen, is_of_this_machine
from ddpjob.cli.text import one_line
from ddpjob.errors import DDPJobError, JobNotFoundError
from ddpjob.local import LocalError

if TYPE_CHECKING:
    from ddpjob.client.base import Client
    from ddpjob.client.job import DDPJob

_REFUSED = 1


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
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
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
    jobs = chosen(name, selector, local=local, context=context, namespace=namespace, state_dir=state_dir)
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        has_volume = _volumes(jobs)
        what = ", ".join(has_volume) if len(has_volume) == 1 else f"{len(has_volume)} jobs, {', '.join(has_volume)}"
        places = " and ".join(dict.fromkeys(client.place for client, _ in jobs))
        if has_volume and not typer.confirm(f"delete {one_line(what)} ({one_line(places)})?", err=True):
            typer.echo("nothing is deleted", err=True)
            return _REFUSED
        if volumes is None and any(has_volume.values()):
            whose = "its volume" if len(has_volume) == 1 else f"the volumes of {sum(has_volume.values())}"
            volumes = typer.confirm(f"also delete {whose}: checkpoints, metrics, data?", err=True)
    return on_each(jobs, lambda client, job: _delete(client, job, volume=bool(volumes)), "deleted")


def _volumes(jobs: "list[tuple[Client, str | DDPJob]]") -> dict[str, bool]:
    """Return the names of the jobs, and whether a volume was made for each."""
    found: dict[str, bool] = {}
    for job, label in zip(jobs, labels_of(jobs), strict=True):
        try:
            found[label] = _has_volume(*job)
        except DDPJobError as error:
            if len(jobs) == 1 or not isinstance(error, (JobNotFoundError, LocalError)):
                raise  # else the summary names it
    return found


def _has_volume(client: "Client", job: "str | DDPJob") -> bool:
    """Return whether a volume was made for the job. Raises ``JobNotFoundError``: nothing is asked about no job."""
    if is_of_this_machine(client):  # its record may be damaged
        return client.volume(client.record(job)) is not None
    return bool((client.get(job).manifest["spec"].get("checkpoint") or {}).get("claimTemplate"))


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
