"""The verb ``bench``: time to accuracy by seeds and numbers of ranks, and speed compared with plain loops.

Every figure is of a whole command, with reading the data and every evaluation. *Cold* is a new interpreter, run once
per number of ranks; *warm* is forked from a process that has imported torch, as a launcher forks its ranks, and run
once per seed. ``tables`` prints the results as docs/benchmarks.md contains them.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.data import mnist
from ddptrain.distributed.device import processor
from ddptrain.experiments import baselines
from ddptrain.experiments.trials import Trials, speed, verb
from ddptrain.files import dumps_json
from ddptrain.reporting.metrics import FILE_NAME, effective_rows
from ddptrain.resources import available_cpus, threads_per_rank

PARTS = ("accuracy", "throughput", "tutorial")
_TURNS = 3
_SHIFTS = (1, 0)  # pixels: the default, and no augmentation
_TARGET = 0.992  # for the mean accuracy over the seeds
_LOOP_STEPS = 120  # of the DataLoader loop
_TUTORIAL_TARGET = 0.98
_TUTORIAL_EPOCHS = 12  # at most


@dataclass(frozen=True)
class Plan:
    """What is measured; ``batch`` is the global batch of every part except the tutorial."""

    data: str = "mnist"
    data_dir: str = ""
    seeds: int = 5
    worlds: tuple[int, ...] = (1, 2)
    parts: tuple[str, ...] = PARTS
    batch: int = 256


@dataclass
class Bench:
    """Measures the parts one after the other."""

    plan: Plan
    trials: Trials
    folder: Path

    def run(self) -> dict[str, Any]:
        """Return all figures as a JSON-able dict."""
        machine = {"cpus": available_cpus(), "processor": processor(), "loadBefore": os.getloadavg()[0]}
        parts = {"accuracy": self._accuracy, "throughput": self._throughput, "tutorial": self._tutorial}
        measured = {part: parts[part]() for part in self.plan.parts}
        machine["loadAfter"] = os.getloadavg()[0]
        return {"of": {"data": self.plan.data, "globalBatch": self.plan.batch}, "machine": machine, **measured}

    def _accuracy(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for world in self.plan.worlds:
            runs = [self._timed(f"accuracy-{world}-{seed}", world, "--seed", seed) for seed in range(self.plan.seeds)]
            accuracies = [run["accuracy"] for run in runs]
            rows.append(
                {
                    "worldSize": world,
                    "seeds": self.plan.seeds,
                    "mean": statistics.fmean(accuracies),
                    "worst": min(accuracies),
                    "best": max(accuracies),
                    "reached": statistics.fmean(accuracies) >= _TARGET,
                    "warmSeconds": _summary([run["seconds"] for run in runs]),
                    "cpuSeconds": _summary([run["cpuSeconds"] for run in runs]),
                    "coldSeconds": self._cold(world),
                    "samplesPerSecond": statistics.median(run["speed"] for run in runs),
                }
            )
        for row in rows:
            row["samplesPerSecondPerRank"] = row["samplesPerSecond"] / row["worldSize"]
            row["scaling"] = row["samplesPerSecond"] / rows[0]["samplesPerSecond"]
        return rows

    def _throughput(self) -> list[dict[str, Any]]:
        rows = []
        threads = threads_per_rank(1)
        for model in ("cnn", "mlp"):
            loop = functools.partial(
                baselines.dataloader_loop, model=model, batch=self.plan.batch, steps=_LOOP_STEPS, threads=threads
            )
            # Alternately, and the best of each, because other work on a shared machine slows one or the other.
            ours, theirs = dict.fromkeys(_SHIFTS, 0.0), dict.fromkeys(_SHIFTS, 0.0)
            for turn, shift in itertools.product(range(_TURNS), _SHIFTS):
                flags = ("--model", model, "--threads", threads, "--epochs", 1, "--shift", shift)
                name = f"{model}-shift-{shift}-{turn}"
                ours[shift] = max(ours[shift], self._timed(f"throughput-{name}", 1, *flags)["speed"])
                timed = self._call(f"loop-{name}", functools.partial(loop, shift=shift))
                theirs[shift] = max(theirs[shift], timed["samplesPerSecond"])
            rows += [
                {
                    "model": model,
                    "shift": shift,
                    "samplesPerSecond": ours[shift],
                    "dataLoaderLoop": theirs[shift],
                    "times": ours[shift] / theirs[shift],
                }
                for shift in _SHIFTS
            ]
        return rows

    def _tutorial(self) -> dict[str, Any]:
        threads = threads_per_rank(1)
        # The target needs one epoch; a schedule depends on its length, so half of a longer run would not be the same.
        ours = self._timed("tutorial-ours", 1, "--epochs", 1, "--threads", threads)
        theirs = self._call(
            "tutorial-theirs",
            lambda data: baselines.tutorial(
                data, target=_TUTORIAL_TARGET, most_epochs=_TUTORIAL_EPOCHS, threads=threads
            ),
        )
        times = theirs["seconds"] / ours["seconds"]
        return {"target": _TUTORIAL_TARGET, "ours": ours, "theirs": theirs, "times": times}

    def _timed(self, name: str, world: int, *flags: object) -> dict[str, float]:
        """Return elapsed and CPU seconds of a warm command, its accuracy, and the samples per second over all ranks."""
        command = [*self._command(world), *flags, "--checkpoint-dir", self.folder / name / "checkpoints"]
        cost = self.trials.run(command, self.folder / name)
        path = self.folder / name / "checkpoints" / FILE_NAME
        accuracy = effective_rows(path, "eval")[-1]["accuracy"]
        _log(f"{name}: {accuracy:.2%} in {cost.seconds:.1f} s")
        return {
            "seconds": cost.seconds,
            "cpuSeconds": cost.cpu_seconds,
            "accuracy": accuracy,
            "speed": speed(path, self.plan.batch),
        }

    def _cold(self, world: int) -> float:
        """Return the elapsed seconds of the same command in a new interpreter."""
        _log(f"running cold-{world} …")
        return self.trials.run_cold([*self._command(world), "--checkpoint-dir", self.folder / f"cold-{world}"])

    def _command(self, world: int) -> list[object]:
        data = ["--data", self.plan.data]
        data += ["--data-dir", self.plan.data_dir] if self.plan.data_dir else []
        return [*verb(world), *data, "--batch-size", self.plan.batch, "--checkpoint-every", 0]

    def _call(self, name: str, work: Callable[[mnist.Dataset], dict[str, Any]]) -> dict[str, Any]:
        _log(f"running {name} …")
        return self.trials.call(lambda: work(mnist.load(self.plan.data, self.plan.data_dir)), name)


def bench(plan: Plan, main: Callable[[Sequence[str]], int], *, as_json: bool = False) -> int:
    """Measure every part of the plan and print tables, or one JSON object. Returns 0.

    Args:
        main: runs one command line of ddptrain.
    """
    with tempfile.TemporaryDirectory(prefix="ddptrain-bench-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        results = Bench(plan, Trials(folder, main), folder).run()
    print(dumps_json(results) if as_json else tables(results))
    return 0


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "fastest": min(values), "slowest": max(values)}


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tables(results: dict[str, Any]) -> str:
    """Return the measured parts as Markdown tables, and a line about the machine."""
    lines = []
    if "accuracy" in results:
        lines += [
            "| ranks | seeds | accuracy: mean (worst) | warm: median (slowest) | CPU time | cold (one run) "
            "| samples/s per rank | scaling |",
            "|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for r in results["accuracy"]:
            warm = r["warmSeconds"]
            lines.append(
                f"| {r['worldSize']} | {r['seeds']} | {r['mean']:.2%} ({r['worst']:.2%}) "
                f"| {warm['median']:.1f} s ({warm['slowest']:.1f} s) "
                f"| {r['cpuSeconds']['median']:.1f} s | {r['coldSeconds']:.1f} s "
                f"| {r['samplesPerSecondPerRank']:,.0f} | {r['scaling']:.2f} |"
            )
        lines.append("")
    if "throughput" in results:
        lines += [
            "| model | augmentation | samples/s | DataLoader loop | times |",
            "|---|---|---:|---:|---:|",
        ]
        lines += [
            f"| {r['model']} | {'±' + str(r['shift']) + ' pixel' if r['shift'] else 'none'} "
            f"| {r['samplesPerSecond']:,.0f} | {r['dataLoaderLoop']:,.0f} | **{r['times']:.1f}** |"
            for r in results["throughput"]
        ]
        lines.append("")
    if "tutorial" in results:
        r = results["tutorial"]
        reached = f"{r['theirs']['seconds']:.1f} s, {r['theirs']['epochs']} epochs"
        lines += [
            f"| to {r['target']:.0%} | ours | tutorial-style | times |",
            "|---|---:|---:|---:|",
            f"| seconds | {r['ours']['seconds']:.1f} s, 1 epoch ({r['ours']['accuracy']:.2%}) "
            f"| {reached if r['theirs']['reached'] else 'not within ' + reached} | {r['times']:.1f} |",
            "",
        ]
    machine = results["machine"]
    load = f"load {machine['loadBefore']:.1f} before, {machine['loadAfter']:.1f} after"
    return "\n".join([*lines, f"{machine['cpus']:g} CPUs ({machine['processor']}), {load}."])
