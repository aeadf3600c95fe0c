"""Random stories with random faults and watches: the invariants of ``oracle`` hold, and the job ends as without faults.

In every other run the operator reads the logs of failed pods, and the requests for logs fail more often than others.
``make soak`` carries out more.
"""

from concurrent.futures import ProcessPoolExecutor

from tests.simulator.parallel import check_all
from tests.simulator.runs import ELASTIC, RANDOM, Run

RUNS = 40
FOUND = (
    "random seed=72102972 variant=3 logs=1",
    "random seed=72103313 variant=3",
)
"""Runs in which an operator creates a pod of a job that has been deleted."""
ELASTIC_RUNS = 5


def test_random_runs_end_as_without_faults(processes: ProcessPoolExecutor) -> None:
    runs = [Run(RANDOM, seed=seed, logs=seed % 2) for seed in range(RUNS)]
    check_all(processes, [*runs, *(Run.parse(text.split()) for text in FOUND)])


def test_jobs_with_min_nodes_keep_their_limits_while_nodes_come_and_go(processes: ProcessPoolExecutor) -> None:
    check_all(processes, [Run(ELASTIC, seed=seed) for seed in range(ELASTIC_RUNS)])
