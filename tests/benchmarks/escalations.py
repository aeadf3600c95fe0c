"""Measure on kind how long each kind of failure keeps a job from its next training step, in place or with new pods.

    python -m tests.benchmarks.escalations --repetitions 5 --write

One job of two pods with one rank each for each repetition, one after the other. A fault comes from outside when the job
has a checkpoint. All times are of this machine's clock. Exit code 1: a job took another path than the design says.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ddpjob.api.objects import Json
from ddprun.reporting.metrics import read_rows
from tests.benchmarks.report import describe_machine, write_section
from tests.e2e import nodes
from tests.e2e.demo import say, set_up
from tests.e2e.kubectl import Kubectl, until
from tests.e2e.namespace import job_namespace, until_all_are_gone
from tests.e2e.trials import MOUNT, WITH_RESTARTS_IN_PLACE, Trial, Trials, running
from tests.kind.cluster import DEFAULT_NAME

HANG_TIMEOUT = 10
_EVERY = 5  # steps between checkpoints
_SECONDS = 300.0
_MEMORY = {"requests": {"memory": "256Mi"}, "limits": {"memory": "1Gi"}}
# Ranks lead process groups of their own.
_RANKS = """
import os, signal, time
from pathlib import Path

def leads_a_group(pid):
    try:
        return os.getpgid(pid) == pid != os.getpid()
    except ProcessLookupError:
        return False

def ranks():
    return [*filter(leads_a_group, map(int, Path("/proc/1/task/1/children").read_text().split()))]

"""
_TO_A_RANK = """
print(time.time(), flush=True)
os.kill(ranks()[0], signal.{name})
"""
_KILL_THE_NEXT_RANK = """
before = ranks()
Path("{mount}/ready").touch()
while not (found := ranks()) or found == before:
    pass
os.kill(found[0], signal.SIGKILL)
"""
_OF_POD = """
for folder in /proc/[0-9]*; do
    grep -qs "{uid}" $folder/cgroup || continue
    [ "$(cat $folder/comm)" = pause ] && date +%s.%N && {command}
