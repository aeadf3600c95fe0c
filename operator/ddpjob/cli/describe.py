"""``ddpjob describe``: all that is known of a job: its card, conditions, pods and Events."""

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ddpjob.api.objects import Json
from ddpjob.api.times import parse_time
from ddpjob.cli.get import card
from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.table import Cell, Row, show, table
from ddpjob.cli.text import age, one_line, show_error
from ddpjob.errors import DDPJobError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ddpjob.client.base import Pods
    from ddpjob.client.job import DDPJob
    from ddpjob.client.timeline import JobEvent, Timeline

_GOOD = ("running", "succeeded", "pending")


def describe(name: Name, output: Form = "text", *, where: Where) -> int:
    """Show all that is known of a job: its card, its conditions, its pods, and its Events, sorted by time.

    A cluster deletes Events after an hour; the attempts in the card remain. The JSON has the schema
    docs/reference/schemas/describe.json.

    \b
    Example:
      ddpjob describe mnist-cpu
    """
    with find(name, where) as client:
        job = client.get(name)
        found = client.timeline(job)
        for text in found.unread:  # the status alone is always readable
            show_error(DDPJobError(text))
        if output == "json":
            print(json.dumps(_description(job, found), indent=2))
            return 0
        print("\n".join(card(client, job)))
    for title, shown in (
        ("Conditions", _conditions(job)), ("Pods", pods_table(found.pods)), ("Events", events_table(found.events))
    ):  # fmt: skip
        print(f"\n{title}")
        show(shown)
    print(f"{len(found.events)} events, {one_line(client.place)}")
    return 0


def _description(job: "DDPJob", found: "Timeline") -> Json:
    from ddpjob.cli.card import sentence
    from ddpjob.client.timeline import Description

    conditions = list(job.status.conditions or ())
    summary = sentence(job, datetime.now(UTC))
    return Description(**dict(found), state=job.state, summary=summary, conditions=conditions).wire()


def _conditions(job: "DDPJob") -> "Table":
    rows: list[Row] = []
    for found in job.status.conditions or ():
        warns = found.status == "True" and found.type in ("Failed", "Stalled")
        since = age(found.last_transition_time)
        rows.append([found.type, Cell(found.status, warns), found.reason, since, Cell(found.message, warns)])
    return table(["TYPE", "STATUS", "REASON", "FOR", "MESSAGE"], rows, whole=("TYPE", "STATUS"), folded="MESSAGE")


def pods_table(pods: "Pods") -> "Table":
    """Return the pods of a job as a table."""
    from ddpjob.cli.card import pod_state, pod_text  # imports the model of the status

    rows: list[Row] = []
    for pod in pods:
        warns = pod.state not in _GOOD
        state, text = Cell(pod_state(pod), warns), Cell(pod_text(pod), warns)
        rows.append([f"n{pod.node_rank}", pod.attempt, state, pod.kubernetes_node, age(pod.created), pod.name, text])
    header = ["NODE", "ATTEMPT", "STATE", "ON", "AGE", "POD", ""]
    return table(header, rows, whole=("NODE",), folded="")


def events_table(found: "Sequence[JobEvent]") -> "Table":
    """Return the events as a table; times are those of this machine."""
    times = [parse_time(event.time).astimezone() for event in found]
    days = {time.date() for time in times}
    form = "%H:%M:%S" if len(days) < 2 else "%m-%d %H:%M:%S"
    rows = [_event_row(event, time, form) for event, time in zip(found, times, strict=True)]
    return table(["TIME", "SOURCE", "OBJECT", "REASON", "MESSAGE"], rows, whole=("TIME", "OBJECT"), folded="MESSAGE")


def _event_row(event: "JobEvent", time: datetime, form: str) -> Row:
    warns = event.type == "Warning"
    message = event.message + (f" (×{event.count})" if event.count > 1 else "")
    return [time.strftime(form), event.source, _object(event), Cell(event.reason, warns), Cell(message, warns)]


def _object(event: "JobEvent") -> str:
    """Return for example ``job``, or of a pod ``n1 (2)``: node and attempt."""
    if event.node_rank is not None:
        return f"n{event.node_rank} ({event.attempt})"
    return "job" if event.kind == "DDPJob" else f"{event.kind} {event.name}"
