"""The verb ``bench``: time to accuracy by seeds and numbers of ranks, and speed compared with plain loops.

Every figure is of a whole command, with reading the data and every evaluation. *Cold* is a new interpreter, run once
per number of ranks; *warm* is forked from a process that has imported torch, as a launcher forks its ranks, and run
once per seed. ``tables`` prints the results as docs/benchmarks.md contains them.

The loops to compare with are written as in tutorials, and use the same data with the same number of threads. Both are
faster than in practice, because they neither decode with PIL nor start worker processes.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from ddptrain.config import Config
from ddptrain.data.batches import MEAN, STD, normalise
from ddptrain.data.mnist import SIDE, Dataset, Images, load
from ddptrain.distributed.device import processor
from ddptrain.experiments.trials import Trials, data_flags, speed, verb
from ddptrain.files import dumps_json
from ddptrain.reporting.metrics import effective_rows
from ddptrain.resources import available_cpus, threads_per_rank
from ddptrain.training import models

PARTS = ("accuracy", "throughput", "tutorial")
_TURNS = 3
_SHIFTS = (1, 0)  # pixels: the default, and no augmentation
_TARGET = 0.992  # for the mean accuracy over the seeds
_LOOP_STEPS = 120  # of the DataLoader loop
_TUTORIAL_TARGET = 0.98
_TUTORIAL_EPOCHS = 12  # at most
_WARM_UP_STEPS = 10  # not counted: they allocate memory and select kernels


@dataclass(frozen=True)
class Plan:
    """What is measured; ``config`` gives the data, and the global batch of every part except the tutorial."""

    config: Config
    seeds: int
    worlds: tuple[int, ...]
    parts: tuple[str, ...]


@dataclass
class Bench:
    """Measures the parts one after the other."""

    plan: Plan
    trials: Trials

    def run(self) -> dict[str, Any]:
        """Return all figures as a JSON-able dict."""
        machine = {"cpus": available_cpus(), "processor": processor(), "loadBefore": os.getloadavg()[0]}
        parts = {"accuracy": self._accuracy, "throughput": self._throughput, "tutorial": self._tutorial}
        measured = {part: parts[part]() for part in self.plan.parts}
        machine["loadAfter"] = os.getloadavg()[0]
        of = {"data": self.plan.config.data, "globalBatch": self.plan.config.global_batch}
        return {"of": of, "machine": machine, **measured}

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
                dataloader_loop, model=model, batch=self.plan.config.global_batch, steps=_LOOP_STEPS, threads=threads
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
            lambda data: tutorial(data, target=_TUTORIAL_TARGET, most_epochs=_TUTORIAL_EPOCHS, threads=threads),
        )
        times = theirs["seconds"] / ours["seconds"]
        return {"target": _TUTORIAL_TARGET, "ours": ours, "theirs": theirs, "times": times}

    def _timed(self, name: str, world: int, *flags: object) -> dict[str, float]:
        """Return elapsed and CPU seconds of a warm command, its accuracy, and the samples per second over all ranks."""
        folder = self.trials.folder / name
        cost = self.trials.run([*self._command(world), *flags, "--checkpoint-dir", folder / "checkpoints"], folder)
        path = folder / "checkpoints"
        accuracy = effective_rows(path, "eval")[-1]["accuracy"]
        _log(f"{name}: {accuracy:.2%} in {cost.seconds:.1f} s")
        return {
            "seconds": cost.seconds,
            "cpuSeconds": cost.cpu_seconds,
            "accuracy": accuracy,
            "speed": speed(path, self.plan.config.global_batch),
        }

    def _cold(self, world: int) -> float:
        """Return the elapsed seconds of the same command in a new interpreter."""
        _log(f"running cold-{world} …")
        return self.trials.run_cold([*self._command(world), "--checkpoint-dir", self.trials.folder / f"cold-{world}"])

    def _command(self, world: int) -> list[object]:
        config = self.plan.config
        flags = [*data_flags(config), "--device", config.device, "--batch-size", config.global_batch]
        return [*verb(world), *flags, "--checkpoint-every", 0]

    def _call(self, name: str, work: Callable[[Dataset], dict[str, Any]]) -> dict[str, Any]:
        _log(f"running {name} …")
        return self.trials.call(lambda: work(load(self.plan.config.data, self.plan.config.data_dir)), name)


def bench(plan: Plan, main: Callable[[Sequence[str]], int], *, as_json: bool = False) -> int:
    """Measure every part of the plan and print tables, or one JSON object. Returns 0.

    Args:
        main: runs one command line of ddptrain.
    """
    with tempfile.TemporaryDirectory(prefix="ddptrain-bench-", ignore_cleanup_errors=True) as temporary:
        results = Bench(plan, Trials(Path(temporary), main)).run()
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


class Samples(TorchDataset[tuple[torch.Tensor, int]]):
    """Converts, normalizes and shifts one sample at a time, as torchvision's transforms do.

    Args:
        shift: maximum of the random shift in pixels; 0 for none.
    """

    def __init__(self, images: Images, labels: Images, *, shift: int = 0) -> None:
        self._images, self._labels, self._shift = torch.from_numpy(images.copy()), labels.tolist(), shift

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return (1, 28, 28) float32 of zero mean and unit variance, and its class."""
        image = (self._images[index].unsqueeze(0).to(torch.float32).div(255) - MEAN) / STD
        if self._shift:
            top, left = random.randint(0, 2 * self._shift), random.randint(0, 2 * self._shift)  # noqa: S311
            image = functional.pad(image, (self._shift,) * 4)[:, top : top + SIDE, left : left + SIDE]
        return image, self._labels[index]


