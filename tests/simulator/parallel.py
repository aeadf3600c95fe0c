"""Many runs on several processes."""

import gc
import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from tests.mutants.mutant import Mutant, in_this_process
from tests.simulator.runs import RANDOM, Run, ViolationError, calm, compare, undisturbed

CORES = 2
BATCH = 25


def pool() -> ProcessPoolExecutor:
    """Return a pool of processes, each with its own modules, so that a mutant changes only one of them."""
    workers = min(CORES, os.cpu_count() or 1)
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_begin)


def carry_out(processes: ProcessPoolExecutor, runs: Sequence[Run]) -> Iterator[list[str]]:
    """Carry out all runs; yield the failures of up to ``BATCH`` at a time, in order."""
    batches = [runs[start : start + BATCH] for start in range(0, len(runs), BATCH)]
    yield from processes.map(_carry_out, batches)


def check_all(processes: ProcessPoolExecutor, runs: Sequence[Run]) -> None:
    """Carry out all runs. Raises ``AssertionError`` if some fail."""
    failures = [failure for batch in carry_out(processes, runs) for failure in batch]
    assert not failures, f"{len(failures)} of {len(runs)} runs failed, the first ones:\n" + "\n".join(failures[:3])


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


def _carry_out(runs: Sequence[Run]) -> list[str]:
    failures: list[str] = []
    seed, calm_result = -1, None
    for run in runs:
        try:
            if run.scenario == RANDOM and seed != run.seed:
                calm_result = None
                seed, calm_result = run.seed, calm(run)
            compare(run, calm_result)
        except ViolationError as error:
            failures.append(str(error))
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}\n  replay: {run.command}")
    return failures
