"""``ddpjob wait``: waits for a state of a job, and says by its exit code what became of it."""

import sys
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from ddpjob.cli.options import Name, Timeout
from ddpjob.cli.place import Where, find
from ddpjob.cli.text import is_coloured, show_error
from ddpjob.errors import DDPJobError, JobNotFoundError, WaitTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpjob.api.status import DDPJobStatus
    from ddpjob.client.base import Client
    from ddpjob.client.job import DDPJob

_FAILED, TIMEOUT, _SUSPENDED, NOT_FOUND = 100, 101, 102, 103
_PROGRESS_SECONDS = 60.0
"""Between lines without a terminal that report only progress: a job takes days, and its lines are kept in a log."""


def wait(
    name: Name,
    *,
    until: Annotated[
        Literal["finished", "running"], Option("--for", metavar="STATE", help="finished or running.")
    ] = "finished",
    timeout: Timeout = None,
    notify: Annotated[
        list[str] | None,
        Option(
            "--notify",
            metavar="ADDRESS|FILE",
            help="Send a message then: to an address of Apprise, as ntfy://TOPIC, or those in a file. May be repeated.",
        ),
    ] = None,
    where: Where,
) -> int:
    """Wait until a job is finished or runs, here or on the cluster of the kubeconfig.

    --notify needs the extra notify of ddpjob; https://appriseit.com/services lists Slack, mail, ntfy and many others.

    \b
    Exit codes:
      0    the state is reached, or the job succeeded
      1    the cluster cannot be reached, you may not read the job, or nothing runs a job of this machine
      2    the command line is wrong
      100  the job failed
      101  the time is over
      102  the job is suspended
      103  there is no such job, or it was deleted

    \b
    Example:
      ddpjob wait mnist-cpu --timeout 600
    """
    try:
        client = find(name, where)
    except JobNotFoundError as error:
        show_error(error)
        return NOT_FOUND
    with client:
        if not notify:
            return wait_for(client, name, until, timeout)
        from ddpjob.cli.notify import Messages

        messages = Messages(notify)
        code = wait_for(client, name, until, timeout)
        messages.send(*_told(client, name, code), is_bad=code != 0)
        return code


def _told(client: "Client", name: str, code: int) -> tuple[str, str]:
    """Return title and text of the message after a wait that ended with this exit code."""
    if code == NOT_FOUND:
        return f"{name} was deleted", client.place
    over = " (the wait is over)" if code == TIMEOUT else ""
    try:
        found = client.explain(name)
    except DDPJobError as error:
        return f"{name}{over}", f"{error.error} ({client.place})"
    advice = f" next: {found.next}" if found.next else ""
    return f"{name} is {found.state}{over}", f"{found.sentence}{advice} ({client.place})"


def wait_for(
    client: "Client",
    job: "str | DDPJob",
    until: str = "finished",
    timeout: float | None = None,
    *,
    follow: bool = False,
) -> int:
    """Wait for a state of a job, say what became of it, and return the exit code.

    follow: show the job meanwhile as ``run`` does, and at the end say why, as ``ddpjob why``.
    """

    def reached(status: "DDPJobStatus") -> bool:
        return status.is_true("Finished") or (until == "running" and status.is_true("Running"))

    def suspended(status: "DDPJobStatus") -> bool:
        # After `resume` the status says so until the operator has seen it.
        return status.is_true("Suspended") and bool(client.get(job).manifest["spec"].get("suspend"))

    try:
        with _shown(client, job) if follow else nullcontext(lambda: None) as show:

            def is_over(status: "DDPJobStatus") -> bool:
                show()
                return reached(status) or suspended(status)

            ended = client.wait(job, until=is_over, timeout=timeout)
    except JobNotFoundError as error:
        show_error(error)
        return NOT_FOUND
    except WaitTimeoutError as error:
        show_error(error)
        return TIMEOUT
    typer.echo(f"{ended.name} is {ended.state} ({client.place})")
    if follow:
        _say_why(client, ended)
    if ended.finished:
        return 0 if ended.succeeded else _FAILED
    return 0 if reached(ended.status) else _SUSPENDED


@contextmanager
def _shown(client: "Client", job: "str | DDPJob") -> "Iterator[Callable[[], None]]":
    """Yield what shows the job as it is now: on a terminal in a table that stays in place, elsewhere as a line."""
    from ddpjob.cli.card import Moment
    from ddpjob.cli.run import display_of

    with display_of("text", sys.stdout, _PROGRESS_SECONDS) as display:

        def show() -> None:
            pods = []
            with suppress(DDPJobError):  # the wait survives what one request does not
                found = client.get(job)
                with suppress(DDPJobError):  # the user may not read pods
                    pods = [pod for pod in client.pods(found) if pod.attempt == found.status.attempt]
                display.show(Moment(found, pods))

        yield show


def _say_why(client: "Client", job: "DDPJob") -> None:
    from ddpjob.cli.why import verdict_lines

    try:
        typer.echo("\n".join(verdict_lines(client.explain(job), client.place, coloured=is_coloured())))
    except DDPJobError as error:  # the exit code says how the job ended
        show_error(error)
