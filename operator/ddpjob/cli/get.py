"""``ddpjob get``: lists the jobs of the state folder, with the columns of ``kubectl get ddp``."""

import json
import re
import sys
from typing import Annotated, Any, Literal

from typer import Argument, Option

from ddpjob.api.exit_codes import USAGE
from ddpjob.api.objects import Json
from ddpjob.cli.options import Namespace, StateDir, find, state_folder
from ddpjob.cli.text import age, one_line, show_error
from ddpjob.local import LocalError
from ddpjob.local.state import JobFolder

_ACTIVE = ("Pending", "Running", "Ending", "Restarting")
_FILTER = re.compile(r'(\w+)\[\?\(@\.(\w+)=="(\w+)"\)\]')


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
        job = _job(record)
        return _print([(record, job)], output, single=True)
    records = [record for record in folder.jobs() if namespace in (None, record.namespace)]
    jobs, damaged = [], []
    for record in records:
        try:
            jobs.append((record, _job(record)))
        except LocalError as error:
            damaged.append(error)
    if not records and output in ("table", "wide"):
        print(f"no jobs in {one_line(folder.root)}; ddpjob run starts one", file=sys.stderr)
        return 0
    _print(jobs, output, single=False)
    for problem in damaged:
        show_error(problem)
    return USAGE if damaged else 0


def _job(record: JobFolder) -> Json:
    job = record.job()
    if job is None:
        raise LocalError(
            f"{record.path}: the record holds no job",
            "the run ended before the job was created",
            f"run it again, or remove the record with ddpjob delete {record.name}",
        )
    return job


def _print(jobs: list[tuple[JobFolder, Json]], output: str, *, single: bool) -> int:
    if output in ("json", "yaml"):
        items = [job for _, job in jobs]
        shown: Json = items[0] if single else {"apiVersion": "v1", "kind": "List", "items": items}
        if output == "json":
            print(json.dumps(shown, indent=2))
        else:
            from ddpjob.cli.jobfile import dump_yaml

            print(dump_yaml(shown), end="")
        return 0
    from ddpjob.api.crd import COLUMNS

    columns = [column for column in COLUMNS if output == "wide" or not column.get("priority")]
    several = output == "wide" or len({record.namespace for record, _ in jobs}) > 1
    rows = [[*(["NAMESPACE"] if several else []), "NAME", *(column["name"].upper() for column in columns)]]
    for record, job in jobs:
        cells = [_cell(record, job, column) for column in columns]
        rows.append([*([record.namespace] if several else []), record.name, *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _cell(record: JobFolder, job: Json, column: Json) -> str:
    value = _at(job, column["jsonPath"])
    if column["jsonPath"] == ".status.state":
        value = value or "Pending"
        return "Interrupted" if value in _ACTIVE and record.runner() is None else one_line(value)
    if column["type"] == "date":
        return age(str(value)) if value else ""
    return "" if value is None else one_line(value)


def _at(job: Json, path: str) -> Any:
    """Return the value at a column's JSONPath; supports only the syntax that the columns use."""
    value: Any = job
    for part in re.split(r"\.(?![^\[]*\])", path.lstrip(".")):
        if found := _FILTER.fullmatch(part):
            listed, key, wanted = found.groups()
            value = next((item for item in (value or {}).get(listed) or () if item.get(key) == wanted), None)
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value
