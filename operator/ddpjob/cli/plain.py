"""A run as plain lines, for a pipe, a file or a CI log: one whenever something changed."""

import time
from collections.abc import Callable
from typing import Self, TextIO

from ddpjob.cli import ending
from ddpjob.cli.display import accuracy_text, speed_text
from ddpjob.cli.ending import Outcome
from ddpjob.cli.facts import Facts, Node
from ddpjob.cli.printable import one_line, printable_line, ranks_text
from ddpjob.cli.times import short

_ON_THE_WAY = ("Pending", "ContainerCreating", "PodInitializing")  # nothing that a line would help with
INTERVAL = 2.0  # seconds between lines that say only how far the training is


class PlainDisplay:
    """Writes lines."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._begin = clock()
        self._facts: Facts | None = None
        self._last_line = ""
        self._said = -INTERVAL
        self._nodes: dict[int, Node] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._stream.flush()

    def show(self, facts: Facts) -> None:
        """Changes of state at once, mere progress every few seconds."""
        line, news = course(facts), _news(facts)
        before, now = self._facts, self._clock()
        self._facts = facts
        if before is None or news != _news(before) or (line != self._last_line and now - self._said >= INTERVAL):
            self._say(line)
            self._last_line, self._said = line, now
        self._show_nodes(facts)

    def note(self, line: str, *, loud: bool = False) -> None:
        """One line, marked as ours."""
        self._say(f"{'!!!' if loud else '·'} {one_line(line)}")

    def output(self, line: str) -> None:
        """One line of the program's."""
        print(f"n0 | {printable_line(line)}", file=self._stream, flush=True)

    def end(self, outcome: Outcome) -> None:
        """The last facts, then the ending."""
        if self._facts and course(self._facts) != self._last_line:
            self._say(course(self._facts))
        print("\n".join(ending.lines(outcome, width=80)), file=self._stream, flush=True)

    def _show_nodes(self, facts: Facts) -> None:
        for node in facts.nodes:
            known = self._nodes.get(node.rank)
            if node.state in _ON_THE_WAY and not node.detail:
                continue
            if known is None or (known.pod, known.state, known.detail) != (node.pod, node.state, node.detail):
                self._say(f"  n{node.rank} {node.pod}: {', '.join(filter(None, (node.state, node.detail)))}")
            self._nodes[node.rank] = node

    def _say(self, line: str) -> None:
        print(f"{short(self._clock() - self._begin):>6}  {line}", file=self._stream, flush=True)


def course(facts: Facts) -> str:
    """Everything that the table's head says, in one line."""
    parts = [
        facts.state,
        f"nodes {facts.nodes_ready}",
        ranks_text(facts.num_nodes * facts.nproc_per_node) if facts.nproc_per_node else "",
        f"attempt {facts.attempt}" if facts.attempt > 1 else "",
        f"restarts {facts.restarts} of at most {facts.max_restarts}" if facts.restarts else "",
        *progress_parts(facts),
        facts.message,
    ]
    return ", ".join(part for part in parts if part)


def progress_parts(facts: Facts) -> list[str]:
    """How far the training is, fact by fact; empty for a program that does not say."""
    if facts.step is None or not facts.total_steps:
        return [f"step {facts.step}" if facts.step else facts.phase or ""]
    parts = [f"epoch {facts.epoch}/{facts.total_epochs or '?'}" if facts.epoch is not None else ""]
    parts.append(f"step {facts.step}/{facts.total_steps}" + (f" ({facts.percent} %)" if facts.percent else ""))
    parts.append(f"loss {facts.loss}" if facts.loss else "")
    parts.append(f"accuracy {accuracy_text(facts.accuracy)}" if facts.accuracy else "")
    parts.append(speed_text(facts.samples_per_second) if facts.samples_per_second else "")
    parts.append(f"{short(facts.eta_seconds)} left" if facts.eta_seconds else "")
    parts.append(f"checkpoint of step {facts.checkpoint_step}" if facts.checkpoint_step is not None else "")
    parts.append(f"resumed from step {facts.resumed_from_step}" if facts.resumed_from_step is not None else "")
    return [part for part in parts if part]


def _news(facts: Facts) -> tuple[object, ...]:
    """What is worth a line at once."""
    training = (facts.epoch, facts.accuracy, facts.resumed_from_step, facts.step is None)
    return (facts.state, facts.attempt, facts.restarts, facts.nodes_ready, facts.message, *training)
