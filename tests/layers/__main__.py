"""Run test layers and report on all of them: `python -m tests.layers unit kind`, used by `make test`.

A layer that fails does not stop the others. The exit code is 0 if no layer failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.layers.definitions import BY_NAME, LAYERS, Layer
from tests.layers.report import LayerResult, Outcome, as_json, as_text
from tests.layers.runner import Runner, busy_loops


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.layers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("layers", nargs="*", metavar="LAYER", help=f"default: all ({', '.join(BY_NAME)})")
    parser.add_argument("--times", type=int, default=1, help="run all layers so many times")
    parser.add_argument("--busy", action="store_true", help="run a busy loop on each core meanwhile")
    parser.add_argument(
        "--json",
        type=Path,
        default=os.environ.get("DDPJOB_TEST_REPORT") or None,
        metavar="FILE",
        help="write the result to this file too (default: $DDPJOB_TEST_REPORT)",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.layers if name not in BY_NAME]
    if unknown:
        parser.error(f"unknown layer: {', '.join(unknown)}. There are: {', '.join(BY_NAME)}")
    chosen = [layer for layer in LAYERS if layer.name in options.layers or not options.layers]
    return run(chosen, times=options.times, busy=options.busy, report=options.json)


def run(layers: list[Layer], *, times: int = 1, busy: bool = False, report: Path | None = None) -> int:
    """Run the layers, print the report, and return the exit code.

    times: run all of them so many times, one run after the other. busy: beside a busy loop on each core.
    """
    ci = os.environ.get("CI") == "true"
    begin = time.monotonic()
    loops = busy_loops() if busy else []
    results: list[LayerResult] = []
    try:
        for number in range(1, times + 1):
            numbered = [replace(layer, name=f"{layer.name} {number}") for layer in layers] if times > 1 else layers
            results += Runner(numbered, ci=ci).run()
    except KeyboardInterrupt:
        return 130
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    seconds = time.monotonic() - begin
    if report is not None:
        report.write_text(as_json(results, seconds, ci=ci))
    print(as_text(results, seconds, ci=ci), flush=True)
    return 1 if any(result.outcome(ci=ci) is Outcome.FAILED for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
