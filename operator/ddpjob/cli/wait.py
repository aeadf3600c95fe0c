"""``ddpjob wait``: waits for a state of a job, and says by its exit code what became of it."""

import re
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from ddpjob.cli.options import Name, Namespace, StateDir
from ddpjob.cli.place import Context, Local, find
from ddpjob.cli.text import show_error
from ddpjob.errors import InvalidJobError, JobNotFoundError, WaitTimeoutError

if TYPE_CHECKING:
    from ddpjob.api.status import DDPJobStatus
    from ddpjob.client.base import Client
    from ddpjob.client.job import DDPJob

_FAILED, TIMEOUT, _SUSPENDED, NOT_FOUND = 100, 101, 102, 103


def wait(
    name: Name,
    *,
    until: Annotated[
        str, Option("--for", metavar="STATE", help="finished, running, or step=N: N finished optimizer steps.")
    ] = "finished",
    timeout: Annotated[float | None, Option("--timeout", min=0, metavar="SECONDS", help="Give up after it.")] = None,
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Wait until a job is finished or runs, here or on the cluster of the kubeconfig.

    \b
    Exit codes:
      0    the state is reached, or the job succeeded
      1    the cluster cannot be reached, or you may not read the job
      2    the command line is wrong
      100  the job failed
      101  the time is over
      102  the job is suspended
      103  there is no such job, or it was deleted

    \b
    Example:
      ddpjob wait mnist-cpu --timeout 600
    """
    _step(until)  # a mistake is found before a request
    try:
        client = find(name, local=local, context=context, namespace=namespace, state_dir=state_dir)
    except JobNotFoundError as error:
        show_error(error)
        return NOT_FOUND
    with client:
        return wait_for(client, name, until, timeout)


def wait_for(
    client: "Client",
    job: "str | DDPJob",
    until: str = "finished",
    timeout: float | None = None,
    *,
    to_stderr: bool = False,
) -> int:
    """Wait for a state of a job, say what became of it, and return the exit code.

    to_stderr: say it on standard error, because standard output has an object.
    """
    step = _step(until)

    def reached(status: "DDPJobStatus") -> bool:
        if status.is_true("Finished"):
            return True
        if until == "finished":
            return False
        return ((status.progress and status.progress.step) or 0) >= step if step else status.is_true("Running")

    def suspended(status: "DDPJobStatus") -> bool:
        # After `resume` the status says so until the operator has seen it.
        return status.is_true("Suspended") and bool(client.get(job).manifest["spec"].get("suspend"))

    try:
        ended = client.wait(job, until=lambda status: reached(status) or suspended(status), timeout=timeout)
    except JobNotFoundError as error:
        show_error(error)
        return NOT_FOUND
    except WaitTimeoutError as error:
        show_error(error)
        return TIMEOUT
    typer.echo(f"{ended.name} is {ended.state} ({client.place})", err=to_stderr)
    if ended.finished:
        return 0 if ended.succeeded else _FAILED
    return 0 if reached(ended.status) else _SUSPENDED


def _step(until: str) -> int:
    """Return N of ``step=N``, 0 for the other states."""
    if until in ("finished", "running"):
        return 0
    if (found := re.fullmatch(r"step=([1-9]\d*)", until)) is None:
        raise InvalidJobError(
            f"--for {until}: there is no such state", "it takes finished, running or step=N", "--for step=100"
        )
    return int(found.group(1))
