"""``ddpjob describe``: all that is known of a job: its card, conditions, pods, and what happened to it."""

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ddpjob.api.objects import Json
from ddpjob.cli.events import events_table, story
from ddpjob.cli.get import card
from ddpjob.cli.options import Form, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.table import Cell, Row, show, table
from ddpjob.cli.text import age
from ddpjob.errors import NotAllowedError

if TYPE_CHECKING:
    from rich.table import Table

    from ddpjob.client.base import Events, Pods
    from ddpjob.client.job import DDPJob

_GOOD = ("running", "succeeded", "pending")


def describe(
    name: Name,
    output: Form = "text",
    *,
    where: Where,
) -> int:
    """Show all that is known of a job: its card, its conditions and pods, and what happened to it.

    The JSON has the schema docs/reference/schemas/describe.json.

    \b
    Example:
      ddpjob describe mnist-cpu
    """
    with find(name, where) as client:
        job = client.get(name)
        try:
            pods, unread = client.pods(job), []
        except NotAllowedError as error:
            pods, unread = [], [error.error]
        happened, unread_events = story(client, job)
        unread = list(dict.fromkeys([*unread, *unread_events]))
        if output == "json":
            print(json.dumps(_description(job, client.place, pods, unread, happened), indent=2))
            return 0
        print("\n".join(card(client, job)))
    for title, shown in (
        ("Conditions", _conditions(job)), ("Pods", pods_table(pods)), ("Events", events_table(happened))
    ):  # fmt: skip
        print(f"\n{title}")
        show(shown)
    return 0


def _description(job: "DDPJob", place: str, pods: "Pods", unread: list[str], happened: "Events") -> Json:
    from ddpjob.cli.card import sentence
    from ddpjob.client.timeline import ConditionView, Description

    made = Description(
        job=job.name, namespace=str(job.namespace), place=place, events=happened, unread=unread, state=job.state,
        summary=sentence(job, datetime.now(UTC)), pods=pods,
        conditions=[ConditionView.model_validate(c.wire(), strict=False) for c in job.status.conditions or ()],
    )  # fmt: skip
    return made.wire()


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
