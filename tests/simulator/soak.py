"""Many random runs, with a progress line and a table at the end."""

import sys
import time
from collections import Counter

from tests.simulator.parallel import carry_out, pool
from tests.simulator.runs import ELASTIC, RANDOM, Run
from tests.simulator.stories import SITE

PROGRESS_SECONDS = 10.0
ELASTIC_SHARE = 100
"""One of so many runs is of a job with minNodes."""
SITE_SHARE = 20
"""One of so many is of a job whose program trains by itself on nodes that fail."""
VARIANTS = 5
"""Runs of one random story, each with other faults. They share the run without faults, which takes as long as one."""


def soak(number: int, first: int) -> int:
    """Carry out ``number`` random runs from seed ``first``; print the result and return the exit code."""
    began = shown = time.monotonic()
    counts: dict[str, Counter[str]] = {}
    failures: list[str] = []
    done = 0
    runs = [random_run(first, each) for each in range(number)]
    runs += [Run(ELASTIC, seed=seed) for seed in range(first, first + number // ELASTIC_SHARE)]
    runs += [Run(SITE, seed=seed) for seed in range(first, first + number // SITE_SHARE)]
    number = len(runs)
    with pool() as processes:
        for batch in carry_out(processes, runs):
            done += sum(each["runs"] for each in batch.counts.values()) + len(batch.failures)
            failures += batch.failures
            for failure in batch.failures:
                print(failure, flush=True)
            for watch, each in batch.counts.items():
                counts.setdefault(watch, Counter()).update(each)
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                rate = done / (shown - began)
                left = (number - done) / rate
                print(f"{done} of {number} runs, {len(failures)} failed, {rate:.0f} runs/s, {left:.0f} s left")
                sys.stdout.flush()
    print(f"{'watch events':<14}{'runs':>10}{'checked':>10}{'faults':>10}{'operator starts':>18}")
    total = sum(counts.values(), Counter[str]())
    for watch, each in [*sorted(counts.items()), ("all", total)]:
        print(f"{watch:<14}{each['runs']:>10}{each['checked']:>10}{each['faults']:>10}{each['starts']:>18}")
    print(f"{number} runs from seed {first}, {len(failures)} failed, in {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


def random_run(first: int, number: int) -> Run:
    """Return the random run of this number, if the first story has the seed ``first``."""
    seed, variant = first + number // VARIANTS, number % VARIANTS
    return Run(RANDOM, seed=seed, variant=variant, logs=(seed + variant) % 2)
