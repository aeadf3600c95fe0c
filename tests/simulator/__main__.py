"""``python -m tests.simulator``: replay one run, list the scenarios, or carry out many random runs."""

import argparse
import logging
import sys

from tests.simulator.runs import Run, ViolationError, compare, execute
from tests.simulator.scenarios import SCENARIOS
from tests.simulator.soak import soak
from tests.simulator.stories import STORIES


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    replay = commands.add_parser("replay", help="carry out one run and print the operator's writes")
    replay.add_argument("run", nargs="+", help="for example: node-loss lost@7 watch=late, or: random seed=12")
    replay.add_argument("--logs", action="store_true", help="print the operator's log")
    commands.add_parser("list", help="print the names of the scenarios")
    long = commands.add_parser("soak", help="carry out random runs, and print a table")
    long.add_argument("--runs", type=int, default=100_000)
    long.add_argument("--first", type=int, default=0, metavar="SEED")
    options = parser.parse_args()
    if options.command == "soak":
        return soak(options.runs, options.first)
    if options.command == "list":
        print("\n".join([*SCENARIOS, *STORIES]))
        return 0
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


if __name__ == "__main__":
    sys.exit(main())
