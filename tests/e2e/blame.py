"""Count which pod is blamed when a rank runs out of memory and its peer fails a moment later: `make soak` runs it.

    python -m tests.e2e.blame --repetitions 100

Each job has two nodes. In every other job rank 0, else rank 1, allocates memory until the kernel kills it; the peer
loses its connection and ends within milliseconds. The failure in the status must be OOMKilled, on the right node. The
jobs run several at a time on one kind cluster, which is created if necessary. Exit code 1: a wrong pod was blamed.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ddpjob.api.objects import Json
from tests.e2e.demo import say, set_up
from tests.e2e.kubectl import Kubectl
from tests.e2e.namespace import job_namespace, until_all_are_gone
from tests.e2e.trials import Act, Trial, Trials, running
from tests.kind.cluster import DEFAULT_NAME

REPETITIONS = 100
AT_ONCE = 7
REASON = "OOMKilled"
# The last of a flag counts: the training need not be slow, because nothing is done to it from outside.
ARGUMENTS = ("--step-delay", "0.05")
_RESOURCES = {"requests": {"memory": "256Mi"}, "limits": {"memory": "1Gi"}}
_SECONDS = 1200.0


@dataclass(frozen=True)
class Blame:
    """One job: the rank that ran out of memory, the failure in its status, and how its pods ended."""

    victim: int
    failure: Json
    ends: dict[int, Json]

    @property
    def is_right(self) -> bool:
        return (self.failure["reason"], self.failure.get("nodeRank")) == (REASON, self.victim)

    @property
    def blamed(self) -> str:
        return f"{self.failure['reason']}, node_rank {self.failure.get('nodeRank', 'unknown')}"


def rank_out_of_memory(trial: Trial, victim: int) -> Blame:
    """Apply a job whose rank ``victim`` runs out of memory, wait for the failure in its status, and delete the job."""
    trial.apply("--chaos", f"oom:{victim}:10", *ARGUMENTS, resources=_RESOURCES)
    failures = trial.until("a failure", lambda job: job.get("status", {}).get("failures"), seconds=_SECONDS)
    ends = {node_rank: _end_of(pod) for node_rank, pod in trial.pods().items()}
    trial.kubectl("delete", "ddp", trial.name, "--wait=false")
    return Blame(victim, failures[0], ends)


def _end_of(pod: Json) -> Json:
    (container,) = pod.get("status", {}).get("containerStatuses") or ({},)
    return dict(container.get("state", {}).get("terminated") or {})


def acts(repetitions: int) -> dict[str, Act]:
    """Return the trials by name; each prints what was blamed."""
    lock, done, begin = threading.Lock(), Counter[bool](), time.monotonic()

    def act(trial: Trial, victim: int) -> Blame:
        blame = rank_out_of_memory(trial, victim)
        with lock:
            done[blame.is_right] += 1
            count, wrong, seconds = done.total(), done[False], time.monotonic() - begin
            say(f"{count} of {repetitions}, {wrong} wrong, {seconds:.0f} s: rank {victim} → {blame.blamed}")
            if not blame.is_right:
                say(json.dumps({"failure": blame.failure, "ends": blame.ends}))
        return blame

    return {f"oom-{n}": lambda trial, victim=n % 2: act(trial, victim) for n in range(repetitions)}


def table(blames: Iterable[Blame]) -> str:
    """Return what was blamed, by the rank that ran out of memory, as a Markdown table."""
    counts = Counter((blame.victim, blame.blamed, blame.is_right) for blame in blames)
    lines = ["| rank out of memory | blamed | jobs | |", "|---:|---|---:|---|"]
    for (victim, blamed, is_right), count in sorted(counts.items()):
        lines.append(f"| {victim} | {blamed} | {count} | {'' if is_right else '**wrong**'} |")
    return "\n".join(lines)


def main() -> int:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.blame", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--name", default=DEFAULT_NAME, help="kind cluster to use or create (default: %(default)s)")
    options = parser.parse_args()
    cluster = set_up(options.name)
    trials = Trials(acts(options.repetitions), AT_ONCE)
    with job_namespace(cluster, "blame") as namespace, running(cluster, namespace, trials) as outcomes:
        blames = [outcome.result() for outcome in outcomes.values()]
    until_all_are_gone(Kubectl(cluster.kubeconfig))
    print(table(blames))
    return 0 if all(blame.is_right for blame in blames) else 1


if __name__ == "__main__":
    sys.exit(main())
