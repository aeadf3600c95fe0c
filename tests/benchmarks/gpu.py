"""The trainer on one GPU, and a plain script there under ddprun and under torchrun.

    python -m tests.benchmarks.gpu --data-dir DIR            # tables on standard output; DIR has MNIST
    python -m tests.benchmarks.gpu --data-dir DIR --write    # and into docs/develop/benchmarks.md

The script is manifests/examples/train_plain.py with one rank and NCCL, measured as in ``script_start``. The trainer's
samples per second are the median of the second epoch and the later ones.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.benchmarks import script_start
from tests.benchmarks.report import describe_machine, parser_of, print_table, table_of
from tests.metrics import effective_rows

REPETITIONS = 5
EPOCHS = 4
_SECONDS = 300
MODES: dict[str, tuple[str, ...]] = {
    "float32": (),
    "TF32": ("--tf32",),
    "bfloat16": ("--bf16", "on"),
}
MODELS: dict[str, tuple[str, ...]] = {
    "strided, batch 384": (),
    "cnn, batch 1536": ("--model", "cnn", "--batch-size", "1536"),
}


def trained(data_dir: Path, *flags: str) -> tuple[float, float, float]:
    """Train MNIST once on the GPU; return samples per second, accuracy and seconds."""
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
    return statistics.median(row["samplesPerSecond"] for row in rows), accuracy, seconds


def trainer_table(data_dir: Path) -> str:
    """Train in all modes, and return the table."""
    rows = []
    for model, network in MODELS.items():
        speeds: list[float] = []
        for mode, flags in MODES.items():
            speed, accuracy, seconds = trained(data_dir, *network, *flags)
            speeds.append(speed)
            cells = [f"{speed:,.0f}", f"{speed / speeds[0]:.2f}", f"{accuracy:.2%}", f"{seconds:.1f} s"]
            rows.append([model, mode, *cells])
    heading = ("network", "arithmetic", "samples/s", "times float32", f"accuracy, {EPOCHS} epochs", "whole command")
    return table_of(heading, rows, names=2)


def main() -> None:
    parser = parser_of("tests.benchmarks.gpu", __doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU on this machine")
    machine = f"{torch.cuda.get_device_name()}, {describe_machine(kubernetes=False)}, PyTorch {torch.__version__}"
    trainer, script = trainer_table(options.data_dir), script_start.table(options.repetitions, [1])
    foot = f"{options.repetitions} pairs of runs of the script. Measured on {machine}."
    print_table(options, "gpu", f"{trainer}\n\n{script}\n\n{foot}")


if __name__ == "__main__":
    main()
