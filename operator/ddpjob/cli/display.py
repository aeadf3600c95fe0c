"""What a run is shown through: a live table, plain lines, or JSON. All are told the same facts and the same end."""

from typing import Protocol, Self

from ddpjob.cli.ending import Outcome
from ddpjob.cli.facts import Facts


class Display(Protocol):
    """One way of showing a run; used as a context manager around it."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *reason: object) -> None: ...

    def show(self, facts: Facts) -> None:
        """The job as it is now."""

    def note(self, line: str, *, loud: bool = False) -> None:
        """One line from local mode to its user. loud: it must not be overlooked."""

    def output(self, line: str) -> None:
        """One line that node 0 printed, of a program that reports no progress."""

    def end(self, outcome: Outcome) -> None:
        """How it ended; the last that is called."""


def accuracy_text(accuracy: str | float) -> str:
    """From 0..1 to percent."""
    try:
        return f"{100 * float(accuracy):.2f} %"
    except ValueError:
        return str(accuracy)


def size_text(facts: Facts) -> str:
    """``2 nodes × 2 processes``."""
    nodes = f"{facts.num_nodes} node" + ("s" if facts.num_nodes != 1 else "")
    nproc = facts.nproc_per_node
    return nodes if nproc is None else f"{nodes} × {nproc} process" + ("es" if nproc != 1 else "")


def speed_text(samples_per_second: str) -> str:
    """``12,345 samples/s``."""
    number = f"{int(samples_per_second):,}" if samples_per_second.isdigit() else samples_per_second
    return f"{number} samples/s"
