"""Measure the same kills of ranks on kind with restarts in place and with new pods: killed rank → next training step.

    python -m tests.benchmarks.restarts --kills 20 --write

Each of two jobs of two pods with two ranks loses random ranks by SIGKILL, the same in both, each after a checkpoint
later than any before. All times are of this machine's clock. It also checks that each killed rank is blamed, that
restarts in place leave the pods alone, and that the weights of both jobs are those of a third one without a kill, bit
for bit. A job avoids a node after two failures; here are two nodes, so some kills with new pods take 30 s longer: they
are counted, and not in the median. Exit code 1: a check failed.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch

from ddpjob.api.objects import Json
from ddprun.reporting.metrics import read_rows
from tests.benchmarks.report import describe_machine, parser_of, print_table, table_of
from tests.ddptrain.runs import final_weights
from tests.e2e.demo import say, set_up
from tests.e2e.kubectl import Kubectl, until
from tests.e2e.namespace import job_namespace, until_all_are_gone
from tests.e2e.trials import Outcome, Trial, Trials, running
from tests.kind.cluster import DEFAULT_NAME

NODES, RANKS = 2, 2
EVERY = 5  # steps between checkpoints
_EPOCHS = 16
_SECONDS = 300.0


@dataclass(frozen=True)
class Course:
    """What happened to one job.

    Attributes:
        seconds: of each kill, until the next training step; without those that waited for a node.
        waited: how many had no node to start on at first, because each had failed twice and was avoided.
        blamed: how many of the killed ranks are in the status.
        pods: how many different pods the job had.
    """

    outcome: Outcome
    seconds: Sequence[float]
    waited: int
    blamed: int
    pods: int


def course(trial: Trial, victims: Sequence[int], grant: int | None) -> Course:
    """Train a job, and kill these ranks one after the other.

    Args:
        grant: how many restarts in place it may have; None for as many as the operator grants.
    """
    policy = {"maxRestarts": 1000, "maxTotalRestarts": 1000, "backoff": {"initialSeconds": 0, "maxSeconds": 0}}
    env = [{"name": "DDPTRAIN_THREADS", "value": "1"}]
    env += [] if grant is None else [{"name": "DDPJOB_INPLACE_RESTARTS", "value": str(grant)}]
    flags = ("--epochs", str(_EPOCHS), "--checkpoint-every", str(EVERY), "--step-delay", "0.1")
    trial.apply(*flags, nprocPerNode=RANKS, restartPolicy=policy, env=env)
    seconds, waited, blamed, pods, attempt = list[float](), 0, 0, set[str](), 1
    for number, victim in enumerate(victims, start=1):
        _until_saved(trial, number)
        pods |= {pod["metadata"]["uid"] for pod in trial.pods().values()}
        killed = trial.kill_rank(*divmod(victim, RANKS))
        took = _first_step(trial, number + 1) - killed
        blamed += victim == trial.until("the blame", partial(_blamed, number))["rank"]
        say(f"{trial.name}: kill {number} of {len(victims)}, rank {victim}: {took:.2f} s")
        before, attempt = attempt, trial.namespace.status(trial.name)["attempt"]
        is_abandoned = attempt > before + 1  # the attempt between them
        waited += is_abandoned
        seconds += [] if is_abandoned else [took]
    done = trial.until_finished()
    pods |= {pod["metadata"]["uid"] for pod in trial.pods().values()}
    return Course(done, seconds, waited, blamed, len(pods))


def _until_saved(trial: Trial, run: int) -> None:
    """Wait until this run has saved a checkpoint, and trains on."""

    def look() -> bool:
        steps = [row["step"] for row in read_rows(trial.folder) if row["event"] == "train" and row["run"] == run]
        return len(steps) > 2 * EVERY

    until(f"run {run} of {trial.name} with a checkpoint", look, seconds=_SECONDS)


def _first_step(trial: Trial, run: int) -> float:
    def look() -> float | None:
        rows = read_rows(trial.folder)
        return next((row["time"] for row in rows if row["event"] == "train" and row["run"] == run), None)

    return until(f"the first step of run {run} of {trial.name}", look, seconds=_SECONDS)


def _blamed(number: int, job: Json) -> Json | None:
    """Return the failure with this number, from 1, as soon as the status has it."""
    status = job.get("status", {})
    if status.get("restarts", 0) < number:
        return None
    lives = status["currentAttempt"].get("inPlace", {}).get("failures", [])
    newest: Json = ((status.get("failures") or lives) or [{}])[-1]
    return newest


def undisturbed(trial: Trial) -> Outcome:
    """Train the same job without a kill."""
    return course(trial, (), None).outcome


def table(in_place: Course, new_pods: Course, is_same: bool, machine: str) -> str:
    """Return the result as a Markdown table."""
    courses, kills = (in_place, new_pods), len(in_place.seconds) + in_place.waited
    rows = {
        "killed rank → next training step, median": [f"{statistics.median(one.seconds):.2f} s" for one in courses],
        "slowest": [f"{max(one.seconds):.2f} s" for one in courses],
        "fastest": [f"{min(one.seconds):.2f} s" for one in courses],
        "not in these figures: 30 s longer, because each node had failed twice": [str(one.waited) for one in courses],
        "attempts, pods that were created": [f"{one.outcome.status['attempt']}, {one.pods}" for one in courses],
        "the killed rank is blamed": [f"{one.blamed} of {kills}" for one in courses],
        "weights of an undisturbed run, bit for bit": ["yes" if is_same else "**no**"] * 2,
    }
    shown = table_of(("", "in place", "new pods"), [[what, *cells] for what, cells in rows.items()])
    return f"{shown}\n\n{kills} kills each, two pods of two ranks, on {machine}."


def _is_same(one: Outcome, other: Outcome) -> bool:
    mine, theirs = final_weights(one.folder), final_weights(other.folder)
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


def main() -> int:
    """Measure, print the result, and return the exit code."""
    parser = parser_of("tests.benchmarks.restarts", __doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--name", default=DEFAULT_NAME, help="kind cluster to use or create (default: %(default)s)")
    options = parser.parse_args()
    machine, draw = describe_machine(), random.Random(5)
    victims = [draw.randrange(NODES * RANKS) for _ in range(options.kills)]
    cluster = set_up(options.name)
    acts = {
        "in-place": lambda trial: course(trial, victims, None),
        "new-pods": lambda trial: course(trial, victims, 0),
        "undisturbed": undisturbed,
    }
    with job_namespace(cluster, "restarts") as namespace, running(cluster, namespace, Trials(acts, 1)) as outcomes:
        futures: dict[str, Future[Course]] = dict(outcomes)
        in_place, new_pods = futures["in-place"].result(), futures["new-pods"].result()
        whole: Outcome = outcomes["undisturbed"].result()
        is_same = _is_same(whole, in_place.outcome) and _is_same(whole, new_pods.outcome)
    until_all_are_gone(Kubectl(cluster.kubeconfig))
    print_table(options, "restarts", table(in_place, new_pods, is_same, machine))
    is_right = all(one.blamed == options.kills for one in (in_place, new_pods))
    return 0 if is_same and is_right and in_place.pods == NODES else 1


if __name__ == "__main__":
    sys.exit(main())
