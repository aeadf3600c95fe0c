"""``ddpjob events``: the story of a job, from all that has seen a part of it, sorted by time."""

import json
from collections.abc import Sequence
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING

from ddpjob.api.times import parse_time
from ddpjob.cli.options import Form, Name, Namespace, StateDir
from ddpjob.cli.place import Context, Local, find
from ddpjob.cli.table import Cell, Row, show, table
from ddpjob.cli.text import one_line, show_error
from ddpjob.errors import DDPJobError

if TYPE_CHECKING:
    from rich.table import Table

    from ddpjob.client.timeline import JobEvent, Timeline


def events(
    name: Name,
    output: Form = "text",
    *,
    local: Local = False,
    context: Context = None,
    namespace: Namespace = None,
    state_dir: StateDir = None,
) -> int:
    """Print what happened to a job: decisions, pods, scheduler and kubelet, sorted by time.

    A cluster deletes its Events after an hour; what status and pods say remains. The JSON has the schema
    docs/reference/schemas/events.json.

    \b
    Example:
      ddpjob events mnist-cpu
    """
    with find(name, local=local, context=context, namespace=namespace, state_dir=state_dir) as client:
        found = client.timeline(name)
        show_unread(found)
        if output == "json":
            print(json.dumps(found.wire(), indent=2))
            return 0
        show(events_table(found.events))
        print(f"{len(found.events)} events, {one_line(client.place)}")
    return 0


def show_unread(found: "Timeline") -> None:
    """Print what the user may not read; the status alone is always readable."""
    for text in found.unread:
        show_error(DDPJobError(text))


def events_table(found: "Sequence[JobEvent]", zone: tzinfo | None = None) -> "Table":
    """Return the events as a table; times are those of a time zone, by default of this machine."""
    times = [parse_time(event.time).astimezone(zone) for event in found]
    days = {time.date() for time in times}
    form = "%H:%M:%S" if len(days) < 2 else "%m-%d %H:%M:%S"
    rows = [_row(event, time, form) for event, time in zip(found, times, strict=True)]
    return table(["TIME", "SOURCE", "OBJECT", "REASON", "MESSAGE"], rows, whole=("TIME", "OBJECT"), folded="MESSAGE")


def _row(event: "JobEvent", time: datetime, form: str) -> Row:
    warns = event.type == "Warning"
    message = event.message + (f" (×{event.count})" if event.count > 1 else "")
    return [time.strftime(form), event.source, _object(event), Cell(event.reason, warns), Cell(message, warns)]


def _object(event: "JobEvent") -> str:
    """Return for example ``job``, or of a pod ``n1 (2)``: node and attempt."""
    if event.node_rank is not None:
        return f"n{event.node_rank} ({event.attempt})"
    return "job" if event.kind == "DDPJob" else f"{event.kind} {event.name}"
