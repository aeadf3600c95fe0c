"""What the page about a job shows besides its curves: the verdict, the facts of its card, events and a log."""

from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ddpjob.api.text import attributed, clean_line
from ddpjob.cli.card import facts_of
from ddpjob.cli.text import one_line
from ddpjob.cli.training import Training
from ddpjob.cli.why import added_evidence
from ddpjob.client.base import Client
from ddpjob.client.job import DDPJob
from ddpjob.errors import DDPJobError
from ddpjob.version import __version__
from ddpplot.page import PageEvent, TrainingPage, Verdict

if TYPE_CHECKING:
    from ddpjob.client.timeline import Timeline
    from ddpjob.client.verdict.explanation import Explanation

_LINES, _EVENTS, _LONGEST = 20, 50, 2000  # lines of a log, Events, characters of each text


def read_page(client: Client, training: Training) -> TrainingPage:
    """Return the page. What cannot be read is left out, or named in the verdict."""
    found = training.found
    try:
        verdict = verdict_of(client.explain(found))
    except DDPJobError as error:
        verdict = not_read(error)
    try:
        events = events_of(client.timeline(found))
    except DDPJobError:
        events = []
    return page_of(training, verdict, events, read_log(client, found))


def page_of(
    training: Training, verdict: Verdict | None, events: Sequence[PageEvent], log: tuple[str, Sequence[str]]
) -> TrainingPage:
    """Return the page with what was read."""
    found = training.found
    facts = [(fact.label, shortened(fact.text), fact.is_abnormal) for fact in facts_of(found, datetime.now(UTC))]
    program = f"ddpjob {__version__}"
    return TrainingPage(found.name, program, training.history, training.job, verdict, facts, events, log)


def verdict_of(found: "Explanation") -> Verdict:
    """Return the verdict of ``ddpjob why``."""
    advice = [(name, text) for name, text in (("hint", found.hint), ("next", found.next)) if text]
    shown = [(name, shortened(attributed(name, text, found.from_program))) for name, text in advice]
    shown += [("not read", shortened(text)) for text in found.unread]
    evidence = [(one_line(f"{e.kind} {e.name} {e.field}"), shortened(value)) for e, value in added_evidence(found)]
    return Verdict(shortened(found.sentence), found.is_abnormal, shown, evidence)


def not_read(error: DDPJobError) -> Verdict:
    """Return in place of a verdict why there is none."""
    advice = [(label.strip(" :"), shortened(text)) for label, text in error.parts()[1:]]
    return Verdict(shortened(error.error), is_abnormal=True, advice=advice)


def events_of(found: "Timeline") -> list[PageEvent]:
    """Return the newest Events, the newest first."""
    return [
        PageEvent(
            event.time, one_line(event.source), one_line(event.reason), shortened(event.message),
            event.type == "Warning", event.count,
        )
        for event in found.events[: -_EVENTS - 1 : -1]
    ]  # fmt: skip


def read_log(client: Client, found: DDPJob) -> tuple[str, Sequence[str]]:
    """Return the last lines of the node that failed last, else of node 0, and a title; nothing if there are none."""
    failed = found.status.failures[-1] if found.status.failures and not found.succeeded else None
    node = failed.node_rank if failed is not None and failed.node_rank is not None else 0
    attempt = failed.attempt if failed is not None and found.finished else None
    try:
        lines = deque(client.logs(found, nodes={node}, attempt=attempt, tail=_LINES), _LINES)
    except DDPJobError:
        return "", ()
    shown = [shortened(clean_line(line.text)) for line in lines]
    return f"Last lines of node {node}" + (f", attempt {lines[0].attempt}" if lines else ""), shown


def shortened(text: str) -> str:
    """Return the text on one line, cut to what a page shows."""
    line = one_line(text[: 4 * _LONGEST])
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"
