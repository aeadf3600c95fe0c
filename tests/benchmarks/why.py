"""How long `ddpjob why JOB -o json` takes as a command, on a kind cluster: `python -m tests.benchmarks.why`.

The commands alternate, so that other work on the machine changes all of them. The time includes the start of Python.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from statistics import median

from ddpjob.api.objects import Json
from tests.benchmarks.report import describe_machine, write_section
from tests.e2e.demo import set_up
from tests.e2e.jobs import shell_job
from tests.e2e.kubectl import Kubectl, until
from tests.e2e.namespace import job_namespace, until_all_are_gone
from tests.kind.cluster import DEFAULT_NAME, Cluster

SECTION = "why"
LIMIT = 1.0
_ONCE: Json = {"restartPolicy": {"maxRestarts": 0}}
_RAISE = "exec python3 -c 'raise ValueError(3)'"
# What the job shows, its spec, and the stage that the command has to name.
JOBS: Mapping[str, tuple[str, Json, str]] = {
    "failed": ("an exception, which is in the log of its pod", shell_job("failed", _RAISE, **_ONCE), "Crash"),
    "placement": (
        "a pod that no node fits",
        shell_job("placement", "true", resources={"requests": {"cpu": "4000"}}),
        "Placement",
    ),
    "claim": (
        "a claim that does not exist",
        shell_job("claim", "true", checkpoint={"mountPath": "/c", "claimName": "no-such-claim"}),
        "Volume",
    ),
    "image": ("an image that cannot be pulled", shell_job("image", "true", image="localhost:1/no/such:image"), "Image"),
    "running": ("a program that runs", shell_job("running", "sleep 600"), "FirstStep"),
}


def measure(cluster: Cluster, repetitions: int) -> dict[str, list[float]]:
    """Return the wall times of each command, which names the right stage each time."""
    with job_namespace(cluster, "why") as namespace:
        namespace.kubectl.apply(*(job for _, job, _ in JOBS.values()))

        def all_fit() -> bool:
            return all(seconds(cluster, namespace.kubectl, name, stage) for name, (_, _, stage) in JOBS.items())

        until("each job is in its stage", all_fit, seconds=180)
        times: dict[str, list[float]] = {name: [] for name in JOBS}
        for _ in range(repetitions):
            for name, (_, _, stage) in JOBS.items():
                took = seconds(cluster, namespace.kubectl, name, stage)
                assert took is not None, f"{name} is no longer in stage {stage}"
                times[name].append(took)
        return times


def seconds(cluster: Cluster, kubectl: Kubectl, name: str, stage: str) -> float | None:
    """Return the wall time of one command; None if it names another stage."""
    words = [sys.executable, "-m", "ddpjob.cli.main", "why", name, "-n", kubectl.namespace, "-o", "json"]
    env = os.environ | {"KUBECONFIG": str(cluster.kubeconfig)}
    begin = time.monotonic()
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True)
    took = time.monotonic() - begin
    return took if json.loads(done.stdout)["stage"] == stage else None


def table(times: Mapping[str, list[float]], machine: str) -> str:
    """Return the result as a Markdown table."""
    lines = ["| the job shows | `stage` | median | fastest | slowest |", "|---|---|---:|---:|---:|"]
    for name, found in times.items():
        what, _, stage = JOBS[name]
        values = " | ".join(f"{value:.2f} s" for value in (median(found), min(found), max(found)))
        lines.append(f"| {what} | `{stage}` | {values} |")
    count = max(map(len, times.values()))
    return "\n".join([*lines, "", f"{count} commands each, on {machine}."])


def main() -> int:
    """Measure and print the result. The exit code is 1 if a median exceeds the aim."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.why", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--name", default=DEFAULT_NAME, help="kind cluster to use or create (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="replace the table in docs/develop/benchmarks.md")
    options = parser.parse_args()
    cluster = set_up(options.name)
    times = measure(cluster, options.repetitions)
    machine = describe_machine()
    until_all_are_gone(Kubectl(cluster.kubeconfig))
    shown = table(times, machine)
    print(shown)
    if options.write:
        write_section(SECTION, shown)
    return int(any(median(found) > LIMIT for found in times.values()))


if __name__ == "__main__":
    sys.exit(main())
