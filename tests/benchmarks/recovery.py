"""Measure the time from `kubectl apply` to the first step, and from a killed pod to the next step, in parts.

    python -m tests.benchmarks.recovery            # table on standard output
    python -m tests.benchmarks.recovery --write    # and into docs/develop/benchmarks.md

It runs manifests/examples/mnist-cpu.yaml on the kind cluster of the tests, two pods on two nodes, two processes each.
During training it sends SIGKILL to node 1's launcher. The parts (tests.benchmarks.recovery_parts) are measured on this
machine's clock: of the watch events of the job and its pods, and of the trainer's metrics.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddprun.reporting.metrics import read_rows
from tests.benchmarks.recovery_parts import MEANING, PARTS, Recovery, Seen, recovery
from tests.benchmarks.report import describe_machine, parser_of, print_table, table_of
from tests.e2e import nodes, storage
from tests.e2e.demo import set_up
from tests.e2e.jobs import JOB_KIND, mnist_job
from tests.e2e.kubectl import Kubectl
from tests.e2e.namespace import CLAIM, job_namespace, shared_claim, until_all_are_gone
from tests.kind.cluster import DEFAULT_NAME, Cluster
from tests.kind.toolchain import binary
from tests.processes import end

NAME = "recovery"
REPETITIONS = 10
PACE = ("--step-delay", "0.03")
_SAVED = 50


@dataclass(frozen=True)
class Life:
    """One job that lost a pod; ``first_step`` in seconds from the job's creation."""

    first_step: float
    recovery: Recovery


def live(cluster: Cluster) -> Life:
    """Apply the example, kill node 1's launcher during training, and wait for the end."""
    with job_namespace(cluster, NAME) as namespace:
        namespace.kubectl.apply(shared_claim())
        with _watch(namespace.kubectl, JOB_KIND) as jobs, _watch(namespace.kubectl, "pods") as pods:
            applied = time.time()
            namespace.kubectl.apply(mnist_job(NAME, *PACE, claim=CLAIM))
            namespace.until_step(NAME, _SAVED + 10, checkpoint=_SAVED)
            killed = nodes.kill_first_process(max(namespace.pods(), key=lambda pod: str(pod["metadata"]["name"])))
            namespace.until_finished(NAME)
            return _life([*jobs, *pods], applied, killed, namespace.volume)


def _life(seen: list[Seen], applied: float, killed: float, volume: Path) -> Life:
    rows = read_rows(volume)
    (claimed,) = (row["time"] for row in rows if row["event"] == "start" and row["run"] == 2)
    before, after = ([row for row in rows if row["event"] == "train" and row["run"] == run] for run in (1, 2))
    parts = recovery(sorted(seen, key=lambda one: one.time), killed, claimed, after[0]["time"])
    return Life(before[0]["time"] - applied, parts)


@contextmanager
def _watch(kubectl: Kubectl, kind: str) -> Iterator[list[Seen]]:
    """Provide a list that grows with every change of the namespace's objects of a kind."""
    head: list[str | Path] = [binary("kubectl"), "--kubeconfig", kubectl.kubeconfig, "--namespace", kubectl.namespace]
    command = [*head, "get", kind, "--watch", "--output-watch-events", "--output=json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    seen: list[Seen] = []
    reader = threading.Thread(target=_read, args=(process, seen), daemon=True)
    reader.start()
    try:
        yield seen
    finally:
        end(process)
        reader.join()


def _read(process: subprocess.Popen[str], seen: list[Seen]) -> None:
    """Read events, one in each line."""
    for line in process.stdout or ():
        event = json.loads(line)
        seen.append(Seen(time.time(), event["object"], gone=event["type"] == "DELETED"))


def table(lives: list[Life], machine: str) -> str:
    """Return the result as a Markdown table."""
    rows: dict[str, Callable[[Life], float]] = {
        "apply → first training step": lambda life: life.first_step,
        "**killed pod → next training step**": lambda life: life.recovery.total,
        **{f"{name}: {MEANING[name]}": (lambda life, name=name: life.recovery.parts[name]) for name in PARTS},
        "the operator's share: ending and creation (aim: 0.15 s)": lambda life: life.recovery.operator,
        "beside creation, deletion: until the pods of attempt 1 have ended": lambda life: life.recovery.deletion,
    }

    def cell(times: list[float]) -> str:
        return f"{statistics.median(times):.2f} s ({min(times):.2f}, {max(times):.2f})"

    cells = [[name, cell([of(life) for life in lives])] for name, of in rows.items()]
    shown = table_of(("", "median (fastest, slowest)"), cells)
    return f"{shown}\n\n{len(lives)} jobs, one after the other, on {machine}."


def main() -> None:
    parser = parser_of("tests.benchmarks.recovery", __doc__)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--name", default=DEFAULT_NAME, help="kind cluster to use or create (default: %(default)s)")
    options = parser.parse_args()
    machine = describe_machine()
    cluster = set_up(options.name)
    storage.put_mnist(cluster.initial)
    lives = [live(cluster) for _ in range(options.repetitions)]
    until_all_are_gone(Kubectl(cluster.kubeconfig))
    print_table(options, "recovery", table(lives, machine))


if __name__ == "__main__":
    main()
