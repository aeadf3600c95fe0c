"""``ddpjob get``: shows one job as a card, or lists jobs."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from ddpjob.api import names
from ddpjob.api.exit_codes import USAGE
from ddpjob.api.objects import Json, condition
from ddpjob.cli.options import Selector
from ddpjob.cli.place import Where, find, first_answer, is_of_this_machine
from ddpjob.cli.table import Cell, show, table
from ddpjob.cli.text import age, is_coloured, one_line, show_error
from ddpjob.errors import DDPJobError, InvalidJobError

if TYPE_CHECKING:
    from rich.table import Table

    from ddpjob.client.base import Client, Jobs
    from ddpjob.client.job import DDPJob

_WIDEST = 120  # columns of a card


def get(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Show only this job.")] = None,
    output: Annotated[
        Literal["table", "wide", "json", "yaml", "name"] | None,
        Option("--output", "-o", metavar="FORM", help="table, wide, json, yaml or name."),
    ] = None,
    *,
    watch: Annotated[bool, Option("--watch", "-w", help="Go on, and print jobs again when they change.")] = False,
    selector: Selector = None,
    all_namespaces: Annotated[bool, Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    where: Where,
) -> int:
    """Show one job as a card, or list jobs: their state, progress and restarts.

    The card has the state in a sentence, nodes and ranks, progress, the attempts, the last failure, the checkpoint and
    where the time went. Only what is abnormal is in colour.

    Listed are the jobs of the cluster of the kubeconfig if it has DDPJobs, else of this machine; --local and --context
    decide. --watch ends when the named job has finished. Interrupted: the job is not finished, and no process of this
    machine runs it. The JSON of several jobs is a List, with --watch an object a line. Its schema is
    docs/reference/schemas/ddpjob.json.

    \b
    Example:
      ddpjob get mnist-cpu
    """
    if name is None:
        return _list(selector, output, where, all_namespaces=all_namespaces, watch=watch)
    if selector:
        raise InvalidJobError(
            f"{name} is one job, and -l selects several", "both say which jobs are shown", "leave out one"
        )
    with find(name, where) as client:
        if watch:
            _print_changes(([client.get(name)] for _ in client.watch(name)), output)
        else:
            _show(client, client.get(name), output)
    return 0


def _print_changes(changes: "Iterator[Jobs]", output: str | None) -> None:
    """Print the jobs that differ from the list before; of JSON one line each."""
    known: dict[tuple[str | None, str], tuple[str, Json]] = {}
    for jobs in changes:
        now = {(job.namespace, job.name): (job.state, job.manifest) for job in jobs}
        changed = [job for job in jobs if known.get((job.namespace, job.name)) != (job.state, job.manifest)]
        known = now
        if output == "json":
            print("".join(f"{json.dumps(job.manifest)}\n" for job in changed), end="", flush=True)
        elif changed:
            show_jobs(changed, output)
            sys.stdout.flush()


def _list(selector: str | None, output: str | None, where: Where, *, all_namespaces: bool, watch: bool) -> int:
    damaged: list[DDPJobError] = []

    def ask(client: "Client") -> "Jobs":
        if is_of_this_machine(client) and not watch:  # one damaged record must not hide the others
            return client.list(all_namespaces=all_namespaces, label_selector=selector, on_error=damaged.append)
        return client.list(all_namespaces=all_namespaces, label_selector=selector)

    client, jobs, trouble = first_answer(ask, where)
    with client:
        if watch:  # until the user ends it
            if trouble is not None:
                raise trouble
            _print_changes(client.watch_list(all_namespaces=all_namespaces, label_selector=selector), output)
        place = one_line(f"{client.host}, all namespaces" if all_namespaces else client.place)
        if jobs or damaged or output in ("json", "yaml"):
            if output in (None, "table", "wide"):
                print(f"jobs on {place}:", file=sys.stderr, flush=True)
            show_jobs(jobs, output)
        else:
            verb = "run starts" if is_of_this_machine(client) else "submit creates"
            print(f"no jobs on {place}; ddpjob {verb} a job", file=sys.stderr)
    for problem in damaged:
        show_error(problem)
    if trouble is not None:
        raise trouble
    return USAGE if damaged else 0


def _show(client: "Client", job: "DDPJob", output: str | None) -> None:
    if output is None:
        print("\n".join(card(client, job)))
        return
    if output in ("table", "wide"):
        print(one_line(f"job on {client.place}:"), file=sys.stderr, flush=True)
    show_jobs([job], output, single=True)


def card(client: "Client", job: "DDPJob") -> list[str]:
    """Return the lines of the card of a job, as wide as the terminal."""
    from ddpjob.cli.card import Fact, card_lines, facts_of, headline

    now, width = datetime.now(UTC), min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    facts = [Fact("where", client.place), *facts_of(job, now)]
    return list(card_lines(headline(job, now), facts, width=width, coloured=is_coloured()))


def show_jobs(jobs: "Jobs", output: str | None, *, single: bool = False) -> None:
    """Print jobs in one of the forms of ``-o``."""
    if output == "name":
        print("".join(f"{_full_name(job)}\n" for job in jobs), end="")
    elif output in ("json", "yaml"):
        from ddpjob.client.jobfile import dump_yaml

        items = [job.manifest for job in jobs]
        shown: Json = items[0] if single else {"apiVersion": "v1", "kind": "List", "items": items}
        print(json.dumps(shown, indent=2) if output == "json" else dump_yaml(shown).rstrip("\n"))
    else:
        show(jobs_table(jobs, is_wide=output == "wide"))


def jobs_table(jobs: "Jobs", *, is_wide: bool) -> "Table":
    """Return the columns of ``kubectl get ddp``; the namespace if there are several."""
    columns = [name for name in CELLS if is_wide or name not in WIDE]
    header = ["NAMESPACE", "NAME", *(name.upper() for name in columns)]
    rows: list[Sequence[object]] = [[job.namespace, job.name, *(CELLS[name](job) for name in columns)] for job in jobs]
    if not is_wide and len({job.namespace for job in jobs}) < 2:
        header, rows = header[1:], [row[1:] for row in rows]
    return table(header, rows)


def _state(job: "DDPJob") -> Cell:
    from ddpjob.cli.card import is_abnormal

    return Cell(job.state, is_abnormal(job))


def _progress(job: "DDPJob") -> Cell | None:
    from ddpjob.cli.card import troubles

    if (progress := job.status.progress) is None:
        return None
    found = troubles(job, datetime.now(UTC))
    return Cell(", ".join([progress.display, *found]), bool(found))


CELLS: Mapping[str, Callable[["DDPJob"], object]] = {
    "State": _state,
    "Nodes": lambda job: job.status.nodes_ready,
    "Progress": _progress,
    "Loss": lambda job: job.status.progress and job.status.progress.loss,
    "Restarts": lambda job: job.status.restarts,
    "Age": lambda job: age(job.manifest["metadata"].get("creationTimestamp")),
    "In-Place": lambda job: job.status.restarts_in_place,
    "Steps/s": lambda job: job.status.progress and job.status.progress.steps_per_second,
    "World": lambda job: job.status.world and job.status.world.world_size,
    "Reason": lambda job: condition(job.manifest.get("status"), "Running").get("reason"),
}
"""The value of each column of the CustomResourceDefinition."""
WIDE = ("In-Place", "Steps/s", "World", "Reason")
"""Columns of ``-o wide`` alone."""


def _full_name(job: "DDPJob") -> str:
    return f"{names.DDPJOBS.plural[:-1]}.{names.GROUP}/{one_line(job.name)}"