done
"""


class Fault(NamedTuple):
    """A kind of failure.

    Attributes:
        path: what follows, as the design says.
        attempts: how many attempts the job then has had.
        restarts: of either kind, which the status then counts.
        cause: makes it happen, and returns when.
        flags: of the training.
    """

    what: str
    path: str
    attempts: int
    restarts: int
    cause: Callable[[Trial], float]
    flags: Sequence[str] = ()


def _run_in(trial: Trial, node: int, script: str) -> str:
    return trial.kubectl("exec", trial.pods()[node]["metadata"]["name"], "--", "python3", "-c", _RANKS + script)


def _signal_rank(trial: Trial, *, name: str = "SIGKILL") -> float:
    return float(_run_in(trial, 1, _TO_A_RANK.format(name=name)))


def _kill_in_two_lives(trial: Trial) -> float:
    with ThreadPoolExecutor() as pool:
        second = pool.submit(_run_in, trial, 0, _KILL_THE_NEXT_RANK.format(mount=MOUNT))
        until("the second killer", (trial.folder / "ready").exists, seconds=_SECONDS)
        began = _signal_rank(trial)
        second.result()
    return began


def _kill_launcher(trial: Trial, node: int) -> float:
    return nodes.kill_first_process(trial.pods()[node])


def _cut_off(trial: Trial) -> float:
    """Take the network from the pod of node 1; kubelet does not need it to report the pod."""
    pod = trial.pods()[1]
    uid, command = pod["metadata"]["uid"].replace("-", "[-_]"), "nsenter -t ${folder#/proc/} -n ip link set eth0 down"
    return float(nodes.run_on(pod["spec"]["nodeName"], _OF_POD.format(uid=uid, command=command)))


def _delete(trial: Trial) -> float:
    name, began = trial.pods()[1]["metadata"]["name"], time.time()
    trial.kubectl("delete", "pod", name, "--wait=false")
    return began


def _last_step(trial: Trial) -> float:
    """Wait for the rank that ``--chaos`` lets run out of memory, and return when the last step before was made."""
    trial.until("a failure", lambda job: job.get("status", {}).get("failures"), _SECONDS)
    return float([row["time"] for row in _steps(trial) if row["run"] == 1][-1])


FAULTS = {
    "rank": Fault("a rank is killed", "next life", 1, 1, _signal_rank),
    "restart": Fault(
        "and one of the other node before the next life's first step", "the life after it", 1, 2,
        _kill_in_two_lives,
    ),
    "hang": Fault(
        f"a rank hangs, `--hang-timeout {HANG_TIMEOUT}`", "next life", 1, 1,
        partial(_signal_rank, name="SIGSTOP"), ("--hang-timeout", str(HANG_TIMEOUT)),
    ),
    "launcher": Fault("the launcher of node 1 is killed", "attempt", 2, 1, partial(_kill_launcher, node=1)),
    "leader": Fault("the launcher of node 0 is killed", "attempt", 2, 1, partial(_kill_launcher, node=0)),
    "oom": Fault("a rank reaches the memory limit", "attempt", 2, 1, _last_step, ("--chaos", "oom:1:15")),
    "deleted": Fault("a pod is deleted: all save a checkpoint", "attempt, free", 2, 1, _delete),
    "partition": Fault("a pod is cut off from the network", "attempt", 2, 1, _cut_off),
}  # fmt: skip


@dataclass(frozen=True)
class Course:
    """What happened to one job; times in seconds since the fault.

    Attributes:
        ended: until the status had the next attempt; None if there was none.
        stepped: until the next training step.
        attempts: how many there were.
    """

    ended: float | None
    stepped: float
    attempts: int


def course(fault: Fault, trial: Trial) -> Course:
    """Train a job, let it fail, and delete it after its next step."""
    flags = ("--epochs", "16", "--checkpoint-every", str(_EVERY), "--step-delay", "0.1", *fault.flags)
    trial.apply(*flags, env=WITH_RESTARTS_IN_PLACE, resources=_MEMORY)
    if "--chaos" not in fault.flags:
        until(f"a checkpoint of {trial.name}", lambda: len(_steps(trial)) > 2 * _EVERY, seconds=_SECONDS)
    began, ended = fault.cause(trial), None
    if fault.attempts > 1:
        trial.until("the next attempt", _has_next_attempt)
        ended = time.time() - began
    stepped = until(f"the next step of {trial.name}", partial(_first_step, trial), seconds=_SECONDS) - began
    attempts = trial.until("the restarts", partial(_attempts_after, fault.restarts))
    trial.kubectl("delete", "ddp", trial.name, "--cascade=foreground", "--timeout=90s", timeout=120)
    took = "" if ended is None else f"attempt ended after {ended:.2f} s, "
    say(f"{trial.name}: {took}next step after {stepped:.2f} s, attempt {attempts}")
    return Course(ended, stepped, attempts)


def _attempts_after(restarts: int, job: Json) -> int | None:
    status = job.get("status", {})
    return int(status["attempt"]) if status.get("restarts") == restarts else None


def _has_next_attempt(job: Json) -> bool:
    return bool(job.get("status", {}).get("attempt", 1) > 1)


def _steps(trial: Trial) -> list[Json]:
    return [row for row in read_rows(trial.folder) if row["event"] == "train"]


def _first_step(trial: Trial) -> float | None:
    return next((float(row["time"]) for row in _steps(trial) if row["run"] > 1), None)


def table(courses: Mapping[str, Sequence[Course]], machine: str) -> str:
    """Return the result as a Markdown table."""
    lines = [
        "| What happens | Then | Attempt ended after | → next training step, median | slowest |",
        "|---|---|---:|---:|---:|",
    ]
    for name, found in courses.items():
        fault, stepped = FAULTS[name], [one.stepped for one in found]
        ended = [one.ended for one in found if one.ended is not None]
        cells = [fault.what, fault.path, f"{statistics.median(ended):.1f} s" if ended else ""]
        cells += [f"**{statistics.median(stepped):.1f} s**", f"{max(stepped):.1f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    count = max(map(len, courses.values()))
    return "\n".join([*lines, "", f"{count} jobs each, two pods of one rank, on {machine}."])


def main() -> int:
    """Measure, print the result, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.escalations", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", choices=FAULTS, nargs="*", default=list(FAULTS))
    parser.add_argument("--name", default=DEFAULT_NAME, help="kind cluster to use or create (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/develop/benchmarks.md")
    options = parser.parse_args()
    machine, cluster = describe_machine(), set_up(options.name)
    names = [(name, f"{name}-{number}") for number in range(options.repetitions) for name in options.only]
    acts = {job: partial(course, FAULTS[name]) for name, job in names}
    with job_namespace(cluster, "escalations") as namespace, running(cluster, namespace, Trials(acts, 1)) as outcomes:
        courses: dict[str, list[Course]] = {name: [] for name in options.only}
        for name, job in names:
            courses[name].append(outcomes[job].result())
    until_all_are_gone(Kubectl(cluster.kubeconfig))
    shown = table(courses, machine)
    print(shown)
    if options.write:
        write_section("escalations", shown)
    return 0 if all(one.attempts == FAULTS[name].attempts for name, found in courses.items() for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
