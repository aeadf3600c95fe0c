"""What the status of a job adds to the metrics of its training: its state, failures and time. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddpplot.history import History, Run, RunFailure

_CLOCKS = 60.0  # seconds by which the clocks of an operator and of a node may differ
FORMULA = "training / (all - queued - stopped)"


@dataclass(frozen=True)
class JobRecord:
    """A job as its status shows it.

    Attributes:
        place: where it runs, for a person.
        began, ended: seconds since 1970 of its creation, and of its end, or if it is not finished, of the reading.
        restarts, in_place: how many there were, and how many of them were in place.
        time: seconds by category, in the order of the ledger; empty without one.
        goodput: FORMULA; None before the job has used any time.
    """

    name: str
    namespace: str = ""
    place: str = ""
    state: str = ""
    began: float | None = None
    ended: float | None = None
    is_finished: bool = False
    nodes: int | None = None
    restarts: int = 0
    in_place: int = 0
    failures: Sequence[RunFailure] = ()
    time: Mapping[str, int] = field(default_factory=dict)
    goodput: float | None = None


def with_failures(history: History, job: JobRecord) -> History:
    """Return the history with the failures of the job at the runs that they ended.

    A volume may hold runs of an earlier job whose attempts have the same numbers: they began before this job.
    """
    runs = list(history.runs)
    for failure in job.failures:
        own = [at for at, run in enumerate(runs) if _is_of(run, failure, job)]
        if own and not runs[own[-1]].cause:
            runs[own[-1]] = _failed(runs[own[-1]], failure, runs[own[-1] + 1 : own[-1] + 2])
    return replace(history, runs=runs)


def _is_of(run: Run, failure: RunFailure, job: JobRecord) -> bool:
    began = run.began or 0.0
    return (
        run.attempt == str(failure.attempt)
        and (failure.life is None or failure.life == run.life)
        and (job.began is None or began >= job.began - _CLOCKS)
        and (failure.time is None or began <= failure.time + _CLOCKS)
    )


def _failed(run: Run, failure: RunFailure, following: Sequence[Run]) -> Run:
    """Return the run with its failure. A rank that was killed has written no row of its last second."""
    reached = max(run.reached, failure.step or 0)
    repeated = max(run.repeated, reached - following[0].resumed) if following else run.repeated
    return replace(run, cause=failure.message, failure=failure, reached=reached, repeated=repeated)
