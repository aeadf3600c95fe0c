"""Compare ddprun with torchrun for a plain script: the time until its first training step, and a step.

    python -m tests.benchmarks.script_start            # table on standard output
    python -m tests.benchmarks.script_start --write    # and into docs/develop/benchmarks.md

The script is manifests/examples/train_plain.py with one and with two ranks, unchanged under both launchers, and each
rank computes on one thread. A hook of torch records the time after each step of rank 0's optimizer. The time until the
first step begins before the launcher's process starts: it includes Python's start, the imports, the rendezvous and the
data. CPU time is the time of launcher and ranks for a whole run. Runs of the two launchers alternate, and a ratio is
the median of the ratios of neighbours: what else runs on the machine slows both.

Neighbours are too far apart for a step of 2 ms: on a virtual machine two runs of one launcher differ by a third. For
it, both launchers train at the same time, and their ranks are stopped and continued in turns of 0.1 s, so that the
ranks of only one run at any time. A step is the median of a turn, so it contains no save and no report to the launcher.
The ratio of a pair is the median over its turns. One pair says little: two starts of one launcher differ by up to 4 %.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ddprun.distributed.topology import free_port
from tests.benchmarks.report import describe_machine, in_turns, parser_of, print_table, table_of
from tests.processes import eventually

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "manifests" / "examples" / "train_plain.py"
LAUNCHERS = ("torchrun", "ddprun")
RANKS = (1, 2)
REPETITIONS = 7
SHORT = ("--epochs", "20")
LONG = ("--epochs", "5000")
TURNS = 100
_TURN = 0.1
"""Seconds."""
_FIRST_STEPS = 200
"""Steps before the first turn."""
_FEWEST = 5
"""Steps in a turn that counts."""
_SECONDS = 600
_RECORDER = f"""
import ctypes, json, os, runpy, signal, sys, time
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook

recorded, sys.argv = Path(sys.argv[1]), sys.argv[2:]
times, rank = [], os.environ["RANK"]
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: torchrun's ranks would outlive it

def step(*_):
    times.append(time.monotonic())
    if len(times) == {_FIRST_STEPS}:
        recorded.with_name("process-" + rank).write_text(str(os.getpid()))

def write(*_):
    if rank == "0":
        recorded.write_text(json.dumps(times))

def end(*_):
    write()
    os._exit(0)

register_optimizer_step_post_hook(step)
signal.signal(signal.SIGUSR2, end)
runpy.run_path(sys.argv[0], run_name="__main__")
write()
"""

Times = list[float]
"""After each step, of CLOCK_MONOTONIC, in seconds."""


def _train_alone(launcher: str, ranks: int) -> tuple[float, float]:
    """Return the seconds until the first step, and the CPU time."""
    with tempfile.TemporaryDirectory(prefix="ddprun-script-start-") as folder:
        began, used = time.monotonic(), _cpu_of_children()
        times = _finish(_start(launcher, ranks, Path(folder), SHORT), Path(folder))
        return times[0] - began, _cpu_of_children() - used


def steps_in_turns(ranks: int, order: Sequence[str], cpus: Sequence[int]) -> dict[str, list[float]]:
    """Return the median step of each turn by launcher, in seconds; a turn counts for both or for none.

    Args:
        cpus: the only ones that launchers and ranks may use.
    """
    # In memory: a save must not wait for a disk.
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="ddprun-script-start-", dir=memory) as folder, ExitStack() as running:
        folders = {launcher: Path(folder, launcher) for launcher in order}
        launched: dict[str, subprocess.Popen[str]] = {}
        for launcher, each in folders.items():
            each.mkdir()
            process = _start(launcher, ranks, each, LONG, cpus)
            running.callback(process.wait)
            running.callback(process.kill)
            launched[launcher] = process
        processes = {launcher: _ranks(launched[launcher], each, ranks) for launcher, each in folders.items()}
        turns = _take_turns(processes)
        for rank_zero, *_ in processes.values():
            _signal([rank_zero], signal.SIGUSR2)
        times = {launcher: _read_times(each) for launcher, each in folders.items()}
    medians = [{name: _median_step(times[name], *span) for name, span in turn.items()} for turn in turns]
    whole = [turn for turn in medians if all(turn.values())]
    if not whole:
        raise SystemExit(f"no turn of {_TURN} s had {_FEWEST} steps of each launcher: is a step that long?")
    return {launcher: [turn[launcher] or 0.0 for turn in whole] for launcher in order}


def _ranks(launcher: subprocess.Popen[str], folder: Path, ranks: int) -> list[int]:
    """Return the processes of the ranks when all have made their first steps."""
    files = [folder / f"process-{rank}" for rank in range(ranks)]

    def processes() -> list[int] | None:
        if launcher.poll() is not None:
            raise SystemExit(f"{launcher.args!s} ended:\n{(folder / 'output').read_text()[-2000:]}")
        texts = [file.read_text() if file.exists() else "" for file in files]
        return [int(text) for text in texts] if all(texts) else None

    return eventually(f"the ranks make {_FIRST_STEPS} steps", processes, timeout=_SECONDS)


def _take_turns(processes: dict[str, list[int]]) -> list[dict[str, tuple[float, float]]]:
    """Let each launcher's ranks run alone in turns; return the beginning and end of the turns."""
    for of_ranks in processes.values():
        _signal(of_ranks, signal.SIGSTOP)
    turns = []
    for number in range(TURNS):
        order = list(processes.items())[:: 1 if number % 2 else -1]
        turn = {}
        for launcher, of_ranks in order:
            _signal(of_ranks, signal.SIGCONT)
            began = time.monotonic()
            time.sleep(_TURN)
            turn[launcher] = began + _TURN / 5, time.monotonic()  # before, the caches hold the other launcher's data
            _signal(of_ranks, signal.SIGSTOP)
        turns.append(turn)
    for of_ranks in processes.values():
        _signal(of_ranks, signal.SIGCONT)
    return turns


