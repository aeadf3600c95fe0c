"""What a shell completes besides commands and options: names of jobs, here and on a cluster.

A completion writes nothing but its candidates, because all else appears in the line that the user types. A cluster that
does not answer in time is left out.
"""

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import get_type_hints

import typer
from typer.models import ArgumentInfo

from ddpjob.cli.place import Where
from ddpjob.errors import InvalidJobError

_SECONDS = 1.2


def attach(app: typer.Typer) -> None:
    """Let the names of jobs be completed in all commands; an option ``--name`` is for a new job."""
    for command in app.registered_commands:
        hint = get_type_hints(command.callback, include_extras=True).get("name")
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, ArgumentInfo):
                info.autocompletion = job_names


def answer(complete: Callable[[], object]) -> int:
    """Write the candidates that Typer writes, as the shell needs them. Return the exit code, which fish reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, sys.stderr.fileno())
    os.close(silent)
    code: object = 0
    with contextlib.redirect_stdout(io.StringIO()) as written:
        try:
            complete()
        except SystemExit as end:
            code = end.code
    sys.stdout.write("".join(f"{line}\n" for line in written.getvalue().splitlines() if line))
    return code if isinstance(code, int) else 0


def job_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the jobs that the command can act on, in the places that the options of the line allow."""
    where = Where(**{one.name: ctx.params.get(one.name) for one in fields(Where)})  # type: ignore[arg-type]
    found: set[str] = set()

    def there() -> None:
        with contextlib.suppress(Exception), where.cluster(_SECONDS) as client:
            found.update(job.name for job in client.list())

    asking = threading.Thread(target=there, daemon=True)
    with contextlib.suppress(InvalidJobError):  # options that contradict each other
        if where.may_be_on_cluster:
            asking.start()
    if where.context is None:
        with contextlib.suppress(Exception):
            found.update(job.name for job in where.machine().list(on_error=lambda error: None))
    if asking.ident is not None:
        asking.join(_SECONDS)
    return sorted(name for name in set(found) if name.startswith(incomplete))
