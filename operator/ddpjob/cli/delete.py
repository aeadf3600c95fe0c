"""``ddpjob delete``: stops the run of a job, and removes its record, its logs and on request its volume."""

import os
import select
import signal
from typing import Annotated

import typer
from typer import Option

from ddpjob.api import names
from ddpjob.cli.options import Name, Namespace, StateDir, find, state_folder
from ddpjob.cli.text import one_line
from ddpjob.local import LocalError
from ddpjob.local.state import JobFolder, StateFolder, remove_tree

_SECONDS = 120.0  # longer than a pod's grace period


def delete(
    name: Name,
    volumes: Annotated[
        bool, Option("--volumes", help="Also delete the volume made for it: checkpoints, metrics, data.")
    ] = False,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Stop a job if it runs, and delete its record and logs. --volumes also deletes its checkpoints.

    \b
    Example:
      ddpjob delete mnist-cpu
    """
    folder = state_folder(state_dir)
    record = find(folder, name, namespace)
    if (pid := record.runner()) is not None:
        typer.echo(f"stopping {name} (process {pid}): waiting for its trainer to save and exit", err=True)
        _stop(record, pid)
    with record.locked():
        remove_tree(record.path, folder.root)
    typer.echo(f"{name} deleted")
    _volume(folder, record, volumes)
    return 0


def _volume(folder: StateFolder, record: JobFolder, wanted: bool) -> None:
    path = folder.volume(record.namespace, names.claim_name(record.name))
    if not path.is_dir() and not path.is_symlink():
        return
    if wanted:
        remove_tree(path, folder.root)
        typer.echo(f"volume {names.claim_name(record.name)} deleted")
    else:
        typer.echo(f"the volume of {record.name} is kept: {one_line(path)}")


def _stop(record: JobFolder, pid: int) -> None:
    """Send SIGTERM to the run and wait until it ends. Raises ``LocalError`` if it does not."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The pid may belong to another process by now; from here on the descriptor identifies the process.
        if record.runner() != pid:
            return
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], _SECONDS)[0]:
            raise LocalError(
                f"{record.name} still runs, in process {pid}, {_SECONDS:g} s after SIGTERM",
                "its trainer may be saving a large checkpoint",
                f"try again, or kill it: kill -KILL {pid} (this ends all its processes)",
            )
    except PermissionError as error:
        raise LocalError(
            f"{record.name} runs in process {pid}, which belongs to another user",
            "only the owner of a process can stop it",
            "ask the owner, or use another --state-dir",
        ) from error
    finally:
        os.close(process)
