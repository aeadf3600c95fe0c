"""``ddpjob get``: lists jobs, with the columns of ``kubectl get ddp``."""

import json
import re
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from ddpjob.api.exit_codes import USAGE
from ddpjob.api.objects import Json, element
from ddpjob.cli.options import Namespace, StateDir
from ddpjob.cli.place import Context, Local, find, on_cluster, on_this_machine
from ddpjob.cli.text import age, one_line, show_error, time_text
from ddpjob.errors import DDPJobError

if TYPE_CHECKING:
    from ddpjob.client.base import Jobs
    from ddpjob.client.job import DDPJob
    from ddpjob.client.local import LocalClient

_PART = re.compile(r'\.(\w+)(?:\[\?\(@\.(\w+)=="(\w+)"\)\])?')


def get(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Show only this job.")] = None,
    output: Annotated[
        Literal["table", "wide", "json", "yaml"],
        Option("--output", "-o", metavar="FORM", help="table, wide, json or yaml."),
    ] = "table",
    *,
    all_namespaces: Annotated[bool, Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """List the jobs of this machine, or with --context of a cluster: their state, progress and restarts.

    Interrupted: the job is not finished, and no process of this machine runs it.

    \b
    Example:
      ddpjob get
    """
    if name is not None:
        client = find(name, local=local, context=context, namespace=namespace, state_dir=state_dir)
        with client:
            _print([client.get(name)], output, single=True)
        return 0
    if context is not None:
        with on_cluster(context, namespace) as client:
            _print(client.list(all_namespaces=all_namespaces), output, single=False)
        return 0
    return _list_local(on_this_machine(namespace, state_dir), output, all_namespaces)


def _list_local(client: "LocalClient", output: str, all_namespaces: bool) -> int:
    damaged: list[DDPJobError] = []
    jobs = client.list(all_namespaces=all_namespaces, on_error=damaged.append)
    if jobs or damaged or output in ("json", "yaml"):
        _print(jobs, output, single=False)
    else:
        print(f"no jobs in {one_line(client.folder.root)}; ddpjob run starts a job", file=sys.stderr)
    for problem in damaged:
        show_error(problem)
    return USAGE if damaged else 0


def _print(jobs: "Jobs", output: str, *, single: bool) -> None:
    if output not in ("json", "yaml"):
        _print_table(jobs, is_wide=output == "wide")
        if single:
            _print_time(jobs[0])
        return
    items = [job.manifest for job in jobs]
    from ddpjob.client.jobfile import dump_yaml

    shown: Json = items[0] if single else {"apiVersion": "v1", "kind": "List", "items": items}
    print(json.dumps(shown, indent=2) if output == "json" else dump_yaml(shown).rstrip("\n"))


def _print_table(jobs: "Jobs", *, is_wide: bool) -> None:
    from ddpjob.api.crd import COLUMNS

    columns = [column for column in COLUMNS if is_wide or not column.get("priority")]
    rows = [["NAMESPACE", "NAME", *(column["name"].upper() for column in columns)]]
    rows += [[job.namespace or "", job.name, *(_cell(job, column) for column in columns)] for job in jobs]
    if not is_wide and len({job.namespace for job in jobs}) < 2:
        rows = [row[1:] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_time(job: "DDPJob") -> None:
    """Print where the time of the job went until now; of an interrupted run, until its last sign of life."""
    from ddpjob.client.local import INTERRUPTED

    spent = job.status.time
    if spent is not None and job.state != INTERRUPTED:
        spent = spent.at(datetime.now(UTC))
    if spent is not None and spent.total:
        print(f"\ntime: {time_text(spent)}")


def _cell(job: "DDPJob", column: Json) -> str:
    if column["jsonPath"] == ".status.state":
        return one_line(job.state)
    value = _at(job.manifest, column["jsonPath"])
    if column["type"] == "date":
        return age(value)
    return "" if value is None else one_line(value)


def _at(job: Json, path: str) -> Any:
    """Return the value at a column's JSONPath; supports only the syntax that the columns use."""
    value: Any = job
    for name, key, wanted in _PART.findall(path):
        value = (value or {}).get(name)
        value = element(value, key, wanted) if key else value
    return value
