"""Compare ddprun with torchrun for a plain script: the time until its first training step, and the time of a step.

    python -m tests.benchmarks.script_start            # table on standard output
    python -m tests.benchmarks.script_start --write    # and into docs/benchmarks.md

The script is manifests/examples/train_plain.py with one and with two ranks, unchanged under both launchers. A
hook of torch records the time after each step of rank 0's optimizer. The time until the first step begins before the
launcher's process starts: it includes Python's start, the imports, the rendezvous and the data. A step is the median of
the times between two steps of a run, so saves, which are rare, do not count. Runs with 500 samples in a step show the
ratio for a longer step. CPU time is the time of launcher and ranks for the whole run of quick steps. Runs of the two
launchers alternate, and a ratio is the median of the ratios of neighbours: what else runs on the machine slows both.
Each rank computes on one thread: several threads wait for each other's cores.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from ddprun.distributed.topology import free_port
from tests.benchmarks.report import describe_machine, write_section

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "manifests" / "examples" / "train_plain.py"
LAUNCHERS = ("torchrun", "ddprun")
RANKS = (1, 2)
REPETITIONS = 7
QUICK = ("--epochs", "20")
LONGER = ("--epochs", "60", "--batch-size", "500")
_SECONDS = 600
_RECORDER = """
import json, os, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook

times = []
register_optimizer_step_post_hook(lambda *_: times.append(time.time()))
recorded, sys.argv = sys.argv[1], sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
if os.environ["RANK"] == "0":
    with open(recorded, "w") as file:
        json.dump(times, file)
"""


@dataclass(frozen=True)
class Timed:
    """One run, in seconds."""

    first_step: float
    """Since the launcher was started."""
    step: float
    """The median of the times between two steps."""
    longer_step: float
    """The same in a run of its own with more samples in a step."""
    cpu: float
    """Of the launcher and its ranks, for the whole run of quick steps."""


Pairs = list[dict[str, Timed]]
MEASURES: tuple[tuple[str, Callable[[Timed], float], str], ...] = (
    ("until the first step", lambda timed: timed.first_step, "s"),
    ("a step", lambda timed: timed.step, "ms"),
    ("a step of 500 samples", lambda timed: timed.longer_step, "ms"),
    ("CPU time", lambda timed: timed.cpu, "s"),
)


def run(launcher: str, ranks: int) -> Timed:
    """Train with the launcher and return the times of rank 0."""
    begin, used = time.time(), _cpu_of_children()
    times = _train(launcher, ranks, *QUICK)
    cpu = _cpu_of_children() - used
    return Timed(times[0] - begin, _median_step(times), _median_step(_train(launcher, ranks, *LONGER)), cpu)


def _train(launcher: str, ranks: int, *arguments: str) -> list[float]:
    """Return the time after each step of rank 0."""
    with tempfile.TemporaryDirectory(prefix="ddprun-script-start-") as folder:
        script, recorded = Path(folder, "recorder.py"), Path(folder, "times.json")
        script.write_text(_RECORDER)
        port = ["--master-port", str(free_port())] if launcher == "torchrun" else []
        command = [Path(sys.executable).parent / launcher, "--nproc-per-node", str(ranks), *port]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "DDPRUN_", "OMP_"))}
        done = subprocess.run(
            [*command, script, recorded, EXAMPLE, *arguments], cwd=folder, timeout=_SECONDS, check=False,
            env=env | {"DDPJOB_CHECKPOINT_DIR": folder, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{launcher} with {ranks} rank(s) failed:\n{done.stdout}{done.stderr}")
        return list(json.loads(recorded.read_text()))


def _median_step(times: list[float]) -> float:
    return statistics.median(after - before for before, after in pairwise(times))


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(repetitions: int) -> dict[int, Pairs]:
    """Return the pairs of runs by the number of ranks; the first launcher of a pair alternates."""
    found: dict[int, Pairs] = {ranks: [] for ranks in RANKS}
    for number in range(repetitions):
        for ranks in RANKS:
            order = LAUNCHERS if number % 2 else LAUNCHERS[::-1]
            found[ranks].append({launcher: run(launcher, ranks) for launcher in order})
    return found


def table(measured: dict[int, Pairs], foot: str) -> str:
    """Return the table of medians, with the ratio of ddprun to torchrun."""
    lines = [
        "| ranks | measure | torchrun | ddprun | ratio | least | greatest |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for ranks, pairs in measured.items():
        for name, of, unit in MEASURES:
            medians = {launcher: statistics.median(of(pair[launcher]) for pair in pairs) for launcher in LAUNCHERS}
            ratios = [of(pair["ddprun"]) / of(pair["torchrun"]) for pair in pairs]
            shown = [f"{medians[launcher] * (1000 if unit == 'ms' else 1):.2f} {unit}" for launcher in LAUNCHERS]
            ratio = f"**{statistics.median(ratios):.2f}**"
            lines.append(
                f"| {ranks} | {name} | {' | '.join(shown)} | {ratio} | {min(ratios):.2f} | {max(ratios):.2f} |"
            )
    return "\n".join([*lines, "", foot])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.script_start", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/benchmarks.md")
    options = parser.parse_args()
    machine = describe_machine(kubernetes=False)
    measured = measure(options.repetitions)
    shown = table(measured, f"Medians of {options.repetitions} pairs of runs, alternating. Measured on {machine}.")
    result = {
        "benchmark": "script_start",
        "machine": machine,
        "pairs": {
            ranks: [{name: asdict(timed) for name, timed in pair.items()} for pair in pairs]
            for ranks, pairs in measured.items()
        },
    }
    print(json.dumps(result, indent=2) if options.json else shown)
    if options.write:
        write_section("script-start", shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
