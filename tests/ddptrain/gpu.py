"""``make gpu``: the trainer on the GPUs of this machine, and one table at the end.

Each check runs the command line as a user would. It uses up to two GPUs; with one, checks of several ranks form a
process group of one rank. Exits with 1 if a check fails, or without CUDA.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ddptrain.training.checkpointer import digest_of_weights
from tests.ddptrain.runs import final_weights
from tests.metrics import effective_rows

SECONDS = 900.0  # for one command
_LEAST_ACCURACY = 0.9
_LARGEST_DIFFERENCE = 1e-6  # of a loss in float64 from the CPU's
_BF16 = ("--bf16", "on")
_DROPPED = ("DDPTRAIN_", "DDPJOB_")


class CheckFailed(Exception):  # noqa: N818
    """A command ended with another code, or a result is wrong."""


@dataclass
class Place:
    """The device, the number of ranks, and a folder in which each check has its own directories."""

    device: str
    ranks: int
    folder: Path
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
        self.env = kept | {"DDPJOB_TERMINATION_LOG": str(self.folder / "termination")}

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    def train(self, name: str, *flags: object, code: int = 0, several: bool = True) -> Path:
        """Train the digits for one epoch in the directory ``name``, and return it; the command ends with ``code``."""
        folder, ranks = self.folder / name, self.ranks if several else 1
        argv = ["launch", "--nproc-per-node", ranks, "--data", "digits", "--epochs", 1, "--backend", self.backend]
        argv += ["--device", self.device, "--log-dir", self.folder / "logs", "--checkpoint-dir", folder, *flags]
        done = subprocess.run(
            [sys.executable, "-m", "ddptrain", *map(str, argv)], env=self.env, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=SECONDS, check=False,
        )  # fmt: skip
        if done.returncode != code:
            raise CheckFailed(f"exit code {done.returncode}, wanted {code}:\n{done.stdout[-3000:]}")
        return folder


def _accuracy(folder: Path) -> float:
    accuracy = float(effective_rows(folder, "eval")[-1]["accuracy"])
    if accuracy < _LEAST_ACCURACY:
        raise CheckFailed(f"accuracy {accuracy:.4f}")
    return accuracy


def train(place: Place) -> str:
    folder = place.train("train", "--epochs", 3)
    return f"accuracy {_accuracy(folder):.4f} with {place.ranks} rank(s), {place.backend}"


def equal_to_cpu(place: Place) -> str:
    flags = ("--dtype", "float64", "--stop-after", 10, "--checkpoint-every", 0)
    ours = effective_rows(place.train("float64", *flags, code=75), "train")
    cpu = dataclasses.replace(place, device="cpu")
    theirs = effective_rows(cpu.train("float64-cpu", *flags, code=75, several=False), "train")
    worst = max(abs(our["loss"] - their["loss"]) for our, their in zip(ours, theirs, strict=True))
    if worst > _LARGEST_DIFFERENCE:
        raise CheckFailed(f"losses differ from the CPU's by {worst:.1e}")
    return f"10 losses in float64 differ from the CPU's by {worst:.1e}"


def resume(place: Place) -> str:
    whole = place.train("whole", "--deterministic")
    place.train("cut", "--deterministic", "--stop-after", 20, code=75)
    cut = place.train("cut", "--deterministic")
    one, other = (digest_of_weights(final_weights(folder)) for folder in (whole, cut))
    if one != other:
        raise CheckFailed("the weights of the resumed run differ")
    return f"stopped after step 20: the same bits, {one[:12]}"


def late_reads(place: Place) -> str:
    folders = [place.train(f"reads-{every}", "--deterministic", "--log-every", every) for every in (1, 25)]
    one, other = (digest_of_weights(final_weights(folder)) for folder in folders)
    if one != other:
        raise CheckFailed("the weights depend on how often losses are read")
    return f"losses read after each step and after 25: the same bits, {one[:12]}"


def bf16(place: Place) -> str:
    return f"accuracy {_accuracy(place.train('bf16', *_BF16, '--epochs', 3)):.4f}"


Check = Callable[[Place], str]
CHECKS: tuple[Check, ...] = (train, equal_to_cpu, resume, late_reads, bf16)


def outcome(check: Check, place: Place) -> tuple[str, str, str, str]:
    """Return a row of the table: name, verdict, seconds, what was measured or what failed."""
    name, started = check.__name__.replace("_", " "), time.monotonic()
    print(f"running {name} …", file=sys.stderr, flush=True)
    try:
        verdict, detail = "ok", check(place)
    except Exception as error:  # of any kind: the other checks still run
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        verdict, detail = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0]
    return name, verdict, f"{time.monotonic() - started:.0f} s", detail


def main() -> int:
    if not torch.cuda.is_available():
        print("error: PyTorch finds no GPU on this machine", file=sys.stderr)
        print(f"hint:  the driver is absent, or this PyTorch ({torch.__version__}) is built for CPU", file=sys.stderr)
        print("next:  install a CUDA build of torch on a machine with an NVIDIA GPU, and run make gpu", file=sys.stderr)
        return 1
    ranks = min(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory(prefix="ddptrain-gpu-", ignore_cleanup_errors=True) as folder:
        rows = [outcome(check, Place("cuda", ranks, Path(folder))) for check in CHECKS]
    return print_table(f"{ranks} rank(s) on {torch.cuda.get_device_name()}, torch {torch.__version__}", rows)


def print_table(title: str, rows: Sequence[tuple[str, str, str, str]]) -> int:
    """Print the rows of ``outcome`` under a title; return the exit code."""
    print(f"{title}\n")
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, (*widths, 0), strict=True)).rstrip())
    failed = [row[0] for row in rows if row[1] == "FAILED"]
    names = f"; FAILED: {', '.join(failed)}" if failed else ""
    print(f"\n{len(rows) - len(failed)} of {len(rows)} did not fail{names}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
