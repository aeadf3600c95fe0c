"""Runs test layers and ends with a table of what each took: ``python -m tests.layers unit kind``.

Two at a time: several of them wait for a cluster or a time limit more than they compute. A layer that fails does not
keep the others from running: one run tells everything that is wrong.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

LANES = 2
# The trainer's two together, as they are of one length; the rest, the longest first, beside the longest of all.
ORDER = ("trainer", "resilience", "kind", "apiserver", "local", "unit", "install", "lint")


@dataclass(frozen=True)
class Result:
    """How one layer ended, and how many seconds it took."""

    layer: str
    code: int
    seconds: float


class Runner:
    """Runs ``make test-<layer>`` and passes its lines on, each with the layer's name before it."""

    def __init__(self) -> None:
        self._printing = threading.Lock()

    def run(self, layer: str) -> Result:
        """One layer, to its end."""
        begin = time.monotonic()
        process = subprocess.Popen(
            ["make", "--no-print-directory", f"test-{layer}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            self._say(layer, line)
        result = Result(layer, process.wait(), time.monotonic() - begin)
        self._say(layer, f"{'ok' if result.code == 0 else 'FAILED'} after {result.seconds:.0f} s")
        return result

    def _say(self, layer: str, line: str) -> None:
        with self._printing:
            print(f"{layer:<10} | {line.rstrip()}", flush=True)


def main(layers: Sequence[str]) -> int:
    """Run them all; the exit status is 1 if any failed."""
    begin = time.monotonic()
    ordered = sorted(layers, key=lambda layer: ORDER.index(layer) if layer in ORDER else 0)
    with ThreadPoolExecutor(LANES) as lanes:
        results = list(lanes.map(Runner().run, ordered))
    print("\nlayer        result   seconds")
    for result in results:
        print(f"{result.layer:<12} {'ok' if result.code == 0 else 'FAILED':<8} {result.seconds:7.1f}")
    failed = sum(result.code != 0 for result in results)
    passed = len(results) - failed
    print(f"layers: {passed} passed, {failed} failed, {time.monotonic() - begin:.0f} s together", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
