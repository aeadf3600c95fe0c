"""Random stories with random faults and watches: the invariants of ``oracle`` hold, and the job ends as without faults.

In every other run the operator reads the logs of failed pods, and the requests for logs fail more often than others.
``make soak`` carries out more.
"""

from concurrent.futures import ProcessPoolExecutor

from tests.simulator.parallel import failures_of
from tests.simulator.runs import RANDOM, Run

RUNS = 150


def test_random_runs_end_as_without_faults(processes: ProcessPoolExecutor) -> None:
    failures = failures_of(processes, [Run(RANDOM, seed=seed, logs=seed % 2) for seed in range(RUNS)])
    assert not failures, f"{len(failures)} runs failed, the first ones:\n" + "\n".join(failures[:3])
