"""Count what the status says when a rank of a script under torchrun fails: ``ddpjob run``, two nodes of two ranks.

    python -m tests.benchmarks.torchrun_blame --repetitions 50
    python -m tests.benchmarks.torchrun_blame --fault segfault --repetitions 5

Rank 2 fails at step 5; the other three lose their connections within milliseconds, and both pods often end in the same
second. The failure in the status must name rank 2, its node and the cause. Exit code 1: it named something else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ddpjob.api.objects import Json
from ddpjob.local.state import StateFolder
from tests.local.builders import a_local_job
from tests.torchrun import FAULT_LINE, SCRIPT, VALUE_ERROR


@dataclass(frozen=True)
class FaultCase:
    """A statement that rank 2 executes, and the reason and the end of the message that must follow."""

    statement: str
    reason: str
    ends: str


FAULTS = {
    "exception": FaultCase(VALUE_ERROR, "ValueError", "ValueError: sample 17 has 3 channels, expected 1"),
    "exit": FaultCase("sys.exit(3)", "Error", ""),
    "kill": FaultCase("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", ""),
    "segfault": FaultCase("ctypes.string_at(0)", "SIGSEGV", ""),
    "abort": FaultCase("os.abort()", "SIGABRT", ""),
}
_SECONDS = 600


def failure_of(fault: FaultCase, folder: Path) -> tuple[Json, str]:
    """Run the job in a folder, and return the failure in its status and the script's path."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    env = [{"name": "FAULT", "value": fault.statement}, {"name": "VICTIMS", "value": "2"}]
    policy = {"maxRestarts": 0}
    job = a_local_job("", "blame", nprocPerNode=2, env=env, restartPolicy=policy, command=["torchrun", str(script)])
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    command = [sys.executable, "-m", "ddpjob.cli.main", "run", str(file), "--state-dir", str(folder / "state")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    recorded = StateFolder(folder / "state").job("default", "blame").job() if done.returncode == 1 else None
    if recorded is None:
        raise SystemExit(f"ddpjob run ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    (failure,) = recorded["status"]["failures"]
    return dict(failure), str(script)


def is_right(fault: FaultCase, failure: Json, script: str) -> bool:
    """Return whether the failure names rank 2 on node 1, its reason and, of an exception, its text and line."""
    place = f", {script}:{FAULT_LINE}" if fault.ends else ""
    named = (failure.get("nodeRank"), failure.get("rank"), failure["reason"])
    return named == (1, 2, fault.reason) and failure["message"].endswith(fault.ends) and place in failure["message"]


def main() -> int:
    """Run the jobs and print what was blamed how often."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.torchrun_blame", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--fault", choices=FAULTS, default="exception")
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    fault, counts, begin = FAULTS[options.fault], Counter[tuple[bool, str]](), time.monotonic()

    def trial(number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            failure, script = failure_of(fault, Path(folder))
        right, said = is_right(fault, failure, script), failure["message"].replace(failure["pod"], "POD")
        counts[right, said.replace(script, "train.py")] += 1
        print(f"{number}, {time.monotonic() - begin:.0f} s: {'right' if right else 'WRONG'}: {said}", flush=True)

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(trial, range(1, options.repetitions + 1)))
    for (right, said), count in sorted(counts.items()):
        print(f"{count} of {options.repetitions}, {'right' if right else 'WRONG'}: {said}")
    return 0 if all(right for right, _ in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