def _signal(processes: Sequence[int], number: int) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            raise SystemExit("a rank ended while the launchers took turns") from None


def _median_step(times: Times, begin: float, end: float) -> float | None:
    kept = times[bisect.bisect_left(times, begin) : bisect.bisect_left(times, end)]
    steps = [later - earlier for earlier, later in itertools.pairwise(kept)]
    return statistics.median(steps) if len(steps) >= _FEWEST else None


def _read_times(folder: Path) -> Times:
    def written() -> Times | None:
        with contextlib.suppress(OSError, ValueError):  # it is about to be written
            return list(json.loads((folder / "times.json").read_text()))
        return None

    return eventually("rank 0 writes its times", written, timeout=_SECONDS)


def _start(
    launcher: str, ranks: int, folder: Path, arguments: Sequence[str], cpus: Sequence[int] = ()
) -> subprocess.Popen[str]:
    """Start the example in ``folder``; ``_finish`` waits for its end. cpus: the only ones that it may use."""
    script = folder / "recorder.py"
    script.write_text(_RECORDER)
    port = ["--master-port", str(free_port())] if launcher == "torchrun" else []
    command = [str(Path(sys.executable).parent / launcher), "--nproc-per-node", str(ranks), *port]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "DDPRUN_", "OMP_"))}
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cpus))] if cpus else []
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            [*pinned, *command, str(script), str(folder / "times.json"), str(EXAMPLE), *arguments],
            env=env | {"DDPJOB_CHECKPOINT_DIR": str(folder), "OMP_NUM_THREADS": "1"}, cwd=folder,
            start_new_session=True, stdout=output, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def _finish(process: subprocess.Popen[str], folder: Path) -> Times:
    """Wait for a run, and return the times of rank 0."""
    try:
        process.wait(_SECONDS)
    finally:
        process.kill()
    if process.returncode:
        output = (folder / "output").read_text()
        raise SystemExit(f"{' '.join(map(str, process.args))} failed:\n{output}")  # type: ignore[arg-type]
    return _read_times(folder)


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(repetitions: int, ranks: int) -> list[list[str]]:
    """Run both launchers in turns; return the cells of a row for each measure."""
    alone = in_turns({launcher: partial(_train_alone, launcher, ranks) for launcher in LAUNCHERS}, repetitions)
    cpus = sorted(os.sched_getaffinity(0))
    together = []
    for number in range(repetitions):
        first = number // 2 % len(cpus)
        order = LAUNCHERS if number % 2 else LAUNCHERS[::-1]
        together.append(steps_in_turns(ranks, order, (cpus[first:] + cpus[:first])[:ranks]))
    measures: dict[str, tuple[Callable[[str, int], list[float]], str]] = {
        "until the first step": (lambda launcher, number: [alone[launcher][number][0]], "s"),
        "CPU time of a run": (lambda launcher, number: [alone[launcher][number][1]], "s"),
        "a step": (lambda launcher, number: [1000 * step for step in together[number][launcher]], "ms"),
    }
    rows = []
    for name, (of, unit) in measures.items():
        found = {launcher: [of(launcher, number) for number in range(repetitions)] for launcher in LAUNCHERS}
        medians = [statistics.median(map(statistics.median, values)) for values in found.values()]
        ratios = [
            statistics.median(ours / theirs for theirs, ours in zip(*pair, strict=True))
            for pair in zip(*found.values(), strict=True)
        ]
        shown = [f"{seconds:.2f} {unit}" for seconds in medians]
        middle = f"**{statistics.median(ratios):.3f}**"
        rows.append([str(ranks), name, *shown, middle, f"{min(ratios):.3f}", f"{max(ratios):.3f}"])
    return rows


def table(repetitions: int, numbers: Sequence[int]) -> str:
    """Measure with these numbers of ranks, and return the table of medians, with the ratio of ddprun to torchrun."""
    heading = ("ranks", "measure", *LAUNCHERS, "ratio", "least", "greatest")
    return table_of(heading, [row for ranks in numbers for row in measure(repetitions, ranks)])


def main() -> None:
    parser = parser_of("tests.benchmarks.script_start", __doc__)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the launchers, too
    machine = describe_machine(kubernetes=False)
    foot = f"Medians of {options.repetitions} pairs of runs, alternating. Measured on {machine}."
    print_table(options, "script-start", f"{table(options.repetitions, options.ranks)}\n\n{foot}")


if __name__ == "__main__":
    main()
