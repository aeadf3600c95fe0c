"""``ddpjob get``: lists the jobs of the state folder, with the columns of ``kubectl get ddp``."""

import json
import re
import sys
from typing import Annotated, Any, Literal

from typer import Argument, Option

from ddpjob.api.exit_codes import USAGE
from ddpjob.api.objects import Json, element
from ddpjob.cli.options import Namespace, StateDir, find, state_folder
from ddpjob.cli.text import age, one_line, show_error
from ddpjob.local import LocalError
from ddpjob.local.state import JobFolder

_ACTIVE = ("Pending", "Running", "Ending", "Restarting")
_PART = re.compile(r'\.(\w+)(?:\[\?\(@\.(\w+)=="(\w+)"\)\])?')


def get(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="Show only this job.")] = None,
    output: Annotated[
        Literal["table", "wide", "json", "yaml"],
        Option("--output", "-o", metavar="FORM", help="table, wide, json or yaml."),
    ] = "table",
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """List the jobs of this machine: their state, progress and restarts.

    Interrupted: the job is not finished, and no `ddpjob run` runs it.

    \b
    Example:
      ddpjob get
    """
    folder = state_folder(state_dir)
    if name is not None:
        record = find(folder, name, namespace)
        _print([(record, record.job() or {})], output, single=True)
        return 0
    records = [record for record in folder.jobs() if namespace in (None, record.namespace)]
    jobs, damaged = [], []
    for record in records:
        try:
            jobs.append((record, record.job() or {}))
        except LocalError as error:
            damaged.append(error)
    if records or output in ("json", "yaml"):
        _print(jobs, output, single=False)
    else:
        print(f"no jobs in {one_line(folder.root)}; ddpjob run starts a job", file=sys.stderr)
    for problem in damaged:
        show_error(problem)
    return USAGE if damaged else 0


def _print(jobs: list[tuple[JobFolder, Json]], output: str, *, single: bool) -> None:
    if output not in ("json", "yaml"):
        _print_table(jobs, is_wide=output == "wide")
        return
    items = [job for _, job in jobs]
    shown: Json = items[0] if single else {"apiVersion": "v1", "kind": "List", "items": items}
    if output == "json":
        print(json.dumps(shown, indent=2))
    else:
        from ddpjob.cli.jobfile import dump_yaml

        print(dump_yaml(shown), end="")


def _print_table(jobs: list[tuple[JobFolder, Json]], *, is_wide: bool) -> None:
    from ddpjob.api.crd import COLUMNS

    columns = [column for column in COLUMNS if is_wide or not column.get("priority")]
    rows = [["NAMESPACE", "NAME", *(column["name"].upper() for column in columns)]]
    rows += [[record.namespace, record.name, *(_cell(record, job, c) for c in columns)] for record, job in jobs]
    if not is_wide and len({record.namespace for record, _ in jobs}) < 2:
        rows = [row[1:] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _cell(record: JobFolder, job: Json, column: Json) -> str:
    value = _at(job, column["jsonPath"])
    if column["jsonPath"] == ".status.state":
        value = value or "Pending"
        return "Interrupted" if value in _ACTIVE and record.runner() is None else one_line(value)
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
