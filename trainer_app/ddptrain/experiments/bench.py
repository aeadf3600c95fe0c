"""The verb ``bench``: time to accuracy by seeds and numbers of ranks, recipes, and speed compared with plain loops.

Every figure is of a whole command, with reading the data and every evaluation. *Cold* is a new interpreter, run once
per number of ranks; *warm* is forked from a process that has imported torch, as a launcher forks its ranks, and run
once per seed. ``tables`` prints the results as docs/benchmarks.md contains them.

The loops to compare with, in ``baselines``, use the same data with the same number of threads. They are faster than in
practice, because they neither decode with PIL nor start worker processes.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddptrain.config import Config
from ddptrain.data.mnist import Dataset, load
from ddptrain.distributed.device import processor
from ddptrain.experiments import baselines
from ddptrain.experiments.trials import Trials, data_flags, speed, verb
from ddptrain.files import dumps_json
from ddptrain.reporting.metrics import effective_rows
from ddptrain.resources import available_cpus, threads_per_rank

PARTS = ("recipes", "accuracy", "sync", "throughput", "tutorial")
SYNC = ("manual", "bucketed", "ddp")  # the first is what the others are compared with
_TURNS = 3
_SHIFTS = (1, 0)  # pixels: the default, and no augmentation
_TARGET = 0.99  # for the mean accuracy over the seeds
_PLAIN = ("--optimizer", "adamw", "--label-smoothing", 0, "--bf16", "off")  # as the DataLoader loop
_LOOP_STEPS = 120  # of the DataLoader loop
_TUTORIAL_TARGET = 0.98
_TUTORIAL_EPOCHS = 12  # at most
_FIRST_SEED = 1000  # of the part recipes; no setting was chosen by the results of these seeds
_FEWER = 3  # runs of everything in the part recipes whose accuracy is not a claim, and of each cold command
_RECIPES: dict[str, tuple[object, ...]] = {
    "default": (),
    "two epochs": ("--epochs", 2),
    "earlier": (
        "--model", "cnn", "--optimizer", "adamw", "--epochs", 2, "--label-smoothing", 0,
        "--bf16", "off", "--sync", "ddp",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class BenchOptions:
    """What is measured; ``config`` gives the data, and the global batch of every part except the tutorial."""

    config: Config
    seeds: int
    worlds: tuple[int, ...]
    parts: tuple[str, ...]
    sync: tuple[str, ...] = SYNC


@dataclass
class Bench:
    """Measures the parts one after the other."""

    options: BenchOptions
    trials: Trials

    def run(self) -> dict[str, Any]:
        """Return all figures as a JSON-able dict."""
        machine = {"cpus": available_cpus(), "processor": processor(), "loadBefore": os.getloadavg()[0]}
        parts = {
            "recipes": self._recipes,
            "accuracy": self._accuracy,
            "sync": self._sync,
            "throughput": self._throughput,
            "tutorial": self._tutorial,
        }
        measured = {part: parts[part]() for part in self.options.parts}
        machine["loadAfter"] = os.getloadavg()[0]
        of = {"data": self.options.config.data, "globalBatch": self.options.config.global_batch}
        return {"of": of, "machine": machine, **measured}

    def _recipes(self) -> list[dict[str, Any]]:
        """Compare the default recipe with others and with pytorch/examples; the recipes alternate in every turn."""
        rows: list[dict[str, Any]] = []
        recipes = dict(_RECIPES)
        if self.options.config.data != "digits":  # their batch has always been 32
            recipes["earlier"] = (*recipes["earlier"], "--batch-size", 256)
        for world in self.options.worlds:
            warm: dict[str, list[dict[str, float]]] = {recipe: [] for recipe in _RECIPES}
            cold: dict[str, list[float]] = {recipe: [] for recipe in _RECIPES}
            for turn in range(self.options.seeds):
                for recipe, flags in recipes.items():
                    if recipe == "default" or turn < _FEWER:
                        given = (*flags, "--seed", _FIRST_SEED + turn)
                        name = f"{recipe.replace(' ', '-')}-{world}-{turn}"
                        warm[recipe].append(self._timed(name, world, *given))
                        if turn < _FEWER:
                            cold[recipe].append(self._cold(name, world, *given))
            rows += [_recipe_row(recipe, world, warm[recipe], cold[recipe]) for recipe in _RECIPES]
            earlier = rows[-1]
            for row in rows[-len(_RECIPES) :]:
                row["warmShare"] = row["warmSeconds"]["median"] / earlier["warmSeconds"]["median"]
                row["coldShare"] = row["coldSeconds"]["median"] / earlier["coldSeconds"]["median"]
        return [*rows, self._example()]

    def _example(self) -> dict[str, Any]:
        """Return the cost of one epoch of pytorch/examples, in a new interpreter."""
        config, threads = self.options.config, threads_per_rank(1)
        _log("running pytorch/examples …")
        seconds, output = self.trials.run_module_cold(
            "ddptrain.experiments.baselines", [config.data, config.data_dir, threads]
        )
        return {"recipe": "pytorch/examples", "coldSeconds": seconds, **json.loads(output.splitlines()[-1])}

    def _accuracy(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for world in self.options.worlds:
            names = [f"accuracy-{world}-{seed}" for seed in range(self.options.seeds)]
            runs = [self._timed(name, world, "--seed", seed) for seed, name in enumerate(names)]
            accuracies = [run["accuracy"] for run in runs]
            rows.append(
                {
                    "worldSize": world,
                    "seeds": self.options.seeds,
                    "mean": statistics.fmean(accuracies),
                    "worst": min(accuracies),
                    "best": max(accuracies),
                    "reached": statistics.fmean(accuracies) >= _TARGET,
                    "warmSeconds": _summary([run["seconds"] for run in runs]),
                    "cpuSeconds": _summary([run["cpuSeconds"] for run in runs]),
                    "coldSeconds": self._cold(str(world), world),
                    "samplesPerSecond": statistics.median(map(self._speed, names)),
                }
            )
        for row in rows:
            row["samplesPerSecondPerRank"] = row["samplesPerSecond"] / row["worldSize"]
            row["scaling"] = row["samplesPerSecond"] / rows[0]["samplesPerSecond"]
        return rows

    def _sync(self) -> list[dict[str, Any]]:
        """Compare the ways to average gradients, which alternate in every turn. One rank has nothing to average."""
        rows: list[dict[str, Any]] = []
        for world in [world for world in self.options.worlds if world > 1] or self.options.worlds:
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in self.options.sync}
            measured: dict[str, list[float]] = {way: [] for way in self.options.sync}
            for seed, way in itertools.product(range(self.options.seeds), self.options.sync):
                name = f"sync-{way}-{world}-{seed}"
                runs[way].append(self._timed(name, world, "--sync", way, "--seed", seed))
                measured[way].append(self._speed(name))
            speeds = {way: statistics.median(of_way) for way, of_way in measured.items()}
            rows += [
                {
                    "sync": way,
                    "worldSize": world,
                    "seeds": self.options.seeds,
                    "mean": statistics.fmean(run["accuracy"] for run in runs[way]),
                    "warmSeconds": _summary([run["seconds"] for run in runs[way]]),
                    "samplesPerSecond": speeds[way],
                    "times": speeds[way] / speeds[self.options.sync[0]],
                }
                for way in self.options.sync
            ]
        return rows

    def _throughput(self) -> list[dict[str, Any]]:
        rows = []
        threads = threads_per_rank(1)
        for model in ("cnn", "mlp"):
            loop = functools.partial(
                baselines.dataloader_loop,
                model=model,
                batch=self.options.config.global_batch,
                steps=_LOOP_STEPS,
                threads=threads,
            )
            # Alternately, and the best of each, because other work on a shared machine slows one or the other.
            ours, theirs = dict.fromkeys(_SHIFTS, 0.0), dict.fromkeys(_SHIFTS, 0.0)
            for turn, shift in itertools.product(range(_TURNS), _SHIFTS):
                flags = ("--model", model, "--threads", threads, "--shift", shift, *_PLAIN)
                name = f"throughput-{model}-shift-{shift}-{turn}"
                self._timed(name, 1, *flags)
                ours[shift] = max(ours[shift], self._speed(name))
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
        """Return elapsed and CPU seconds of a warm command, and its accuracy."""
        folder = self.trials.folder / name
        cost = self.trials.run([*self._command(world), *flags, "--checkpoint-dir", folder / "checkpoints"], folder)
        accuracy = effective_rows(folder / "checkpoints", "eval")[-1]["accuracy"]
        _log(f"{name}: {accuracy:.2%} in {cost.seconds:.1f} s")
        return {
            "seconds": cost.seconds,
            "cpuSeconds": cost.cpu_seconds,
            "accuracy": accuracy,
        }

    def _speed(self, name: str) -> float:
        """Return the samples per second, over all ranks, of a timed command with the global batch of the plan."""
        return speed(self.trials.folder / name / "checkpoints", self.options.config.global_batch)

    def _cold(self, name: str, world: int, *flags: object) -> float:
        """Return the elapsed seconds of the same command in a new interpreter."""
        _log(f"running cold-{name} …")
        folder = self.trials.folder / f"cold-{name}"
        return self.trials.run_cold([*self._command(world), *flags, "--checkpoint-dir", folder])

    def _command(self, world: int) -> list[object]:
        config = self.options.config
        flags = [*data_flags(config), "--device", config.device, "--batch-size", config.global_batch]
        return [*verb(world), *flags, "--checkpoint-every", 0]

    def _call(self, name: str, work: Callable[[Dataset], dict[str, Any]]) -> dict[str, Any]:
        _log(f"running {name} …")
        return self.trials.call(lambda: work(load(self.options.config.data, self.options.config.data_dir)), name)


def bench(options: BenchOptions, main: Callable[[Sequence[str]], int], *, as_json: bool = False) -> int:
    """Measure every part of the plan and print tables, or one JSON object. Returns 0.

    Args:
        main: runs one command line of ddptrain.
    """
    with tempfile.TemporaryDirectory(prefix="ddptrain-bench-", ignore_cleanup_errors=True) as temporary:
        results = Bench(options, Trials(Path(temporary), main)).run()
    print(dumps_json(results) if as_json else tables(results))
    return 0


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "fastest": min(values), "slowest": max(values)}


def _recipe_row(recipe: str, world: int, warm: list[dict[str, float]], cold: list[float]) -> dict[str, Any]:
    accuracies = [run["accuracy"] for run in warm]
    return {
        "recipe": recipe, "worldSize": world, "seeds": len(warm), "mean": statistics.fmean(accuracies),
        "worst": min(accuracies), "warmSeconds": _summary([run["seconds"] for run in warm]),
        "cpuSeconds": _summary([run["cpuSeconds"] for run in warm]), "coldSeconds": _summary(cold),
    }  # fmt: skip


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tables(results: dict[str, Any]) -> str:
    """Return the measured parts as Markdown tables, and a line about the machine."""
    lines = _recipe_table(results["recipes"]) if "recipes" in results else []
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
    if "sync" in results:
        lines += [
            "| sync | ranks | seeds | mean accuracy | warm: median (slowest) | samples/s | times |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {r['sync']} | {r['worldSize']} | {r['seeds']} | {r['mean']:.2%} "
            f"| {r['warmSeconds']['median']:.1f} s ({r['warmSeconds']['slowest']:.1f} s) "
            f"| {r['samplesPerSecond']:,.0f} | {r['times']:.2f} |"
            for r in results["sync"]
        ]
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


def _recipe_table(rows: list[dict[str, Any]]) -> list[str]:
    *recipes, example = rows
    lines = [
        "| recipe | ranks | seeds | accuracy: mean (worst) | warm: median (slowest) | of the earlier | CPU time "
        "| cold: median (slowest) | of the earlier |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in recipes:
        warm, cold = r["warmSeconds"], r["coldSeconds"]
        lines.append(
            f"| {r['recipe']} | {r['worldSize']} | {r['seeds']} | {r['mean']:.2%} ({r['worst']:.2%}) "
            f"| {warm['median']:.1f} s ({warm['slowest']:.1f} s) | {r['warmShare']:.2f} "
            f"| {r['cpuSeconds']['median']:.1f} s "
            f"| {cold['median']:.1f} s ({cold['slowest']:.1f} s) | {r['coldShare']:.2f} |"
        )
    shown = f"{example['accuracy']:.2%} | | | | {example['coldSeconds']:.1f} s"
    return [*lines, f"| {example['recipe']}, one epoch | 1 | 1 | {shown} | |", ""]
