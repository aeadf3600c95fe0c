"""The verb ``bench``: time to accuracy by seeds and numbers of ranks, recipes, and speed compared with plain loops.

Every figure is of a whole command, with reading the data and every evaluation. *Cold* is a new interpreter, run once
per number of ranks; *warm* is forked from a process that has imported torch, as a launcher forks its ranks, and run
once per seed. ``tables`` prints the results as docs/benchmarks.md contains them.

The loops to compare with, in ``baselines``, use the same data with the same number of threads. They are faster than in
practice, because they neither decode with PIL nor start worker processes.
"""

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

from ddprun.files import dumps_json
from ddprun.reporting.metrics import effective_rows
from ddprun.resources import available_cpus, threads_per_rank
from ddptrain.config import Config
from ddptrain.data.mnist import Dataset, load
from ddptrain.device import processor
from ddptrain.experiments import baselines
from ddptrain.experiments.trials import Trials, data_flags, speed, verb

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
        config, threads, recipes = self.options.config, threads_per_rank(1), dict(_RECIPES)
        if config.data != "digits":  # their batch has always been 32
            recipes["earlier"] = (*recipes["earlier"], "--batch-size", 256)
        for world in self.options.worlds:
            warm: dict[str, list[dict[str, float]]] = {recipe: [] for recipe in recipes}
            cold: dict[str, list[float]] = {recipe: [] for recipe in recipes}
            for turn, recipe in itertools.product(range(self.options.seeds), recipes):
                if recipe == "default" or turn < _FEWER:
                    given = (*recipes[recipe], "--seed", _FIRST_SEED + turn)
                    name = f"{recipe.replace(' ', '-')}-{world}-{turn}"
                    warm[recipe].append(self._timed(name, world, *given))
                    if turn < _FEWER:
                        cold[recipe].append(self._cold(name, world, *given))
            of_world = [
                _row(warm[recipe], recipe=recipe, worldSize=world) | {"coldSeconds": _summary(cold[recipe])}
                for recipe in recipes
            ]
            earlier = of_world[-1]
            for row in of_world:
                row["warmShare"] = row["warmSeconds"]["median"] / earlier["warmSeconds"]["median"]
                row["coldShare"] = row["coldSeconds"]["median"] / earlier["coldSeconds"]["median"]
            rows += of_world
        _log("running pytorch/examples …")
        example = [config.data, config.data_dir, threads]
        seconds, output = self.trials.run_cold("ddptrain.experiments.baselines", example)
        return [*rows, {"recipe": "pytorch/examples", "coldSeconds": seconds, **json.loads(output.splitlines()[-1])}]

    def _accuracy(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for world in self.options.worlds:
            names = [f"accuracy-{world}-{seed}" for seed in range(self.options.seeds)]
            row = _row([self._timed(name, world, "--seed", seed) for seed, name in enumerate(names)], worldSize=world)
            row |= {"reached": row["mean"] >= _TARGET, "coldSeconds": self._cold(str(world), world)}
            row["samplesPerSecond"] = statistics.median(map(self._speed, names))
            row["samplesPerSecondPerRank"] = row["samplesPerSecond"] / world
            rows.append(row)
            row["scaling"] = row["samplesPerSecond"] / rows[0]["samplesPerSecond"]
        return rows

    def _sync(self) -> list[dict[str, Any]]:
        """Compare the ways to average gradients, which alternate in every turn. One rank has nothing to average."""
        rows: list[dict[str, Any]] = []
        ways = self.options.sync
        for world in [world for world in self.options.worlds if world > 1] or self.options.worlds:
            runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            speeds: dict[str, list[float]] = {way: [] for way in ways}
            for seed, way in itertools.product(range(self.options.seeds), ways):
                name = f"sync-{way}-{world}-{seed}"
                runs[way].append(self._timed(name, world, "--sync", way, "--seed", seed))
                speeds[way].append(self._speed(name))
            first = statistics.median(speeds[ways[0]])
            for way in ways:
                speed = statistics.median(speeds[way])
                row = _row(runs[way], sync=way, worldSize=world)
                rows.append(row | {"samplesPerSecond": speed, "times": speed / first})
        return rows

    def _throughput(self) -> list[dict[str, Any]]:
        rows = []
        threads, batch = threads_per_rank(1), self.options.config.global_batch
        for model in ("cnn", "mlp"):
            loop = functools.partial(
                baselines.dataloader_loop, model=model, batch=batch, steps=_LOOP_STEPS, threads=threads
            )
            # Alternately, and the best of each, because other work on a shared machine slows one or the other.
            ours, theirs = dict.fromkeys(_SHIFTS, 0.0), dict.fromkeys(_SHIFTS, 0.0)
            for turn, shift in itertools.product(range(_TURNS), _SHIFTS):
                name = f"throughput-{model}-shift-{shift}-{turn}"
                self._timed(name, 1, "--model", model, "--threads", threads, "--shift", shift, *_PLAIN)
                ours[shift] = max(ours[shift], self._speed(name))
                timed = self._call(f"loop-{name}", functools.partial(loop, shift=shift))
                theirs[shift] = max(theirs[shift], timed["samplesPerSecond"])
            rows += [
                {"model": model, "shift": shift, "samplesPerSecond": ours[shift], "dataLoaderLoop": theirs[shift],
                 "times": ours[shift] / theirs[shift]}
                for shift in _SHIFTS
            ]  # fmt: skip
        return rows

    def _tutorial(self) -> dict[str, Any]:
        threads = threads_per_rank(1)
        # The target needs one epoch; a schedule depends on its length, so half of a longer run would not be the same.
        ours = self._timed("tutorial-ours", 1, "--epochs", 1, "--threads", threads)
        loop = functools.partial(
            baselines.tutorial, target=_TUTORIAL_TARGET, most_epochs=_TUTORIAL_EPOCHS, threads=threads
        )
        theirs = self._call("tutorial-theirs", loop)
        times = theirs["seconds"] / ours["seconds"]
        return {"target": _TUTORIAL_TARGET, "ours": ours, "theirs": theirs, "times": times}

    def _timed(self, name: str, world: int, *flags: object) -> dict[str, float]:
        """Return elapsed and CPU seconds of a warm command, and its accuracy."""
        folder = self.trials.folder / name
        seconds, cpu_seconds = self.trials.run(
            [*self._command(world), *flags, "--checkpoint-dir", folder / "checkpoints"], folder
        )
        accuracy = effective_rows(folder / "checkpoints", "eval")[-1]["accuracy"]
        _log(f"{name}: {accuracy:.2%} in {seconds:.1f} s")
        return {"seconds": seconds, "cpuSeconds": cpu_seconds, "accuracy": accuracy}

    def _speed(self, name: str) -> float:
        """Return the samples per second, over all ranks, of a timed command with the configured global batch."""
        return speed(self.trials.folder / name / "checkpoints", self.options.config.global_batch)

    def _cold(self, name: str, world: int, *flags: object) -> float:
        """Return the elapsed seconds of the same command in a new interpreter."""
        _log(f"running cold-{name} …")
        folder = self.trials.folder / f"cold-{name}"
        return self.trials.run_cold("ddptrain", [*self._command(world), *flags, "--checkpoint-dir", folder])[0]

    def _command(self, world: int) -> list[object]:
        config = self.options.config
        flags = [*data_flags(config), "--device", config.device, "--batch-size", config.global_batch]
        return [*verb(world), *flags, "--checkpoint-every", 0]

    def _call(self, name: str, work: Callable[[Dataset], dict[str, Any]]) -> dict[str, Any]:
        _log(f"running {name} …")
        return self.trials.call(lambda: work(load(self.options.config.data, self.options.config.data_dir)), name)


def bench(options: BenchOptions, main: Callable[[Sequence[str]], int], *, as_json: bool = False) -> int:
    """Measure the chosen parts and print tables, or one JSON object. Returns 0.

    Args:
        main: runs one command line of ddptrain.
    """
    with tempfile.TemporaryDirectory(prefix="ddptrain-bench-", ignore_cleanup_errors=True) as temporary:
        results = Bench(options, Trials(Path(temporary), main)).run()
    print(dumps_json(results) if as_json else tables(results))
    return 0


def _row(runs: list[dict[str, float]], **labels: object) -> dict[str, Any]:
    """Return the labels with accuracies and times of the runs."""
    accuracies = [run["accuracy"] for run in runs]
    return {
        **labels, "seeds": len(runs), "mean": statistics.fmean(accuracies), "worst": min(accuracies),
        "best": max(accuracies), "warmSeconds": _summary([run["seconds"] for run in runs]),
        "cpuSeconds": _summary([run["cpuSeconds"] for run in runs]),
    }  # fmt: skip


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "fastest": min(values), "slowest": max(values)}


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tables(results: dict[str, Any]) -> str:
    """Return the measured parts as Markdown tables, and a line about the machine."""
    lines: list[str] = []
    warm = ("warm: median (slowest)", "{warmSeconds[median]:.1f} s ({warmSeconds[slowest]:.1f} s)")
    ranks, seeds = ("ranks", "{worldSize}"), ("seeds", "{seeds}")
    accuracy = ("accuracy: mean (worst)", "{mean:.2%} ({worst:.2%})")
    cpu = ("CPU time", "{cpuSeconds[median]:.1f} s")
    if "recipes" in results:
        *recipes, example = results["recipes"]
        cold = ("cold: median (slowest)", "{coldSeconds[median]:.1f} s ({coldSeconds[slowest]:.1f} s)")
        of_warm, of_cold = ("of the earlier", "{warmShare:.2f}"), ("of the earlier", "{coldShare:.2f}")
        columns = [("recipe", "{recipe}"), ranks, seeds, accuracy, warm, of_warm, cpu, cold, of_cold]
        lines += _table(recipes, columns)[:-1]
        shown = f"{example['accuracy']:.2%} | | | | {example['coldSeconds']:.1f} s"
        lines += [f"| {example['recipe']}, one epoch | 1 | 1 | {shown} | |", ""]
    if "accuracy" in results:
        cold = ("cold (one run)", "{coldSeconds:.1f} s")
        speeds = [("samples/s per rank", "{samplesPerSecondPerRank:,.0f}"), ("scaling", "{scaling:.2f}")]
        lines += _table(results["accuracy"], [ranks, seeds, accuracy, warm, cpu, cold, *speeds], names=0)
    if "sync" in results:
        speeds = [("samples/s", "{samplesPerSecond:,.0f}"), ("times", "{times:.2f}")]
        columns = [("sync", "{sync}"), ranks, seeds, ("mean accuracy", "{mean:.2%}"), warm, *speeds]
        lines += _table(results["sync"], columns)
    if "throughput" in results:
        rows = [row | {"of": f"±{row['shift']} pixel" if row["shift"] else "none"} for row in results["throughput"]]
        columns = [
            ("model", "{model}"), ("augmentation", "{of}"), ("samples/s", "{samplesPerSecond:,.0f}"),
            ("DataLoader loop", "{dataLoaderLoop:,.0f}"), ("times", "**{times:.1f}**"),
        ]  # fmt: skip
        lines += _table(rows, columns, names=2)
    if "tutorial" in results:
        r = results["tutorial"]
        reached = f"{r['theirs']['seconds']:.1f} s, {r['theirs']['epochs']} epochs"
        r = r | {"reached": reached if r["theirs"]["reached"] else f"not within {reached}"}
        columns = [
            (f"to {r['target']:.0%}", "seconds"), ("ours", "{ours[seconds]:.1f} s, 1 epoch ({ours[accuracy]:.2%})"),
            ("tutorial-style", "{reached}"), ("times", "{times:.1f}"),
        ]  # fmt: skip
        lines += _table([r], columns)
    machine = results["machine"]
    load = f"load {machine['loadBefore']:.1f} before, {machine['loadAfter']:.1f} after"
    return "\n".join([*lines, f"{machine['cpus']:g} CPUs ({machine['processor']}), {load}."])


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str]], names: int = 1) -> list[str]:
    """Return a Markdown table and an empty line.

    Args:
        columns: heading and format of each column; the values are right-aligned, except in the first ``names`` columns.
    """
    rule = "|".join("---" if number < names else "---:" for number in range(len(columns)))
    lines = ["| " + " | ".join(heading for heading, _ in columns) + " |", f"|{rule}|"]
    lines += ["| " + " | ".join(text.format_map(row) for _, text in columns) + " |" for row in rows]
    return [*lines, ""]