def dataloader_loop(
    dataset: Dataset, *, model: str, batch: int, steps: int, threads: int, shift: int
) -> dict[str, Any]:
    """Time the product's network and optimizer in a plain loop: returns ``{"samplesPerSecond": …}``."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    net = models.plain(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
    samples = Samples(dataset.train_images, dataset.train_labels, shift=shift)
    loader = DataLoader(samples, batch_size=batch, shuffle=True)
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    started = 0.0
    for step, (images, labels) in enumerate(itertools.islice(endless, steps)):
        if step == _WARM_UP_STEPS:
            started = time.perf_counter()
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    seconds = time.perf_counter() - started
    return {"samplesPerSecond": (steps - _WARM_UP_STEPS) * batch / seconds}


class TutorialNet(nn.Module):
    """The network of PyTorch's distributed tutorial: two convolutions with dropout, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities (N, 10) of images (N, 1, 28, 28)."""
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.drop(self.conv2(x)), 2))
        x = functional.dropout(functional.relu(self.fc1(x.flatten(1))), training=self.training)
        return functional.log_softmax(self.fc2(x), dim=1)


def tutorial(dataset: Dataset, *, target: float, most_epochs: int, threads: int) -> dict[str, Any]:
    """Train with batch 64 and SGD (learning rate .01, momentum .5) until the test accuracy reaches ``target``.

    Returns:
        seconds of training without evaluations, the number of epochs, and the accuracy after each.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    net = TutorialNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    loader = DataLoader(Samples(dataset.train_images, dataset.train_labels), batch_size=64, shuffle=True)
    seconds = 0.0
    accuracies: list[float] = []
    while len(accuracies) < most_epochs and (not accuracies or accuracies[-1] < target):
        started = time.perf_counter()
        net.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.nll_loss(net(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        seconds += time.perf_counter() - started
        accuracies.append(_accuracy(net, dataset))
        print(f"epoch {len(accuracies)}: {accuracies[-1]:.4f} after {seconds:.1f} s", flush=True)
    reached = accuracies[-1] >= target
    return {"seconds": seconds, "epochs": len(accuracies), "accuracies": accuracies, "reached": reached}


@torch.no_grad()
def _accuracy(net: nn.Module, dataset: Dataset) -> float:
    net.eval()
    images, labels = torch.from_numpy(dataset.test_images.copy()), torch.from_numpy(dataset.test_labels.copy())
    right = 0
    for first in range(0, len(labels), 1000):
        logits = net(normalise(images[first : first + 1000], torch.float32).unsqueeze(1))
        right += int((logits.argmax(1) == labels[first : first + 1000]).sum())
    return right / len(labels)
