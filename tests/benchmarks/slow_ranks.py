"""Count how often the launchers name the slow rank of a job, and the part of its steps, and how soon.

    python -m tests.benchmarks.slow_ranks --phases 300 --clean 200 --results FILE

A run has two to eight ranks on this machine. In a phase, one of them sleeps 10 to 50 ms in one part of each step until
the launcher names a rank, for 30 s or 50 steps, whichever is longer; then no rank sleeps until the verdict is
withdrawn. A clean run has no slow rank for 30 s after its first steps. Every rank computes on one thread, so with eight
ranks on two cores the ranks also wait for each other's cores, which must accuse nobody. In the part "throttled", a
cgroup gives the rank half of the core time that each rank has on this machine without other programs; it needs root and
cgroup v1, so it is done only if ``--parts`` asks for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from ddprun.launcher.slow_ranks import PARTS
from tests.benchmarks.report import describe_machine, parser_of
from tests.ddptrain.runs import wait_until
from tests.processes import free_port

SCRIPT = Path(__file__).with_name("slow_ranks_script.py")
RANKS, SECONDS, WIDTHS = (2, 3, 4, 6, 8), (0.01, 0.02, 0.03, 0.05), (64, 128, 256)
SLOW_PARTS = ("data", "forward", "backward", "communication", "script")
PHASES_OF_RUN = 12
_LONGEST, _STEPS, _CLEAN, _WARM_UP, _BETWEEN = 30.0, 50, 30.0, 8.0, 2.0
_NAMED = re.compile(r"slow: .* for rank (\d+) \(node \d+\), (.*)$")
_OVER = "is not slow any more"


@dataclass(frozen=True)
class Phase:
    """One phase, and what the launcher said in it; ``named`` is (rank, part) of its first verdict."""

    ranks: int
    width: int
    rank: int
    part: str
    seconds: float
    named: tuple[int, str] | None
    after: float
    load: float

    @property
    def is_right(self) -> bool:
        return self.named == ((self.rank, self.part) if self.rank >= 0 else None)


class Run:
    """One group of ranks under ddprun."""

    def __init__(self, folder: Path, ranks: int, width: int) -> None:
        self._file, self.ranks, self.width, self._port = folder / "now.json", ranks, width, free_port()
        self.tell({})
        command = [sys.executable, "-m", "ddprun", "--standalone", "--nproc-per-node", str(ranks), str(SCRIPT)]
        self._process = subprocess.Popen(
            [*command, str(self._file), str(width)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "DDPJOB_PROGRESS_PORT": str(self._port)},
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip())

    def tell(self, now: dict[str, object]) -> None:
        """Tell the ranks what is slow from now on."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(now))
        new.replace(self._file)

    def step(self) -> int:
        """Return how many steps rank 0 has made; 0 before the launcher answers."""
        address = f"http://127.0.0.1:{self._port}/progress"
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5.0) as answer:
            return int(json.load(answer)["step"])
        return 0

    def named(self, seconds: float, steps: int = 0) -> tuple[int, str] | None:
        """Return the rank and the part that the launcher names within this time, or so many steps if that is longer."""
        end, last = time.monotonic() + seconds, self.step() + steps
        while (left := end - time.monotonic()) > 0 or self.step() < last:
            with contextlib.suppress(queue.Empty):
                if (found := _NAMED.search(self._line(max(left, 0.1)))) is not None:
                    return int(found[1]), next(
                        (part for part, text in PARTS.items() if found[2].startswith(text)), found[2]
                    )
        return None

    def wait_until_over(self, seconds: float) -> bool:
        """Return whether the launcher withdraws its verdict within this time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                if _OVER in self._line(left):
                    return True
        return False

    def _line(self, seconds: float) -> str:
        if self._process.poll() is not None and self._lines.empty():
            raise SystemExit(f"the ranks have ended with {self._process.returncode}")
        return self._lines.get(timeout=min(seconds, 1.0))

    def close(self) -> None:
        self.tell({"end": True})
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def started(rng: random.Random) -> Iterator[Run]:
    """Start a run; it has made its first steps."""
    with tempfile.TemporaryDirectory(prefix="ddprun-slow-ranks-") as folder:
        run = Run(Path(folder), rng.choice(RANKS), rng.choice(WIDTHS))
        try:
            wait_until(lambda: run.step() > 0, "the first step")
            yield run
        finally:
            run.close()


def phases(rng: random.Random, count: int, parts: Sequence[str]) -> Iterator[Phase]:
    """Yield phases of one run. It ends early when a verdict is not withdrawn."""
    with started(rng) as run:
        for number in range(count):
            first = run.named((_BETWEEN if number else _WARM_UP) + rng.random() * 4)
            if first is not None:
                yield Phase(run.ranks, run.width, -1, "", 0.0, first, 0.0, os.getloadavg()[0])
                return
            rank, part, seconds = rng.randrange(run.ranks), rng.choice(parts), rng.choice(SECONDS)
            if part == "throttled":
                seconds = 0.5 * min(1.0, (os.cpu_count() or 1) / run.ranks)
            run.tell({"rank": rank, "part": part, "seconds": seconds})
            began = time.monotonic()
            named = run.named(_LONGEST, _STEPS)
            after = time.monotonic() - began
            yield Phase(run.ranks, run.width, rank, part, seconds, named, round(after, 1), os.getloadavg()[0])
            run.tell({})
            if named is None or not run.wait_until_over(60.0):
                return


def clean_run(rng: random.Random) -> Phase:
    """Return what the launcher said in a run without a slow rank."""
    with started(rng) as run:
        began = time.monotonic()
        named = run.named(_WARM_UP + _CLEAN)
        return Phase(run.ranks, run.width, -1, "", 0.0, named, round(time.monotonic() - began, 1), os.getloadavg()[0])


def main() -> None:
    parser = parser_of("tests.benchmarks.slow_ranks", __doc__)
    parser.add_argument("--phases", type=int, default=300)
    parser.add_argument("--clean", type=int, default=200)
    parser.add_argument("--parts", nargs="+", default=SLOW_PARTS, choices=(*SLOW_PARTS, "throttled"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="a file with a line of JSON for each phase and run")
    options = parser.parse_args()
    rng, found = random.Random(options.seed), list[Phase]()

    def take(phase: Phase) -> None:
        found.append(phase)
        line = json.dumps(asdict(phase) | {"right": phase.is_right})
        print(line, flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(line + "\n")

    while (left := options.phases - sum(phase.rank >= 0 for phase in found)) > 0:
        for phase in phases(rng, min(left, PHASES_OF_RUN), options.parts):
            take(phase)
    for _ in range(options.clean):
        take(clean_run(rng))
    print(describe_machine())
    for line in summary(found):
        print(line)


def summary(found: list[Phase]) -> Iterator[str]:
    """Yield the counts."""
    slow, clean = [p for p in found if p.rank >= 0], [p for p in found if p.rank < 0]
    right = Counter(p.part for p in slow if p.is_right)
    for part, count in sorted(Counter(p.part for p in slow).items()):
        yield f"{part}: {right[part]} of {count}"
    times = sorted(p.after for p in slow if p.is_right)
    if slow:
        yield f"right rank and part: {sum(right.values())} of {len(slow)}"
    if times:
        yield f"seconds until then: median {median(times):.1f}, 95 % {times[int(0.95 * (len(times) - 1))]:.1f}"
    yield f"clean: {sum(not p.is_right for p in clean)} false verdicts in {len(clean)} runs"


if __name__ == "__main__":
    main()
