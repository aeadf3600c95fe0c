"""How long until a training steps: after `kubectl apply`, and again after one of its pods is killed.

    python -m tests.benchmarks.recovery            # table on standard output
    python -m tests.benchmarks.recovery --write    # and into docs/benchmarks.md

On the kind cluster of the tests, with manifests/examples/mnist-cpu.yaml: two pods on two nodes, two processes each. The
times are those of the trainer's own rows in metrics.jsonl, so scheduling, container start, the import of torch, the
rendezvous, the data and the checkpoint are all inside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass

from tests.benchmarks.report import describe_machine, write_section
from tests.e2e.demo import set_up
from tests.e2e.jobs import mnist_job
from tests.e2e.kubectl import Json, Kubectl
from tests.e2e.namespace import CLAIM, JobNamespace, claim_of, job_namespace, until_all_are_gone
from tests.e2e.reference import metrics_of
from tests.kind.cluster import DEFAULT_NAME, Cluster

NAME = "recovery"
REPETITIONS = 5


@dataclass(frozen=True)
class Life:
    """One job that lost a pod; seconds."""

    first_step: float
    next_step: float
    lost_steps: int
    """Steps that were trained twice: those since the last checkpoint."""


def live(cluster: Cluster) -> Life:
    """Apply the example, kill the pod of the last node in mid-training, wait for the end."""
    with job_namespace(cluster, NAME) as place:
        place.kubectl.apply(claim_of(place))
        applied = time.time()
        place.kubectl.apply(mnist_job(NAME, "--step-delay", "0.03", claim=CLAIM))
        place.until_step(NAME, 60, checkpoint=50)
        victim = max(pod["metadata"]["name"] for pod in place.pods())
        killed = time.time()
        place.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
        place.until_finished(NAME)
        before, after = (_steps(place, run) for run in (1, 2))
        return Life(
            first_step=before[0]["time"] - applied,
            next_step=after[0]["time"] - killed,
            lost_steps=before[-1]["step"] - after[0]["step"] + 1,
        )


def _steps(place: JobNamespace, run: int) -> list[Json]:
    rows = [json.loads(line) for line in metrics_of(place).read_text().splitlines()]
    return [row for row in rows if row["event"] == "train" and row["run"] == run]


def table(lives: list[Life], machine: str) -> str:
    """The result as a Markdown table."""
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
    """Exit code 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recovery", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--name", default=DEFAULT_NAME, help="kind cluster to use or make (default: %(default)s)")
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
