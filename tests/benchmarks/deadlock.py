"""Count how often two jobs block each other, without gangs, with the guard, and with Kubernetes' own PodGroup.

    python -m tests.benchmarks.deadlock            # a table on standard output
    python -m tests.benchmarks.deadlock --write    # and into docs/develop/benchmarks.md

Six Kubernetes nodes have place for one pod each, and two jobs of four nodes arrive within 300 ms. In half of the
repetitions the nodes are free; in the others a predecessor has them, and frees one after the other. The jobs are
blocked when each has three nodes. The control plane and its scheduler are Kubernetes 1.36; the nodes have no machines
(tests/gangs). Several cells, each with six nodes, a namespace and an operator, share the control plane.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.benchmarks.report import describe_machine, write_section
from tests.controller.operator_process import OperatorProcess
from tests.gangs.cell import Cell
from tests.gangs.cluster import Kubernetes136
from tests.kind import prepare
from tests.kind.toolchain import GANGS_VERSION
from tests.worlds.nodes import Gang, Nodes

NODES, JOB_NODES = 6, 4
ARRIVAL_SECONDS = 0.3
TRAIN_SECONDS = 0.3
GUARD_SECONDS = 5
RESOLVE_SECONDS = 2 * GUARD_SECONDS + 10
"""The aim for the guard."""
LIMIT_SECONDS = 90.0
"""Jobs that have made no progress for so long are blocked."""
GROUPS = names.KUBERNETES_GROUPS[1]
CASES = ("free nodes", "a predecessor")


@dataclass(frozen=True)
class Arm:
    """What keeps jobs from blocking each other."""

    name: str
    gang_scheduler: str
    scheduling: Json


ARMS = {
    "nothing": Arm("nothing", "", {"partialGangSeconds": 0}),
    "guard": Arm(f"guard, `partialGangSeconds: {GUARD_SECONDS}`", "", {"partialGangSeconds": GUARD_SECONDS}),
    "native": Arm("PodGroup of Kubernetes", "kubernetes", {}),
}


@dataclass(frozen=True)
class Outcome:
    """One repetition. Times in seconds.

    blocked: whether no job could start by itself: without end, or until the guard resolved it.
    deadlock: whether that did not end.
    resolved: from the block until a job had all its nodes.
    partial: for how long a job had only a part of its nodes, at most.
    groups: PodGroups that were left when both jobs had finished.
    """

    blocked: bool
    deadlock: bool
    resolved: float | None
    partial: float
    groups: int


@dataclass
class Events:
    """Wakes the thread of a cell when a pod of its namespace changes."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    pods: set[str] = field(default_factory=set)

    def take(self, kind: str, pod: Json) -> None:
        with self.changed:
            change = self.pods.discard if kind == "DELETED" else self.pods.add
            change(pod["metadata"]["uid"])
            self.changed.notify_all()

    def wait(self, probe: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> bool:
        with self.changed:
            return self.changed.wait_for(probe, seconds)


class Trial:
    """Repetitions in one cell, one after the other."""

    def __init__(self, nodes: Nodes, arm: Arm, cell: Cell, events: Events) -> None:
        self._plane, self._nodes, self._arm, self._cell, self._events = cell.plane, nodes, arm, cell, events
        self._random = random.Random(cell.namespace)
        self._number = 0

    def run(self, case: str) -> Outcome:
        """Let two jobs arrive, and delete them at the end."""
        self._number += 1
        jobs = [f"{name}-{self._number}" for name in "ab"]
        before = self._predecessor() if case != CASES[0] else []
        self._arrive(jobs)
        if before:
            self._events.wait(lambda: len(self._events.pods) == NODES + 2 * JOB_NODES)
            self._free(before)
        outcome = self._watch(jobs)
        for name in jobs:
            self._plane.request("DELETE", f"{self._cell.path}/{name}")
        if not self._events.wait(lambda: not self._events.pods):
            raise RuntimeError(f"pods are left in {self._cell.namespace}")
        return outcome

    def _arrive(self, jobs: Sequence[str]) -> None:
        begin = time.monotonic()
        at = sorted((self._random.uniform(0, ARRIVAL_SECONDS), name) for name in jobs)
        for seconds, name in at:
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            more = {"scheduling": self._arm.scheduling} if self._arm.scheduling else {}
            self._cell.train(name, JOB_NODES, **more)

    def _predecessor(self) -> list[str]:
        paths = [self._cell.occupy(f"before-{self._number}-{node}", node) for node in range(NODES)]
        self._events.wait(lambda: len(self._events.pods) == NODES)
        return paths

    def _free(self, paths: Sequence[str]) -> None:
        for path in paths:
            time.sleep(self._random.uniform(0, ARRIVAL_SECONDS))
            self._plane.request("DELETE", path, {"gracePeriodSeconds": 0})

    def _watch(self, jobs: Sequence[str]) -> Outcome:
        def is_blocked() -> bool:
            now = [self._gangs(name)[-1:] for name in jobs]
            return all(gang and 0 < len(gang[0].bound) < JOB_NODES for gang in now) and (
                sum(len(gang[0].bound) for gang in now) == NODES
            )

        def has_started() -> bool:
            return any(gang.was_whole for name in jobs for gang in self._gangs(name))

        def have_trained() -> bool:
            return all(any(gang.has_trained for gang in self._gangs(name)) for name in jobs)

        ends = self._events.wait(lambda: is_blocked() or has_started())
        blocked, since, resolved = not has_started(), time.monotonic(), None
        if blocked and self._arm.name != "nothing":
            ends = self._events.wait(has_started)
            resolved = time.monotonic() - since if ends else None
        deadlock = blocked and resolved is None
        if not deadlock and not (ends and self._events.wait(have_trained)):
            deadlock = True
        now = time.monotonic()
        partial = max(
            max(gang.longest_partial, now - (gang.partial_since or now)) for name in jobs for gang in self._gangs(name)
        )
        return Outcome(blocked, deadlock, resolved, partial, 0 if deadlock else self._groups_left())

    def _groups_left(self) -> int:
        if not self._arm.gang_scheduler:
            return 0
        for _ in range(20):
            if not (left := self._cell.groups(GROUPS)):
                return 0
            time.sleep(0.25)
        return len(left)

    def _gangs(self, name: str) -> list[Gang]:
        found: list[Gang] = []
        for attempt in range(1, 100):
            gang = self._nodes.gangs.get((self._cell.namespace, name, str(attempt)))
            if gang is None and attempt > len(found) + 2:  # an attempt may end before a pod is bound
                break
            found += [gang] if gang is not None else []
        return found


def measure(
    plane: Kubernetes136, label: str, *, cells: int, repetitions: int, seconds: float
) -> dict[str, list[Outcome]]:
    """Return the outcomes of an arm, by case; no repetition starts after so many seconds."""
    arm = ARMS[label]
    events = [Events() for _ in range(cells)]
    spaces = {f"{label}-{number}": each for number, each in enumerate(events)}
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(Nodes(plane))
        nodes.train_seconds = TRAIN_SECONDS
        nodes.on_pod = lambda kind, pod: _deliver(spaces, kind, pod)
        found = {space: Cell(plane, nodes, space, NODES) for space in spaces}
        for space in spaces:
            operator = OperatorProcess(plane, space, name=f"operator-{space}", gang_scheduler=arm.gang_scheduler)
            stack.enter_context(operator)
        trials = [Trial(nodes, arm, found[space], each) for space, each in spaces.items()]
        outcomes: dict[str, list[Outcome]] = {}
        for case in CASES:
            turns, end = iter(range(repetitions // len(CASES))), time.monotonic() + seconds / len(CASES)
            with ThreadPoolExecutor(cells) as pool:
                running = [pool.submit(_repeat, trial, case, turns, end) for trial in trials]
                outcomes[case] = [outcome for each in running for outcome in each.result()]
            nodes.check()
            print(f"{arm.name}, {case}: {len(outcomes[case])} repetitions", file=sys.stderr, flush=True)
        return outcomes


def _repeat(trial: Trial, case: str, turns: Iterator[int], end: float) -> list[Outcome]:
    return [trial.run(case) for _ in itertools.takewhile(lambda _: time.monotonic() < end, turns)]


def _deliver(spaces: dict[str, Events], kind: str, pod: Json) -> None:
    if (events := spaces.get(pod["metadata"]["namespace"])) is not None:
        events.take(kind, pod)


def table(arms: dict[str, dict[str, list[Outcome]]], machine: str) -> str:
    """Return the deadlocks as a Markdown table."""
    lines = [
        "| nodes are | jobs have | repetitions | blocked | deadlocks | a job had a part of its nodes, longest | "
        "block resolved: median | slowest | groups left |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in CASES:
        for name, cases in arms.items():
            outcomes = cases[case]
            resolved = [outcome.resolved for outcome in outcomes if outcome.resolved is not None]
            times = [f"{statistics.median(resolved):.1f} s", f"{max(resolved):.1f} s"] if resolved else ["", ""]
            endless = any(outcome.deadlock for outcome in outcomes)
            cells = [
                "freed by a predecessor" if case != CASES[0] else "free",
                ARMS[name].name,
                f"{len(outcomes):,}",
                f"{sum(outcome.blocked for outcome in outcomes):,}",
                f"**{sum(outcome.deadlock for outcome in outcomes):,}**",
                "without end" if endless else f"{max(outcome.partial for outcome in outcomes):.2f} s",
                *times,
                f"{sum(outcome.groups for outcome in outcomes)}" if ARMS[name].gang_scheduler else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    aim = f"Aims: no deadlock with the guard and with PodGroups; the guard resolves a block within {RESOLVE_SECONDS} s."
    return "\n".join([*lines, "", aim, "", f"Measured on {machine}."])


def _add(arms: dict[str, dict[str, list[Outcome]]], earlier: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Add the outcomes of an earlier run."""
    for name, cases in earlier.items():
        for case, outcomes in cases.items():
            arms.setdefault(name, {}).setdefault(case, []).extend(Outcome(**outcome) for outcome in outcomes)


def main() -> int:
    """Measure, print the result, and return exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.deadlock", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repetitions", type=int, default=500, help="of each arm (default: %(default)s); 0 for none")
    parser.add_argument("--minutes", type=float, default=60, help="of each arm, at most (default: %(default)s)")
    parser.add_argument("--cells", type=int, default=10, help="side by side (default: %(default)s)")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS], default=[*ARMS])
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="FILE", help="JSON of earlier runs to add")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/develop/benchmarks.md")
    options = parser.parse_args()
    prepare.ensure("etcd", *Kubernetes136.programs.values())
    earlier = [json.loads(file.read_text()) for file in options.add]
    machine = describe_machine(version=GANGS_VERSION) if options.repetitions or not earlier else earlier[0]["machine"]
    result: dict[str, Any] = {"benchmark": "deadlock", "machine": machine}
    arms: dict[str, dict[str, list[Outcome]]] = {}
    if options.repetitions:
        with contextlib.redirect_stdout(sys.stderr), Kubernetes136() as plane:  # an operator that stops prints its log
            for name in options.arms:
                seconds = 60 * options.minutes
                arms[name] = measure(plane, name, cells=options.cells, repetitions=options.repetitions, seconds=seconds)
    for each in earlier:
        _add(arms, each["arms"])
    arms = {name: arms[name] for name in ARMS if name in arms}
    result["arms"] = {name: {case: [asdict(o) for o in found] for case, found in c.items()} for name, c in arms.items()}
    print(json.dumps(result, indent=2) if options.json else table(arms, machine))
    if options.write:
        write_section("deadlock", table(arms, machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
