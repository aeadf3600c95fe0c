"""What Python's full garbage collections, which block the event loop, visit in the operator's process."""

import os
import subprocess
import sys
from pathlib import Path

COLLECTIONS = """
import gc, time
from ddpjob_operator.controller.main import main

def seconds():
    times = []
    for _ in range(5):
        started = time.perf_counter()
        gc.collect()
        times.append(time.perf_counter() - started)
    return min(times)

before = seconds()
code = main([])
print(code, before, seconds())
"""


def test_collections_leave_out_the_modules_objects(tmp_path: Path) -> None:
    """Measured: 66 ms before the start, 0.01 ms after it; without the freeze 66 ms for each collection."""
    command, environment = [sys.executable, "-c", COLLECTIONS], os.environ | {"KUBECONFIG": str(tmp_path / "absent")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    code, before, after = done.stdout.split()
    assert code == "1", "there is nothing to connect to"
    assert float(after) < float(before) / 4
