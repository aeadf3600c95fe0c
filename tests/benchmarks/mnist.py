"""The trainer on MNIST: its recipe, and ways to average gradients.

    python -m tests.benchmarks.mnist --data-dir DIR               # tables on standard output; DIR has MNIST
    python -m tests.benchmarks.mnist --data digits --seeds 1      # a short try

Every figure is of a whole command, with reading the data and every evaluation. *Cold* is a new interpreter; *warm* is
forked from a process that has imported torch, as a launcher forks its ranks.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddprun.resources import threads_per_rank
from ddptrain.config import Config
from ddptrain.device import processor
from tests.benchmarks.report import describe_machine, table_of
from tests.ddptrain.builders import verb
from tests.ddptrain.runs import ForkServer, fork_server
from tests.metrics import effective_rows

SYNC = ("manual", "bucketed", "ddp")  # the first is what the others are compared with
_SECONDS = 3600  # for one command
_FIRST_SEED = 1000  # no setting was chosen by the results of these seeds
_COLD = 3  # runs of each cold command


@dataclass(frozen=True)
class Timed:
    """A command that has ended: elapsed seconds, CPU seconds, accuracy, and samples per second over all ranks."""

    seconds: float
    cpu: float
    accuracy: float
    speed: float


class Bench:
    """Measures on one data set, one command at a time, and returns Markdown tables."""

    def __init__(self, config: Config, seeds: int, worlds: Sequence[int], server: ForkServer, folder: Path) -> None:
        self._config, self._seeds, self._worlds = config, seeds, worlds
        self._server, self._folder, self._numbers = server, folder, itertools.count()

    def recipe(self) -> str:
        """Train with the default recipe."""
        rows = []
        for world in self._worlds:
            seeds = range(_FIRST_SEED, _FIRST_SEED + self._seeds)
            warm = [self._warm(world, "--seed", seed) for seed in seeds]
            cold = [self._cold(world, "--seed", seed) for seed in seeds[:_COLD]]
            accuracies = [run.accuracy for run in warm]
            mean = f"{statistics.fmean(accuracies):.2%} ({min(accuracies):.2%})"
            cpu = f"{_median([run.cpu for run in warm]):.1f} s"
            rows.append((f"{world}", f"{self._seeds}", mean, _times(_seconds(warm)), cpu, _times(cold)))
        heading = ("ranks", "seeds", "accuracy: mean (worst)", "warm: median (slowest)", "CPU time")
        return table_of((*heading, "cold: median (slowest)"), rows, names=0)

    def sync(self) -> str:
        """Compare the ways to average gradients, which alternate in every turn. One rank has nothing to average."""
        rows = []
        for world in [world for world in self._worlds if world > 1]:
            runs: dict[str, list[Timed]] = {way: [] for way in SYNC}
            for seed, way in itertools.product(range(self._seeds), SYNC):
                runs[way].append(self._warm(world, "--sync", way, "--seed", seed))
            first = _median([run.speed for run in runs[SYNC[0]]])
            for way in SYNC:
                speed = _median([run.speed for run in runs[way]])
                mean = statistics.fmean(run.accuracy for run in runs[way])
                numbers = (f"{mean:.2%}", _times(_seconds(runs[way])), f"{speed:,.0f}", f"{speed / first:.2f}")
                rows.append((way, f"{world}", f"{self._seeds}", *numbers))
        heading = ("sync", "ranks", "seeds", "mean accuracy", "warm: median (slowest)", "samples/s", "times")
        return table_of(heading, rows)

    def _warm(self, world: int, *flags: object) -> Timed:
        """Run a command in a fork of a process that has imported torch."""
        out, cpu, began = self._out(), _cpu_seconds(self._server.pid), time.perf_counter()
        self._server.run(*self._command(world, out), *flags, env={"OMP_NUM_THREADS": threads_per_rank(world)})
        seconds = time.perf_counter() - began
        accuracy = effective_rows(out, "eval")[-1]["accuracy"]
        speed = _median([row["samplesPerSecond"] for row in effective_rows(out, "train")])
        return Timed(seconds, _cpu_seconds(self._server.pid) - cpu, accuracy, speed)

    def _cold(self, world: int, *flags: object) -> float:
        """Return the elapsed seconds of the same command in a new interpreter, imports included."""
        command = map(str, (sys.executable, "-m", "ddptrain", *self._command(world, self._out()), *flags))
        began = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=_SECONDS, check=True)
        return time.perf_counter() - began

    def _command(self, world: int, out: Path) -> list[object]:
        data = ("--data", self._config.data, "--data-dir", self._config.data_dir)
        size = ("--batch-size", self._config.global_batch, "--threads", threads_per_rank(world))
        return [*verb(world), *data, *size, "--checkpoint-every", 0, "--checkpoint-dir", out]

    def _out(self) -> Path:
        return self._folder / str(next(self._numbers))


def _cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process's children that have ended (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def _seconds(runs: Sequence[Timed]) -> list[float]:
    return [run.seconds for run in runs]


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _times(seconds: Sequence[float]) -> str:
    return f"{_median(seconds):.1f} s ({max(seconds):.1f} s)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.mnist", description=__doc__)
    parser.add_argument("--data", default="mnist", help="mnist, digits or idx (default: mnist)")
    parser.add_argument("--data-dir", default="", help="directory of the four files")
    parser.add_argument("--seeds", type=int, default=10, help="runs of each command (default: 10)")
    parser.add_argument("--worlds", default="1,2", help="numbers of ranks (default: 1,2)")
    options = parser.parse_args()
    config, worlds = Config(data=options.data, data_dir=options.data_dir), [int(n) for n in options.worlds.split(",")]
    with tempfile.TemporaryDirectory(prefix="ddptrain-bench-") as folder, fork_server(Path(folder)) as server:
        bench = Bench(config, options.seeds, worlds, server, Path(folder) / "runs")
        print(bench.recipe(), bench.sync(), sep="\n\n", flush=True)
    print(f"{describe_machine(kubernetes=False)}, {processor()}.")


if __name__ == "__main__":
    main()
