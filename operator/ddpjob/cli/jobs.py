"""Jobs as a list: the columns of ``kubectl get ddp``, or objects."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ddpjob.api import names
from ddpjob.api.objects import Json, condition
from ddpjob.cli.table import Cell, show, table
from ddpjob.cli.text import age, one_line

if TYPE_CHECKING:
    from rich.table import Table

    from ddpjob.client.base import Jobs
    from ddpjob.client.job import DDPJob


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
