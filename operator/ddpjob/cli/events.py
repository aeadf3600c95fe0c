"""``ddpjob events``: the story of a job, from all that has seen a part of it, sorted by time."""

import json
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING

from ddpjob.api.times import parse_time
from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.table import Cell, Row, show, table
from ddpjob.cli.text import one_line, show_error
from ddpjob.errors import NotAllowedError

if TYPE_CHECKING:
    from rich.table import Table

    from ddpjob.client.base import Client, Events
    from ddpjob.client.job import DDPJob
    from ddpjob.client.timeline import JobEvent


def events(
    name: Name,
    output: Form = "text",
    *,
    where: Where,
) -> int:
    """Print what happened to a job: decisions, pods, scheduler and kubelet, sorted by time.

    A cluster deletes its Events after an hour; what status and pods say remains. The JSON has the schema
    docs/reference/schemas/events.json.

    \b
    Example:
      ddpjob events mnist-cpu
    """
    from ddpjob.client.timeline import Timeline

    with find(name, where) as client:
        job = client.get(name)
        found, unread = story(client, job)
        if output == "json":
            made = Timeline(job=job.name, namespace=str(job.namespace), place=client.place, events=found, unread=unread)
            print(json.dumps(made.wire(), indent=2))
            return 0
        show(events_table(found))
        print(f"{len(found)} events, {one_line(client.place)}")
    return 0


def story(client: "Client", job: "DDPJob") -> tuple["Events", list[str]]:
    """Return what happened to a job, and what the user may not read of it: the status alone is always readable."""
    from ddpjob.client.timeline import timeline

    try:
        return client.events(job), []
    except NotAllowedError as error:
        show_error(error)
        return timeline(job), [error.error]


def events_table(found: "Events", zone: tzinfo | None = None) -> "Table":
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
