"""``python -m tests.ddprun.lives``: carry out many random schedules."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.ddprun.lives.simulation import Group, Schedule, ViolationError


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.ddprun.lives", description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    options = parser.parse_args()
    began, failures = time.monotonic(), 0
    events, lives, ends = 0, 0, Counter[str]()
    for seed in range(options.first, options.first + options.runs):
        group = Group(Schedule.of(seed))
        try:
            group.run()
        except ViolationError as error:
            failures += 1
            print(f"seed {seed}: {error}", flush=True)
        events, lives = events + group.events, lives + group.leader.spent
        ends[group.leader.ended.reason if group.leader.ended else group.leader.phase] += 1
    for reason, number in ends.most_common():
        print(f"{number:8}  {reason}")
    seconds = time.monotonic() - began
    print(f"{options.runs} schedules, {events} events, {lives} restarts in place, {failures} failed, {seconds:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
