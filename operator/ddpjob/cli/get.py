"""``ddpjob get``: shows one job as a card, or lists all."""

import shutil
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from ddpjob.cli.ls import AllNamespaces, Output, Watch, ls, show_jobs, text_of
from ddpjob.cli.place import Where, find, is_of_this_machine
from ddpjob.cli.text import is_coloured, one_line
from ddpjob.errors import DDPJobError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpjob.client.base import Client
    from ddpjob.client.job import DDPJob

_WIDEST = 120  # columns of a card


def get(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Show only this job.")] = None,
    output: Output = None,
    *,
    watch: Watch = False,
    all_namespaces: AllNamespaces = False,
    where: Where,
) -> int:
    """Show one job as a card, or list the jobs, as `ddpjob ls` does.

    The card has the state in a sentence, nodes and ranks, progress, the attempts, the last failure, the checkpoint and
    where the time went. Only what is abnormal is in colour. The JSON has the schema docs/reference/schemas/ddpjob.json.

    \b
    Example:
      ddpjob get mnist-cpu
    """
    if name is None:
        return ls(output, watch=watch, all_namespaces=all_namespaces, where=where)
    with find(name, where) as client:
        if watch:
            return _follow(client, name, output)
        _show(client, client.get(name), output)
    return 0


def _show(client: "Client", job: "DDPJob", output: str | None) -> None:
    from ddpjob.cli.card import time_spent

    if output is None:
        print("\n".join(card(client, job)))
        return
    if output in ("table", "wide"):
        print(one_line(f"job on {client.place}:"), file=sys.stderr, flush=True)
    show_jobs([job], output, single=True)
    if output in ("table", "wide") and (spent := time_spent(job, datetime.now(UTC))):
        print(f"\ntime: {spent}")


def card(client: "Client", job: "DDPJob") -> list[str]:
    """Return the lines of the card of a job, as wide as the terminal."""
    from ddpjob.cli.card import Fact, card_lines, facts_of, headline

    now, width = datetime.now(UTC), min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    facts = [Fact("where", client.place), *facts_of(job, now, _losses(client, job))]
    return list(card_lines(headline(job, now), facts, width=width, coloured=is_coloured()))


def _losses(client: "Client", job: "DDPJob") -> "Sequence[float]":
    """Return the losses of the steps, of a job of this machine; a cluster's metrics are on its volume."""
    if not is_of_this_machine(client):
        return []
    try:
        directory = client.metrics(job)
    except DDPJobError:
        return []
    from ddpjob.cli.plot import history_in

    history = history_in(directory)
    return [step.loss for step in history.steps if step.loss is not None] if history else []


def _follow(client: "Client", name: str, output: str | None) -> int:
    """Show the job after each change until it has finished."""
    for _ in client.watch(name):
        job = client.get(name)
        if output in ("json", "yaml", "name"):
            print(text_of(job, output), flush=True)
        else:
            _show(client, job, output)
            print(flush=True)
    return 0
