"""Compare ddprun with torchrun for a plain script: the time until its first training step, and the cost of a step.

    python -m tests.benchmarks.script_start            # table on standard output
    python -m tests.benchmarks.script_start --write    # and into docs/benchmarks.md

The script is manifests/examples/train_plain.py with one and with two ranks, unchanged under both launchers. A
hook of torch records the times after each step of rank 0's optimizer. The time until the first step begins before the
launcher's process starts: it includes Python's start, the imports, the rendezvous and the data. CPU time is the time of
launcher and ranks for a whole run. Runs of the two launchers alternate, and a ratio is the median of the ratios of
neighbours: what else runs on the machine slows both.

Neighbours are too far apart for a step of 2 ms: on a virtual machine two runs of one launcher differ by a third. For
it, both launchers train at once on one CPU, whose scheduler gives each a few milliseconds in turn, and a step is the
CPU time of rank 0's main thread per step while both train. Each has a session of its own, because the kernel's
autogroups share a CPU by sessions. The other launcher's code evicts the code of a step from the caches, so a step costs
more here than alone. Each rank computes on one thread.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ddprun.distributed.topology import free_port
from tests.benchmarks.report import describe_machine, write_section

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "manifests" / "examples" / "train_plain.py"
LAUNCHERS = ("torchrun", "ddprun")
RANKS = (1, 2)
REPETITIONS = 7
SHORT = ("--epochs", "20")
TOGETHER = ("--epochs", "80")
_FIRST_STEPS = 20
"""Steps of a run before those that are compared."""
_SECONDS = 600
_RECORDER = """
import json, os, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook

times = []
register_optimizer_step_post_hook(lambda *_: times.append((time.time(), time.thread_time())))
recorded, sys.argv = sys.argv[1], sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
if os.environ["RANK"] == "0":
    with open(recorded, "w") as file:
        json.dump(times, file)
"""


Times = list[tuple[float, float]]
"""After each step: the time, and the CPU time of the thread."""


@dataclass(frozen=True)
class Timed:
    """One run, in seconds."""

    first_step: float
    """Since the launcher was started."""
    cpu: float
    """Of the launcher and its ranks, for the whole run."""
    step: float
    """CPU time of a step beside the other launcher."""


Pairs = list[dict[str, Timed]]
MEASURES: tuple[tuple[str, Callable[[Timed], float], str], ...] = (
    ("until the first step", lambda timed: timed.first_step, "s"),
    ("CPU time of a run", lambda timed: timed.cpu, "s"),
    ("CPU time of a step", lambda timed: timed.step, "ms"),
)


def run_pair(ranks: int, order: Sequence[str], cpu: int) -> dict[str, Timed]:
    """Train with each launcher alone, then with both at once on one CPU."""
    alone = {launcher: _train_alone(launcher, ranks) for launcher in order}
    steps = _steps_together(ranks, order, cpu)
    return {launcher: Timed(*alone[launcher], steps[launcher]) for launcher in order}


def _train_alone(launcher: str, ranks: int) -> tuple[float, float]:
    """Return the seconds until the first step, and the CPU time."""
    with tempfile.TemporaryDirectory(prefix="ddprun-script-start-") as folder:
        began, used = time.time(), _cpu_of_children()
        times = finish(start(launcher, ranks, Path(folder), SHORT), Path(folder))
        return times[0][0] - began, _cpu_of_children() - used


def _steps_together(ranks: int, order: Sequence[str], cpu: int) -> dict[str, float]:
    """Return the CPU time of a step by launcher, in the seconds in which all of them train."""
    with tempfile.TemporaryDirectory(prefix="ddprun-script-start-") as folder:
        folders = {launcher: Path(folder, launcher) for launcher in order}
        for each in folders.values():
            each.mkdir()
        processes = {launcher: start(launcher, ranks, folders[launcher], TOGETHER, cpu) for launcher in order}
        times = {launcher: finish(process, folders[launcher]) for launcher, process in processes.items()}
    begin = max(of[_FIRST_STEPS][0] for of in times.values())
    end = min(of[-1][0] for of in times.values())
    return {launcher: _cpu_of_a_step([cpu for at, cpu in of if begin <= at <= end]) for launcher, of in times.items()}


def _cpu_of_a_step(readings: list[float]) -> float:
    if len(readings) < 2:
        raise SystemExit("the two launchers did not train at the same time; run it again on a machine with less load")
    return (readings[-1] - readings[0]) / (len(readings) - 1)


def start(
    launcher: str, ranks: int, folder: Path, arguments: Sequence[str], cpu: int | None = None
) -> subprocess.Popen[str]:
    """Start the example in ``folder``; ``finish`` waits for its end. cpu: the only CPU that it may use."""
    script = folder / "recorder.py"
    script.write_text(_RECORDER)
    port = ["--master-port", str(free_port())] if launcher == "torchrun" else []
    command = [Path(sys.executable).parent / launcher, "--nproc-per-node", str(ranks), *port]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "DDPRUN_", "OMP_"))}
    pinned = ["taskset", "--cpu-list", str(cpu)] if cpu is not None else []
    return subprocess.Popen(
        [*pinned, *command, script, folder / "times.json", EXAMPLE, *arguments], cwd=folder, start_new_session=True,
        env=env | {"DDPJOB_CHECKPOINT_DIR": str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], folder: Path) -> Times:
    """Wait for a run, and return the times of rank 0."""
    try:
        output, _ = process.communicate(timeout=_SECONDS)
    finally:
        process.kill()
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, process.args))} failed:\n{output}")  # type: ignore[arg-type]
    return [(at, cpu) for at, cpu in json.loads((folder / "times.json").read_text())]


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(repetitions: int, numbers: Sequence[int]) -> dict[int, Pairs]:
    """Return the pairs of runs by the number of ranks; the first launcher of a pair alternates."""
    found: dict[int, Pairs] = {ranks: [] for ranks in numbers}
    cpus = sorted(os.sched_getaffinity(0))
    for number in range(repetitions):
        for ranks in numbers:
            order = LAUNCHERS if number % 2 else LAUNCHERS[::-1]
            found[ranks].append(run_pair(ranks, order, cpus[number // 2 % len(cpus)]))
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
            ratio = f"**{statistics.median(ratios):.3f}**"
            lines.append(
                f"| {ranks} | {name} | {' | '.join(shown)} | {ratio} | {min(ratios):.3f} | {max(ratios):.3f} |"
            )
    return "\n".join([*lines, "", foot])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.script_start", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/benchmarks.md")
    options = parser.parse_args()
    machine = describe_machine(kubernetes=False)
    measured = measure(options.repetitions, options.ranks)
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
