"""Many runs on several processes."""

import gc
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.mutants.mutant import Mutant, in_this_process
from tests.simulator.runs import RANDOM, Run, ViolationError, calm, compare, undisturbed

CORES = 2
_BATCH = 25


@dataclass
class Batch:
    """The failures of some runs. counts: of runs, of those that were checked, of faults and starts of the operator."""

    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    process: int = 0
    cpu_seconds: float = 0.0


def pool() -> ProcessPoolExecutor:
    """Return a pool of processes, each with its own modules, so that a mutant changes only one of them."""
    workers = min(CORES, os.cpu_count() or 1)
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin)


def carry_out(processes: ProcessPoolExecutor, runs: Sequence[Run]) -> Iterator[Batch]:
    """Carry out all runs; yield the results of some at a time. Runs with a scenario are compared with that without."""
    batches = [runs[start : start + _BATCH] for start in range(0, len(runs), _BATCH)]
    yield from processes.map(_carry_out, batches)


def check_all(processes: ProcessPoolExecutor, runs: Sequence[Run]) -> None:
    """Carry out all runs, and print their number and time. Raises ``AssertionError`` if some fail."""
    began = time.monotonic()
    failures: list[str] = []
    cpu: dict[int, tuple[float, float]] = {}
    for batch in carry_out(processes, runs):
        failures += batch.failures
        first, _ = cpu.get(batch.process, (batch.cpu_seconds, 0.0))
        cpu[batch.process] = (first, batch.cpu_seconds)
    seconds = sum(last - first for first, last in cpu.values())
    print(f"\n{len(runs)} runs in {time.monotonic() - began:.1f} s, {seconds:.1f} s of CPU")
    assert not failures, f"{len(failures)} runs failed, the first ones:\n" + "\n".join(failures[:3])


def first_detection(mutant: Mutant) -> str | None:
    """Return the first run that fails with a mutant although it passes without, and how it fails; None if none does."""
    for run in (Run.parse(text.split()) for text in mutant.runs):
        if run.scenario != RANDOM and not run.is_alone:
            undisturbed(run.scenario)  # cached before the mutant is applied
        with in_this_process(mutant):
            failure = _failure_of(run)
        if failure is not None and _failure_of(run) is None:
            return failure
    return None


def _failure_of(run: Run) -> str | None:
    try:
        compare(run)
    except Exception as error:
        return str(error)
    return None


def _begin() -> None:
    logging.disable(logging.CRITICAL)  # thousands of expected warnings
    gc.freeze()  # the modules stay; each collection of them would take a tenth of the time
    gc.set_threshold(50_000, 20, 20)


def _carry_out(runs: Sequence[Run]) -> Batch:
    batch = Batch(process=os.getpid())
    seed, calm_result = -1, None
    for run in runs:
        batch.counts["runs"] += 1
        try:
            if run.scenario == RANDOM and seed != run.seed:
                calm_result = None
                seed, calm_result = run.seed, calm(run)
            result = compare(run, calm_result)
            simulation = result.simulation
            batch.counts.update(faults=simulation.faults, starts=simulation.starts, checked=result.is_checked)
        except ViolationError as error:
            batch.failures.append(str(error))
        except Exception as error:
            batch.failures.append(f"{type(error).__name__}: {error}\n  replay: {run.command}")
    batch.cpu_seconds = time.process_time()
    return batch
