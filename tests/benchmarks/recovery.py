"""Measure the time from `kubectl apply` to the first step, and from a killed pod to the next step, in parts.

    python -m tests.benchmarks.recovery            # table on standard output
    python -m tests.benchmarks.recovery --write    # and into docs/develop/benchmarks.md

It runs manifests/examples/mnist-cpu.yaml on the kind cluster of the tests, two pods on two nodes, two processes each.
During training it sends SIGKILL to node 1's launcher. The parts are measured on this machine's clock: of the watch
events of the job and its pods, and of the trainer's metrics.

    killed ─▶ detection ─▶ settling ─▶ ending ─▶ creation ─▶ scheduling ─▶ start ─▶ rendezvous ─▶ first step

Each part ends with the moment that ``MEANING`` gives, and begins where the part before ended. The deletion of the other
pods goes on beside creation and scheduling, so it is measured from the end of *ending* and is no summand.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddprun.reporting.metrics import read_rows
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
MEANING = {
    "detection": "from the kill until the API server has the end of a pod",
    "settling": "until the API server has the end of the killed pod; the operator waits for the cause of the failure",
    "ending": "until the status has the next attempt",
    "creation": "until all its pods exist",
    "scheduling": "until all of them have a Kubernetes node",
    "start": "until all containers run, as the API server has it",
    "rendezvous": "until rank 0 has claimed its run: import of torch, rendezvous, data, reading the checkpoint",
    "first step": "until the first step is done",
}
PARTS = tuple(MEANING)


@dataclass(frozen=True)
class Seen:
    """A job or a pod as a watcher saw it.

    time: in seconds since the epoch. gone: it was deleted from the API server.
    """

    time: float
    obj: Json
    gone: bool = False

    @property
    def is_pod(self) -> bool:
        return names.LABEL_ATTEMPT in self.obj["metadata"].get("labels", {})

    @property
    def attempt(self) -> int:
        return int(self.obj["metadata"]["labels"][names.LABEL_ATTEMPT])

    @property
    def node_rank(self) -> int:
        return int(self.obj["metadata"]["labels"][names.LABEL_NODE_RANK])


@dataclass(frozen=True)
class Recovery:
    """One recovery; times in seconds.

    parts: by the names of ``PARTS``.
    deletion: from the end of *ending* until the containers of the first attempt have ended. A new pod that needs what
        they hold, such as a device, is not scheduled before.
    """

    parts: dict[str, float]
    deletion: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def operator(self) -> float:
        """The time between the API server's event of the killed pod and the existence of all new pods."""
        return self.parts["ending"] + self.parts["creation"]


def recovery(seen: Iterable[Seen], killed: float, claimed: float, stepped: float) -> Recovery:
    """Return the parts of the recovery from attempt 1 to attempt 2 of two nodes, after the kill of node 1's pod.

    killed: when the pod was killed. claimed, stepped: the times in the rows of the second run.
    """
    after = [one for one in seen if one.time >= killed]
    old, new = ([one for one in after if one.is_pod and one.attempt == attempt] for attempt in (1, 2))
    lost = [one for one in old if _is_lost(one)]
    ends = [
        min(one.time for one in lost),
        min(one.time for one in lost if one.node_rank == 1),
        min(one.time for one in after if not one.is_pod and one.obj.get("status", {}).get("attempt") == 2),
        _all(new, lambda one: True),
        _all(new, _has_node),
        _all(new, _runs),
        claimed,
        stepped,
    ]
    moments = dict(zip(PARTS, _never_earlier(killed, ends), strict=True))
    begins = [killed, *moments.values()]
    parts = {name: end - begin for begin, (name, end) in zip(begins, moments.items(), strict=False)}
    return Recovery(parts, max(0.0, _all(old, _has_ended) - moments["ending"]))


def _all(seen: Iterable[Seen], holds: Callable[[Seen], bool]) -> float:
    """Return when it first held for the last of the two pods."""
    first: dict[str, float] = {}
    for one in seen:
        if holds(one):
            first.setdefault(one.obj["metadata"]["name"], one.time)
    assert len(first) == 2, f"it held for {sorted(first)} only"
    return max(first.values())


def _never_earlier(begin: float, times: Iterable[float]) -> Iterator[float]:
    """Yield the times; one that is earlier than the one before counts as equal, because steps may overlap."""
    for moment in times:
        begin = max(begin, moment)
        yield begin


def _has_node(one: Seen) -> bool:
    return bool(one.obj["spec"].get("nodeName"))


def _runs(one: Seen) -> bool:
    return any("running" in state for state in _states(one.obj))


def _is_lost(one: Seen) -> bool:
    return _has_ended(one) or "deletionTimestamp" in one.obj["metadata"]


def _has_ended(one: Seen) -> bool:
    return one.gone or any("terminated" in state for state in _states(one.obj))


def _states(pod: Json) -> list[Json]:
    return [container.get("state") or {} for container in pod.get("status", {}).get("containerStatuses") or ()]


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
