"""Run test layers and report on all of them: `python -m tests.layers unit kind`, used by `make test`.

A layer that fails does not stop the others. The exit code is 0 if no layer failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.layers.definitions import BY_NAME, LAYERS, Layer
from tests.layers.report import Outcome, as_text
from tests.layers.runner import Runner


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.layers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("layers", nargs="*", metavar="LAYER", help=f"default: all ({', '.join(BY_NAME)})")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.layers if name not in BY_NAME]
    if unknown:
        parser.error(f"unknown layer: {', '.join(unknown)}. There are: {', '.join(BY_NAME)}")
    return run([layer for layer in LAYERS if layer.name in options.layers or not options.layers])


def run(layers: list[Layer]) -> int:
    """Run the layers, print the report, and return the exit code."""
    ci = os.environ.get("CI") == "true"
    begin = time.monotonic()
    try:
        results = Runner(layers, ci=ci).run()
    except KeyboardInterrupt:
        return 130
    print(as_text(results, time.monotonic() - begin, ci=ci), flush=True)
    return 1 if any(result.outcome(ci=ci) is Outcome.FAILED for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
