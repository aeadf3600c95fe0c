"""``ddpjob suspend``, ``resume`` and ``restart``: the changes of jobs that are not finished."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import typer

from ddpjob.cli.options import Names, Selector
from ddpjob.cli.place import Where, chosen
from ddpjob.cli.text import show_error
from ddpjob.errors import DDPJobError, UnavailableError

if TYPE_CHECKING:
    from ddpjob.client.base import Client
    from ddpjob.client.job import DDPJob

_AT_ONCE = 8
_NOT_ALL = 1
Action = Callable[["Client", "str | DDPJob"], object]
"""Changes one job; a text that it returns is another line to print about it."""


def suspend(name: Names = None, selector: Selector = None, *, where: Where) -> int:
    """Stop the pods of jobs after they saved a checkpoint; `resume` starts them again.

    \b
    Example:
      ddpjob suspend mnist-cpu
    """
    jobs = chosen(name, selector, where, finished=False)
    return on_each(jobs, lambda client, job: client.suspend(job), "suspended")


def resume(name: Names = None, selector: Selector = None, *, where: Where) -> int:
    """Start suspended jobs again, on this machine in the background. This is not a restart.

    \b
    Example:
      ddpjob resume mnist-cpu
    """
    jobs = chosen(name, selector, where, finished=False)
    return on_each(jobs, lambda client, job: client.resume(job), "resumed")


def restart(name: Names = None, selector: Selector = None, *, where: Where) -> int:
    """Restart all pods of jobs after they saved a checkpoint. This restart does not count towards the limit.

    \b
    Example:
      ddpjob restart mnist-cpu
    """
    jobs = chosen(name, selector, where, finished=False)
    return on_each(jobs, lambda client, job: client.restart(job), "restarted")


def labels_of(jobs: "Sequence[tuple[Client, str | DDPJob]]") -> list[str]:
    """Return how each job is called: by its name, with its namespace if jobs of several namespaces have this name."""
    names = [job if isinstance(job, str) else job.name for _, job in jobs]
    return [
        name if isinstance(job, str) or names.count(name) == 1 else f"{job.namespace}/{name}"
        for name, (_, job) in zip(names, jobs, strict=True)
    ]


def on_each(jobs: "Sequence[tuple[Client, str | DDPJob]]", action: Action, done: str) -> int:
    """Carry out an action on each job, on several at once, and print what became of each. Return the exit code.

    A cluster that does not answer is not asked for all of many jobs. Raises ``DDPJobError`` for a single job.
    """
    away: dict[Client, DDPJobError] = {}

    def carried_out(one: "tuple[Client, str | DDPJob]") -> object:
        client, job = one
        try:
            return away.get(client) or action(client, job)
        except DDPJobError as error:
            if len(jobs) == 1:
                raise
            if isinstance(error, UnavailableError):
                away[client] = error
            return error

    left: dict[str, DDPJobError] = {}
    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="ddpjob-change")
    try:
        results = pool.map(carried_out, jobs)
        for (client, _), name, result in zip(jobs, labels_of(jobs), results, strict=True):
            if isinstance(result, DDPJobError):
                if result not in left.values():
                    show_error(result)
                left[name] = result
                continue
            typer.echo(f"{name} {done} ({client.place})" + (f"\n{result}" if isinstance(result, str) else ""))
    finally:
        pool.shutdown(cancel_futures=True)
    if left:
        print(f"{len(jobs) - len(left)} of {len(jobs)} jobs {done}; not {', '.join(left)}", file=sys.stderr)
    return _NOT_ALL if left else 0
