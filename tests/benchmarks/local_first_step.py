"""How long from `ddpjob run` to the end of the first training step on this machine, without a cluster.

    python -m tests.benchmarks.local_first_step            # table on standard output
    python -m tests.benchmarks.local_first_step --write    # and into docs/benchmarks.md

With manifests/examples/mnist-cpu.yaml, two nodes of two processes, on scikit-learn's digits and, where
DDPJOB_MNIST_DIR or ../shared/mnist has it, on MNIST. The clock starts before the process does and stops at the time
that the trainer's own row of step 1 bears: Python's start, the control plane, four imports of torch, the rendezvous and
the data are inside.

Cold: before the run the pages of all files of this virtual environment, torch's above all, are dropped from the page
cache (posix_fadvise, POSIX_FADV_DONTNEED); what stayed, because other programs have it mapped, is told. Warm: right
after a run. Cold and warm runs take turns. Every run has a state folder of its namespace.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.benchmarks.pagecache import drop, resident
from tests.benchmarks.report import describe_machine, write_section

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "manifests" / "examples" / "mnist-cpu.yaml"
REPETITIONS = 5
SECONDS = 600.0


@dataclass(frozen=True)
class Start:
    """One run; seconds since the command was started."""

    shown: float
    """The command line showed the job for the first time."""
    running: float
    """All pods ran."""
    first_step: float


def datasets() -> dict[str, list[str]]:
    """Options of `ddpjob run` by the data that they train on, for what this machine has."""
    found = {"digits": ["--set", "args=[train, --data, digits, --epochs, 2]"]}
    mnist = Path(os.environ.get("DDPJOB_MNIST_DIR") or ROOT.parent / "shared" / "mnist")
    if mnist.is_dir():
        found["MNIST"] = ["--data-dir", str(mnist)]
    return found


def start(options: list[str]) -> Start:
    """Run the example until its first step is done, then stop it."""
    with tempfile.TemporaryDirectory(prefix="ddpjob-first-step-") as folder:
        command = [sys.executable, "-m", "ddpjob.cli.main", "run", str(EXAMPLE), "-o", "json", "--state-dir", folder]
        begin = time.time()
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        try:
            shown = running = 0.0
            for event in _events(process, begin + SECONDS):
                seconds = datetime.fromisoformat(event["time"]).timestamp() - begin
                shown = shown or seconds
                if event.get("state") == "Running":
                    running = running or seconds
                if event.get("step", 0) >= 1:
                    break
            process.terminate()  # the trainer writes down its rows, saves and leaves
            process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.wait()
        return Start(shown, running, _first_step(Path(folder)) - begin)


def _events(process: subprocess.Popen[str], deadline: float) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["type"] == "status":
            yield event
        if event["type"] == "result" and event["exitCode"] != 0:
            raise SystemExit(f"the run ended before its first step: {event}")
        if time.time() > deadline:
            raise SystemExit(f"no step within {SECONDS:g} s")


def _first_step(folder: Path) -> float:
    for path in folder.glob("volumes/*/*/metrics.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if times := [row["time"] for row in rows if row["event"] == "train"]:
            return float(times[0])
    raise SystemExit("the run ended before its first step; what it said stands above")


def measure(repetitions: int) -> tuple[dict[str, dict[str, list[Start]]], int, int]:
    """Starts by data and temperature; bytes that were dropped each time, and the most that stayed."""
    found: dict[str, dict[str, list[Start]]] = {}
    dropped = stayed = 0
    for name, options in datasets().items():
        starts: dict[str, list[Start]] = {"cold": [], "warm": []}
        for number in range(repetitions):
            dropped = drop(Path(sys.prefix))
            stayed = max(stayed, resident(Path(sys.prefix)))
            starts["cold"].append(start(options))
            starts["warm"].append(start(options))
            print(f"{name}: {number + 1} of {repetitions} repetitions", file=sys.stderr, flush=True)
        found[name] = starts
    return found, dropped, stayed


def table(measured: Mapping[str, Mapping[str, list[Start]]], foot: str) -> str:
    """The result as a Markdown table."""
    lines = [
        "| data | page cache | `ddpjob run` → first training step | fastest | slowest | job shown | all pods run |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, by_cache in measured.items():
        for cache, starts in by_cache.items():
            steps = [one.first_step for one in starts]
            shown, running = (statistics.median(getattr(one, key) for one in starts) for key in ("shown", "running"))
            lines.append(
                f"| {name} | {cache} | **{statistics.median(steps):.1f} s** | {min(steps):.1f} s | {max(steps):.1f} s "
                f"| {shown:.2f} s | {running:.2f} s |"
            )
    return "\n".join([*lines, "", foot])


def main() -> int:
    """Exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.local_first_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/benchmarks.md")
    options = parser.parse_args()
    machine = describe_machine(kubernetes=False)
    measured, dropped, stayed = measure(options.repetitions)
    foot = (
        f"Medians of {options.repetitions} repetitions, cold and warm in turns. Cold: {dropped / 1e6:,.0f} MB of the "
        f"virtual environment dropped from the page cache before each; at most {stayed / 1e6:,.0f} MB of it stayed. "
        f"Measured on {machine}."
    )
    result = {
        "benchmark": "local_first_step",
        "machine": machine,
        "dropped_bytes": dropped,
        "stayed_bytes": stayed,
        "seconds": {
            name: {cache: [asdict(one) for one in starts] for cache, starts in by_cache.items()}
            for name, by_cache in measured.items()
        },
    }
    shown = table(measured, foot)
    print(json.dumps(result, indent=2) if options.json else shown)
    if options.write:
        write_section("local-first-step", shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
