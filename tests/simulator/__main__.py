"""``python -m tests.simulator``: replay one run, or carry out many random runs."""

import argparse
import logging
import sys
import time

from tests.simulator.parallel import BATCH, carry_out, pool
from tests.simulator.runs import ELASTIC, RANDOM, Run, ViolationError, compare, execute
from tests.simulator.stories import SITE

PROGRESS_SECONDS = 10.0
ELASTIC_SHARE = 100
"""One of so many runs is of a job with minNodes."""
SITE_SHARE = 20
"""One of so many is of a job whose program trains by itself on nodes that fail."""
VARIANTS = 5
"""Runs of one random story, each with other faults. They share the run without faults, which takes as long as one."""


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    replay = commands.add_parser("replay", help="carry out one run and print the operator's writes")
    replay.add_argument("run", nargs="+", help="for example: node-loss lost@7 watch=late, or: random seed=12")
    replay.add_argument("--logs", action="store_true", help="print the operator's log")
    long = commands.add_parser("soak", help="carry out random runs, and print a table")
    long.add_argument("--runs", type=int, default=100_000)
    long.add_argument("--first", type=int, default=0, metavar="SEED")
    options = parser.parse_args()
    if options.command == "soak":
        return soak(options.runs, options.first)
    return _replay(Run.parse(options.run), logs=options.logs)


def _replay(run: Run, *, logs: bool) -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s: %(message)s")
    logging.disable(logging.NOTSET if logs else logging.CRITICAL)
    try:
        for number, write in enumerate(execute(run).writes, start=1):
            print(number, write)
        compare(run)
    except ViolationError as error:
        print(error)
        return 1
    return 0


def soak(number: int, first: int) -> int:
    """Carry out ``number`` random runs from seed ``first``; print the result and return the exit code."""
    began = shown = time.monotonic()
    done = failures = 0
    runs = [random_run(first, each) for each in range(number)]
    runs += [Run(ELASTIC, seed=seed) for seed in range(first, first + number // ELASTIC_SHARE)]
    runs += [Run(SITE, seed=seed) for seed in range(first, first + number // SITE_SHARE)]
    with pool() as processes:
        for batch in carry_out(processes, runs):
            done, failures = min(done + BATCH, len(runs)), failures + len(batch)
            for failure in batch:
                print(failure, flush=True)
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                print(f"{done} of {len(runs)} runs, {failures} failed, in {shown - began:.0f} s", flush=True)
    print(f"seeds from {first}: {len(runs)} runs, {failures} failed, in {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


def random_run(first: int, number: int) -> Run:
    """Return the random run of this number, if the first story has the seed ``first``."""
    seed, variant = first + number // VARIANTS, number % VARIANTS
    return Run(RANDOM, seed=seed, variant=variant, logs=(seed + variant) % 2)


if __name__ == "__main__":
    sys.exit(main())
