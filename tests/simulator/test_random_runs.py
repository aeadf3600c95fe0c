"""Random stories with random faults and watches: the invariants of ``oracle`` hold. ``make soak`` carries out more."""

from concurrent.futures import ProcessPoolExecutor

from tests.simulator.parallel import failures_of
from tests.simulator.runs import RANDOM, Run

RUNS = 2000


def test_invariants_hold_in_two_thousand_random_runs(processes: ProcessPoolExecutor) -> None:
    failures = failures_of(processes, [Run(RANDOM, seed=seed) for seed in range(RUNS)])
    assert not failures, f"{len(failures)} runs failed, the first ones:\n" + "\n".join(failures[:3])
