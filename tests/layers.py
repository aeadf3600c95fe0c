"""Runs test layers one after the other and ends with a table of what each took: ``python -m tests.layers unit kind``.

A layer that fails does not keep the next from running: one run tells everything that is wrong.
"""

import subprocess
import sys
import time


def main(layers: list[str]) -> int:
    """Run ``make test-<layer>`` for each; the exit status is 1 if any failed."""
    results = []
    for layer in layers:
        print(f"\n=== {layer} ===", flush=True)
        begin = time.monotonic()
        code = subprocess.run(["make", "--no-print-directory", f"test-{layer}"], check=False).returncode
        results.append((layer, code, time.monotonic() - begin))
    print("\nlayer        result   seconds")
    for layer, code, seconds in results:
        print(f"{layer:<12} {'ok' if code == 0 else 'FAILED':<8} {seconds:7.1f}")
    failed = sum(code != 0 for _, code, _ in results)
    print(f"layers: {len(results) - failed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
