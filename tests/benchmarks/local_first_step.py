"""Measure the time from `ddpjob run` to the end of the first training step on this machine, without a cluster.

    python -m tests.benchmarks.local_first_step            # table on standard output
    python -m tests.benchmarks.local_first_step --write    # and into docs/develop/benchmarks.md

It runs manifests/examples/mnist-cpu.yaml, two nodes of two processes, on scikit-learn's digits and, if
DDPJOB_MNIST_DIR or ../shared/mnist has it, on MNIST. The time starts before the process starts and ends at the time in
the trainer's row of step 1. It includes Python's start, the control plane, four imports of torch, the rendezvous and
the data.

Cold: before the run, the pages of all files of this virtual environment are dropped from the page cache
(posix_fadvise, POSIX_FADV_DONTNEED). The table shows how much stayed because other programs have it mapped. Warm: right
after another run. Cold and warm runs alternate. Every run has its own state folder. Below the table is the CPU time of
`ddpjob --help`, which imports nothing that only a run needs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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
    """One run, in seconds since the command was started."""

    shown: float
    """When the command line first showed the job."""
    running: float
    """When all pods ran."""
    first_step: float


def datasets() -> dict[str, list[str]]:
    """Return the options of `ddpjob run` for each dataset that this machine has."""
    found = {"digits": ["--set", "args=[train, --data, digits, --epochs, 2]"]}
    mnist = Path(os.environ.get("DDPJOB_MNIST_DIR") or ROOT.parent / "shared" / "mnist")
    if mnist.is_dir():
        found["MNIST"] = ["--", "--data-dir", str(mnist)]
    return found


def start(options: list[str]) -> Start:
    """Run the example until its first step is done, stop it, and return its times."""
    with tempfile.TemporaryDirectory(prefix="ddpjob-first-step-") as folder:
        command = [sys.executable, "-m", "ddpjob.cli.main", "run", str(EXAMPLE), "-o", "json", "--state-dir", folder]
        begin = time.time()
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        try:
            shown = running = 0.0
            for event in _events(process, begin + SECONDS):
                seconds = datetime.fromisoformat(event["time"]).timestamp() - begin
                shown = shown or seconds
                if event["status"].get("state") == "Running":
                    running = running or seconds
                if ((event["status"].get("progress") or {}).get("step") or 0) >= 1:
                    break
            process.terminate()  # the trainer writes its rows, saves and exits
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
            raise SystemExit(f"timed out after {SECONDS:g} s waiting for the first step")


def _first_step(folder: Path) -> float:
    for path in folder.glob("volumes/*/*/metrics/run-*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if times := [row["time"] for row in rows if row["event"] == "train"]:
            return float(times[0])
    raise SystemExit("the run ended before its first step; its output is above")


def measure(repetitions: int) -> tuple[dict[str, dict[str, list[Start]]], int, int]:
    """Return the runs by data and cache state, the bytes dropped each time, and the largest number that stayed."""
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


def help_seconds(repetitions: int) -> float:
    """Return the least CPU time of `ddpjob --help`."""

    def once() -> float:
        before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        subprocess.run([sys.executable, "-m", "ddpjob.cli.main", "--help"], stdout=subprocess.DEVNULL, check=True)
        return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before

    return min(once() for _ in range(repetitions))


def table(measured: Mapping[str, Mapping[str, list[Start]]], foot: str) -> str:
    """Return the result as a Markdown table."""
    lines = [
        "| data | page cache | `ddpjob run` → first training step | fastest | slowest |",
        "|---|---|---:|---:|---:|",
    ]
    for name, by_cache in measured.items():
        for cache, starts in by_cache.items():
            steps = [one.first_step for one in starts]
            lines.append(
                f"| {name} | {cache} | **{statistics.median(steps):.1f} s** | {min(steps):.1f} s | {max(steps):.1f} s |"
            )
    return "\n".join([*lines, "", foot])


def main() -> int:
    """Measure, print the result, and return exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.local_first_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/develop/benchmarks.md")
    options = parser.parse_args()
    machine = describe_machine(kubernetes=False)
    measured, dropped, stayed = measure(options.repetitions)
    help_cpu = help_seconds(options.repetitions)
    foot = (
        f"Medians of {options.repetitions} repetitions, alternating. Cold: {dropped / 1e6:,.0f} MB of the "
        f"virtual environment dropped from the page cache before each; at most {stayed / 1e6:,.0f} MB of it stayed. "
        f"`ddpjob --help` takes {help_cpu:.2f} s of CPU time. Measured on {machine}."
    )
    result = {
        "benchmark": "local_first_step",
        "machine": machine,
        "dropped_bytes": dropped,
        "stayed_bytes": stayed,
        "help_cpu_seconds": help_cpu,
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
