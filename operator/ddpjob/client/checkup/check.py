"""``Check``: the verdict on one part of this machine or of a cluster. The JSON is that of ``ddpjob doctor -o json``."""

from typing import Literal

from ddpjob.api.model import WireModel

Status = Literal["ok", "warning", "error", "unknown"]
Part = Literal["machine", "cluster"]


class Check(WireModel):
    """The verdict on one part."""

    part: Part
    """Whether it is about this machine or the cluster."""
    name: str
    """Which check: a word that stays the same between releases."""
    status: Status
    """ok; warning: something does not work, or only slowly; error: jobs cannot run; unknown: it could not be found out,
    for example without the right to read it."""
    summary: str
    """What was found."""
    hint: str | None = None
    """The usual cause, or what follows from it."""
    next: str | None = None
    """What to do: a command, or a document."""


Checks = list[Check]


class Checkup(WireModel):
    """What ``ddpjob doctor`` found."""

    version: str
    """Release of ddpjob."""
    cluster: str | None = None
    """The cluster and namespace that were checked; absent if there is none."""
    healthy: bool
    """Whether no check found an error."""
    checks: list[Check]
    """The checks, those of this machine first."""


def machine(name: str, status: Status, summary: str, hint: str = "", next_step: str = "") -> Check:
    """Return a verdict on this machine."""
    text = " ".join(summary.split())
    return Check(part="machine", name=name, status=status, summary=text, hint=hint or None, next=next_step or None)


def cluster(name: str, status: Status, summary: str, hint: str = "", next_step: str = "") -> Check:
    """Return a verdict on the cluster."""
    return machine(name, status, summary, hint, next_step).model_copy(update={"part": "cluster"})
