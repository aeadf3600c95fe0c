"""Measure what one plan costs: `python -m tests.benchmarks.plan`.

*First plan*: a new job, with no status and no pods; the plan renders all pods. *Re-plan*: all pods of the job run, the
status is recorded, and one pod changed. Its new version enters the cache, and the job is planned again, as after a
watch event. The time contains the cache, the selection of the job's pods and the plan, but no request. As in the
operator, a re-plan uses the spec that the plan before it parsed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from ddpjob.api import names
from ddpjob.engine.actions import EngineSettings, Plan
from ddpjob.engine.observed import Observed, owned_pods
from ddpjob.engine.plan import plan
from ddpjob_operator.controller.cache import Cache
from ddpjob_operator.controller.reconcile import ParsedJobs
from tests.benchmarks.report import describe_machine, parser_of, print_table, table_of

SIZES = (1, 8, 64, 1000, 4096)
AIMS_MS = {1: 1.0, 1000: 5.0}
"""The longest re-plan for a number of nodes."""
UID = "0a1b2c3d-0000-4000-8000-000000000000"
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
SETTINGS = EngineSettings()
SECONDS_PER_MEASUREMENT = 1.0


class Job:
    """A job whose pods and status are in a cache, without an API server."""

    def __init__(self, nodes: int) -> None:
        self.cache = Cache()
        self.version = 0
        meta = {"name": "bench", "namespace": "default", "uid": UID, "generation": 1, "resourceVersion": "1"}
        spec = {
            "image": "ddpjob/trainer:0.1.0",
            "args": ["train", "--epochs", "2"],
            "numNodes": nodes,
            "nprocPerNode": 8,
            "resources": {"limits": {"nvidia.com/gpu": 8, "cpu": 16, "memory": "64Gi"}},
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
            "checkpoint": {"claimName": "checkpoints"},
        }
        self.body: dict[str, Any] = {"metadata": meta, "spec": spec, "status": {}}
        self.service: dict[str, Any] | None = None
        self.last: dict[str, Any] = {}
        self.parsed = ParsedJobs()

    def plan(self, *, live: bool = False) -> Plan:
        pods = owned_pods(self.body, self.cache.pods(self.body["metadata"]["namespace"], UID))
        observed = Observed(pods, service=self.service, live=live, token_key=b"k" * 32)
        return plan(self.body, observed, NOW, SETTINGS, self.parsed.parse)

    def first_plan(self) -> Plan:
        """Plan as an operator does that has not seen the job before."""
        self.parsed.forget(UID)
        return self.plan()

    def run(self) -> None:
        """Carry out plans until all pods run and the status shows it."""
        for _ in range(10):
            made = self.plan(live=True)
            if made.status is None and not made.creates:
                return
            if made.status is not None:
                self.body = self.body | {"status": json.loads(json.dumps(made.status))}
            for create in (create for phase in made.creates for create in phase):
                if create.resource is names.PODS:
                    self.put(json.loads(json.dumps(create.body)))
                else:
                    self.service = create.body
        raise AssertionError("the job still writes after 10 plans")

    def put(self, pod: dict[str, Any]) -> None:
        """Store a new version of a pod that runs."""
        self.version += 1
        meta = pod["metadata"] | {"uid": f"uid-of-{pod['metadata']['name']}", "resourceVersion": str(self.version)}
        state = {"name": "trainer", "ready": True, "restartCount": 0, "state": {"running": {"startedAt": "2026-03-01"}}}
        kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
        status = {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": kind, "status": "True", "lastProbeTime": None} for kind in kinds],
            "containerStatuses": [state],
        }
        self.last = pod | {"metadata": meta, "spec": pod["spec"] | {"nodeName": "n"}, "status": status}
        self.cache.put(names.PODS, self.last)


def measure(nodes: int) -> dict[str, float]:
    """Return the milliseconds of a first plan and of a re-plan; the fastest of many."""
    first = Job(nodes)
    first.plan()
    running = Job(nodes)
    running.run()
    running.plan()
    changed = running.last

    def replan() -> None:
        running.put(changed)
        assert running.plan().status is None

    return {"first": _fastest(first.first_plan), "again": _fastest(replan)}


def _fastest(work: Callable[[], object]) -> float:
    """Return the shortest of many times: other work on the machine only adds to it."""
    times: list[float] = []
    until = time.monotonic() + SECONDS_PER_MEASUREMENT
    while time.monotonic() < until or len(times) < 5:
        begin = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - begin))
    return min(times)


def main() -> int:
    """Measure and print. The exit code is 0 if every aim for a re-plan is met, else 1."""
    parser = parser_of("tests.benchmarks.plan", __doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="NODES")
    options = parser.parse_args()
    machine = describe_machine(kubernetes=False)
    found = {nodes: measure(nodes) for nodes in options.sizes}
    rows = [[f"{nodes:,}", f"{ms['first']:.2f} ms", f"**{ms['again']:.2f} ms**"] for nodes, ms in found.items()]
    print_table(options, "plan", f"{table_of(('nodes', 'first plan', 're-plan'), rows, names=0)}\n\nOn {machine}.")
    return 1 if any(ms["again"] > AIMS_MS.get(nodes, float("inf")) for nodes, ms in found.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
