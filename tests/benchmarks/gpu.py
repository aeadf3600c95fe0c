"""The trainer on one GPU, and a plain script there under ddprun and under torchrun.

    python -m tests.benchmarks.gpu --data-dir DIR            # tables on standard output; DIR has MNIST
    python -m tests.benchmarks.gpu --data-dir DIR --write    # and into docs/develop/benchmarks.md

The script is manifests/examples/train_plain.py with one rank and NCCL. Runs of the two launchers alternate. The time
until the first step begins before the launcher's process starts; for the time of a step both launchers train at the
same time in turns, as in ``script_start``. The trainer's samples per second are the median of the second epoch and the
later ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ddprun.reporting.metrics import effective_rows
from tests.benchmarks.report import describe_machine, write_section
from tests.benchmarks.script_start import LAUNCHERS, finish, ratio_of, start, steps_in_turns

REPETITIONS = 5
EPOCHS = 4
_SECONDS = 300
MODES: dict[str, tuple[str, ...]] = {
    "float32": (),
    "TF32": ("--tf32",),
    "bfloat16": ("--bf16", "on"),
    "float32, CUDA graph": ("--cuda-graph",),
    "bfloat16, CUDA graph": ("--cuda-graph", "--bf16", "on"),
}
MODELS: dict[str, tuple[str, ...]] = {
    "strided, batch 384": (),
    "cnn, batch 1536": ("--model", "cnn", "--batch-size", "1536"),
}


def first_step(launcher: str) -> float:
    """Run the example once; return the seconds until the first step."""
    with tempfile.TemporaryDirectory(prefix="ddprun-gpu-") as folder:
        began = time.monotonic()
        return finish(start(launcher, 1, Path(folder), ("--epochs", "1")), Path(folder))[0] - began


def run_pair(order: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Run both launchers; return by launcher the seconds until the first step and the milliseconds of a step."""
    alone = {launcher: first_step(launcher) for launcher in order}
    steps = steps_in_turns(1, order)
    return {
        launcher: {"first step, s": [alone[launcher]], "step, ms": [1000 * step for step in steps[launcher]]}
        for launcher in order
    }


def script_table(repetitions: int) -> tuple[str, list[dict[str, dict[str, list[float]]]]]:
    """Run both launchers in turns; return the table and the pairs."""
    pairs = [run_pair(LAUNCHERS if number % 2 else LAUNCHERS[::-1]) for number in range(repetitions)]
    lines = ["| measure | torchrun | ddprun | ratio | least | greatest |", "|---|---:|---:|---:|---:|---:|"]
    for name in pairs[0]["ddprun"]:
        medians = [
            statistics.median(statistics.median(pair[launcher][name]) for pair in pairs) for launcher in LAUNCHERS
        ]
        ratios = [ratio_of(pair["ddprun"][name], pair["torchrun"][name]) for pair in pairs]
        cells = [f"{median:.3f}" for median in medians]
        ratio = f"**{statistics.median(ratios):.3f}** | {min(ratios):.3f} | {max(ratios):.3f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines), pairs


def trained(data_dir: Path, *flags: str) -> dict[str, float]:
    """Train MNIST once on the GPU."""
    with tempfile.TemporaryDirectory(prefix="ddptrain-gpu-") as folder:
        command = [
            sys.executable, "-m", "ddptrain", "launch", "--nproc-per-node", "1", "--device", "cuda", "--data-dir",
            str(data_dir), "--checkpoint-dir", folder, "--checkpoint-every", "0", "--epochs", str(EPOCHS), *flags,
        ]  # fmt: skip
        began = time.monotonic()
        ran = subprocess.run(command, text=True, capture_output=True, timeout=_SECONDS, check=False)
        if ran.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        seconds = time.monotonic() - began
        rows = [row for row in effective_rows(Path(folder), "train") if row["epoch"] >= 1]
        accuracy = effective_rows(Path(folder), "eval")[-1]["accuracy"]
    speed = statistics.median(row["samplesPerSecond"] for row in rows)
    return {"samplesPerSecond": speed, "accuracy": accuracy, "seconds": seconds}


def trainer_table(data_dir: Path) -> tuple[str, dict[str, Any]]:
    """Train in all modes; return the table and the results."""
    results: dict[str, Any] = {}
    lines = [
        f"| network | arithmetic | samples/s | times float32 | accuracy, {EPOCHS} epochs | whole command |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for model, network in MODELS.items():
        for mode, flags in MODES.items():
            found = results[f"{model}: {mode}"] = trained(data_dir, *network, *flags)
            times = found["samplesPerSecond"] / results[f"{model}: float32"]["samplesPerSecond"]
            lines.append(
                f"| {model} | {mode} | {found['samplesPerSecond']:,.0f} | {times:.2f} | {found['accuracy']:.2%} | "
                f"{found['seconds']:.1f} s |"
            )
    return "\n".join(lines), results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/develop/benchmarks.md")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU on this machine")
    machine = f"{torch.cuda.get_device_name()}, {describe_machine(kubernetes=False)}, PyTorch {torch.__version__}"
    trainer, results = trainer_table(options.data_dir)
    print(trainer, flush=True)
    script, pairs = script_table(options.repetitions)
    shown = f"{trainer}\n\n{script}\n\n{options.repetitions} pairs of runs of the script. Measured on {machine}."
    print(shown)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "trainer": results, "script": pairs}, indent=2))
    if options.write:
        write_section("gpu", shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
