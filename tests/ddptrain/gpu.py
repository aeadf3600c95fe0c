"""``make gpu``: the trainer on the GPUs of this machine, and one table at the end.

Each check runs the command line as a user would. It uses up to two GPUs; with one, checks of several ranks form a
process group of one rank. ``--device cpu`` runs the checks that need no GPU, to test this program itself. Exits with 1
if a check fails, or without CUDA.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ddptrain.training.checkpointer import digest_of_weights
from tests.ddptrain.runs import final_weights, wait_until
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

    def start(self, *argv: object) -> subprocess.Popen[str]:
        """Start ``ddptrain ARGV`` on the device."""
        command = [sys.executable, "-m", "ddptrain", *map(str, argv), "--device", self.device]
        return subprocess.Popen(
            command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )  # fmt: skip

    def run(self, *argv: object, code: int = 0) -> str:
        """Run the command and return its output."""
        return self.end(self.start(*argv), code=code)

    def end(self, process: subprocess.Popen[str], *, code: int) -> str:
        """Return the output of the command, which must end with ``code``."""
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise CheckFailed(f"did not end within {SECONDS:g} s") from error
        if process.returncode != code:
            raise CheckFailed(f"exit code {process.returncode}, wanted {code}:\n{output[-3000:]}")
        return output

    def train(self, name: str, *flags: object, code: int = 0, several: bool = True) -> Path:
        """Train the digits in the directory ``name`` and return it."""
        folder = self.folder / name
        self.run(*self.command(several=several), "--checkpoint-dir", folder, *flags, code=code)
        return folder

    def command(self, *, several: bool = True) -> list[object]:
        """Return the start of a command that trains the digits for one epoch."""
        verb: list[object] = ["launch", "--nproc-per-node", self.ranks if several else 1]
        return [*verb, "--data", "digits", "--epochs", 1, "--backend", self.backend, "--log-dir", self.folder / "logs"]

    def report(self) -> dict[str, Any]:
        """Return the termination report of the last command."""
        return dict(json.loads((self.folder / "termination").read_text()))


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


def sigterm(place: Place) -> str:
    folder = place.folder / "sigterm"
    process = place.start(*place.command(), "--checkpoint-dir", folder, "--step-delay", 0.2)
    wait_until(lambda: process.poll() is not None or effective_rows(folder, "train"), "the first step", SECONDS)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    place.end(process, code=75)
    if not place.report()["saved"]:
        raise CheckFailed("nothing was saved")
    return f"saved and ended in {time.monotonic() - started:.1f} s"


def hang(place: Place) -> str:
    victim = place.ranks - 1
    folder = place.train("hang", "--hang-timeout", 10, "--chaos", f"hang:{victim}:5", code=76)
    report = place.report()
    if (report["rank"], report["phase"]) != (victim, "batch"):
        raise CheckFailed(f"the report names rank {report['rank']} in {report['phase']}")
    traces = sorted(path.name for path in folder.glob("reports/*/trace-*"))
    return f"rank {victim} named; flight recorders: {', '.join(traces) or 'none'}"


Check = Callable[[Place], str]
CHECKS: tuple[Check, ...] = (
    train, equal_to_cpu, resume, late_reads, bf16, sigterm, hang,
)  # fmt: skip
NEED_CUDA: tuple[Check, ...] = (bf16,)


def outcome(check: Check, place: Place) -> tuple[str, str, str, str]:
    """Return a row of the table: name, verdict, seconds, what was measured or what failed."""
    name, started = check.__name__.replace("_", " "), time.monotonic()
    if check in NEED_CUDA and place.device != "cuda":
        return name, "skipped", "", "needs CUDA"
    print(f"running {name} …", file=sys.stderr, flush=True)
    try:
        verdict, detail = "ok", check(place)
    except Exception as error:  # of any kind: the other checks still run
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        verdict, detail = "FAILED", f"{type(error).__name__}: {error}".splitlines()[0]
    return name, verdict, f"{time.monotonic() - started:.0f} s", detail


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ddptrain.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--checks", default="", help="comma-separated names (default: all)")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("error: PyTorch finds no GPU on this machine", file=sys.stderr)
        print(f"hint:  the driver is absent, or this PyTorch ({torch.__version__}) is built for CPU", file=sys.stderr)
        print("next:  install a CUDA build of torch on a machine with an NVIDIA GPU, and run make gpu", file=sys.stderr)
        return 1
    ranks = min(2, torch.cuda.device_count()) if arguments.device == "cuda" else 2
    chosen = [check for check in CHECKS if not arguments.checks or check.__name__ in arguments.checks.split(",")]
    with tempfile.TemporaryDirectory(prefix="ddptrain-gpu-", ignore_cleanup_errors=True) as folder:
        rows = [outcome(check, Place(arguments.device, ranks, Path(folder))) for check in chosen]
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    return print_table(f"{ranks} rank(s) on {device}, torch {torch.__version__}", rows)


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
