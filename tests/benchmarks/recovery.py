"""Measure the time from `kubectl apply` to the first step, and from the loss of a pod to the next step.

    python -m tests.benchmarks.recovery            # table on standard output
    python -m tests.benchmarks.recovery --write    # and into docs/benchmarks.md

It runs manifests/examples/mnist-cpu.yaml on the kind cluster of the tests: two pods on two nodes, two processes each.
The times are those of the trainer's rows in metrics.jsonl. They include scheduling, container start, the import of
torch, the rendezvous, the data and the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass

from ddpjob.api.wire import Json
from tests.benchmarks.report import describe_machine, write_section
from tests.e2e.demo import set_up
from tests.e2e.jobs import mnist_job
from tests.e2e.kubectl import Kubectl
from tests.e2e.namespace import CLAIM, JobNamespace, claim_of, job_namespace, until_all_are_gone
from tests.e2e.reference import metrics_of
from tests.kind.cluster import DEFAULT_NAME, Cluster

NAME = "recovery"
REPETITIONS = 5


@dataclass(frozen=True)
class Life:
    """One job that lost a pod; times in seconds."""

    first_step: float
    next_step: float
    lost_steps: int
    """The steps since the last checkpoint, which were trained twice."""


def live(cluster: Cluster) -> Life:
    """Apply the example, kill the pod of the last node during training, wait for the end, and return the times."""
    with job_namespace(cluster, NAME) as namespace:
        namespace.kubectl.apply(claim_of(namespace))
        applied = time.time()
        namespace.kubectl.apply(mnist_job(NAME, "--step-delay", "0.03", claim=CLAIM))
        namespace.until_step(NAME, 60, checkpoint=50)
        victim = max(pod["metadata"]["name"] for pod in namespace.pods())
        killed = time.time()
        namespace.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
        namespace.until_finished(NAME)
        before, after = (_steps(namespace, run) for run in (1, 2))
        return Life(
            first_step=before[0]["time"] - applied,
            next_step=after[0]["time"] - killed,
            lost_steps=before[-1]["step"] - after[0]["step"] + 1,
        )


def _steps(namespace: JobNamespace, run: int) -> list[Json]:
    rows = [json.loads(line) for line in metrics_of(namespace).read_text().splitlines()]
    return [row for row in rows if row["event"] == "train" and row["run"] == run]


def table(lives: list[Life], machine: str) -> str:
    """Return the result as a Markdown table."""
    columns = {
        "apply → first training step": [life.first_step for life in lives],
        "killed pod → next training step": [life.next_step for life in lives],
    }
    lines = ["| | median | fastest | slowest |", "|---|---:|---:|---:|"]
    lines += [
        f"| {n} | **{statistics.median(v):.1f} s** | {min(v):.1f} s | {max(v):.1f} s |" for n, v in columns.items()
    ]
    return "\n".join([*lines, "", f"{len(lives)} jobs, one after the other, on {machine}."])


def main() -> int:
    """Measure, print the result, and return exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recovery", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--name", default=DEFAULT_NAME, help="kind cluster to use or create (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/benchmarks.md")
    options = parser.parse_args()
    cluster = set_up(options.name)
    machine = describe_machine()
    lives = [live(cluster) for _ in range(options.repetitions)]
    until_all_are_gone(Kubectl(cluster.kubeconfig))
    result = {"benchmark": "recovery", "machine": machine, "lives": [vars(life) for life in lives]}
    shown = table(lives, machine)
    print(json.dumps(result, indent=2) if options.json else shown)
    if options.write:
        write_section("recovery", shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
