"""Measure what follows Kueue's admission and its eviction: the time until all pods exist, and until all are deleted.

    python -m tests.benchmarks.admission            # table on standard output
    python -m tests.benchmarks.admission --write    # and into docs/benchmarks.md

The control plane is Kubernetes 1.36 without a scheduler. The benchmark is Kueue: it admits and evicts the Workload of a
job with one request each, and the time begins before that request is sent. It also binds the pods, to a node without a
machine (tests/gangs), so that a deletion waits for a kubelet as on a cluster. The floor is the time for the same
creates and deletes without an operator, sent at once by one client. Floor and operator alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json, condition
from tests import queues
from tests.benchmarks.api_server import ApiServer, WatchEndedError, job_of, pods_of
from tests.benchmarks.report import describe_machine, percentile95, write_section
from tests.controller.operator_process import OperatorProcess
from tests.gangs.cluster import Kubernetes136
from tests.gangs.nodes import SLOT, Nodes
from tests.kind import prepare
from tests.kind.toolchain import GANGS_VERSION

SPACE, NODE, NODES = "admission", "node", 64
BOUND = "spec.nodeName!="
"""Which pods kubelets see."""
STOP_SECONDS = 0.5
"""How long a deleted pod runs on, so that its removal is not measured."""
SECONDS = 30.0
ADMITTED = "Admitted until all pods exist"
EVICTED, ALL_EVICTED = "Evicted until the last DELETE can be sent", "Evicted until all pods are deleted"
AT_ONCE = 28
"""Requests of one job that the operator sends at the same time, with its default settings (``Slots``)."""
CREATED, DELETED = "floor: the same pods, POSTed at once", "floor: the same pods, DELETEd at once"
DIRECT = "POST of a job without a queue until all pods exist"
QUEUED = "POST of a job in a queue until its Workload exists"
ROWS = (ADMITTED, CREATED, EVICTED, ALL_EVICTED, DELETED, DIRECT, QUEUED)
AIMS = {ADMITTED: 150.0, EVICTED: 100.0}
"""In milliseconds, at the 95th percentile."""
_TIME = "2026-01-01T00:00:00Z"


class Kueue(ApiServer):
    """A client that plays Kueue and the scheduler, and notes what happens to pods, Workload and job."""

    watched = (*ApiServer.watched, names.WORKLOADS)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.known: dict[Resource, dict[str, Json]] = {resource: {} for resource in self.watched}
        self._changed = asyncio.Event()
        self._counts: Callable[[Resource, Json], bool] = lambda resource, found: False
        self._stamps: dict[str, float] = {}

    def _take(self, resource: Resource, event: Json) -> None:
        found = event["object"]
        name = found["metadata"]["name"]
        if event["type"] == "DELETED":
            self.known[resource].pop(name, None)
        else:
            self.known[resource][name] = found
            if self._counts(resource, found):
                self._stamps.setdefault(name, time.perf_counter())
        self._changed.set()

    async def until(self, what: str, probe: Callable[[], Any]) -> Any:
        """Wait until an event makes the probe true."""
        try:
            async with asyncio.timeout(SECONDS):
                while not (value := probe()):
                    self._changed.clear()
                    changed = asyncio.create_task(self._changed.wait())
                    await asyncio.wait({changed, *self._watches}, return_when=asyncio.FIRST_COMPLETED)
                    for watch in self._watches:
                        if watch.done():
                            watch.result()
                return value
        except TimeoutError as error:
            raise RuntimeError(f"timed out: {what}") from error

    async def timed(
        self, send: Awaitable[Any], number: int, counts: Callable[[Resource, Json], bool]
    ) -> Sequence[float]:
        """Return the milliseconds from a request until this was so for each of a number of objects, in their order."""
        self._counts, self._stamps, begin = counts, {}, time.perf_counter()
        await send
        await self.until("what is measured", lambda: len(self._stamps) >= number)
        return [1000 * (stamp - begin) for stamp in sorted(self._stamps.values())]

    async def post(self, resource: Resource, body: bytes) -> None:
        await self._post(resource, body)

    async def post_all(self, bodies: Sequence[bytes]) -> None:
        await asyncio.gather(*(self._post(names.PODS, body) for body in bodies))

    async def delete_all(self) -> None:
        await asyncio.gather(*(self._delete(names.PODS, f"/{name}") for name in self.known[names.PODS]))

    async def run_pods(self) -> None:
        """Bind all pods, and wait until the kubelet runs them."""
        await asyncio.gather(*(self._bind(name) for name in self.known[names.PODS]))
        await self.until("all pods run", lambda: all(_is_running(pod) for pod in self.known[names.PODS].values()))

    async def _bind(self, name: str) -> None:
        body = {"metadata": {"name": name}, "target": {"kind": "Node", "name": NODE}}
        await self._answer(self._session.post(f"{self._url(names.PODS)}/{name}/binding", json=body))

    async def set_status(self, workload: Json, status: Json, **conditions: str) -> None:
        """Patch a Workload as Kueue does."""
        known = {each["type"]: each for each in (workload.get("status") or {}).get("conditions") or ()}
        for kind, reason in conditions.items():
            value = {"status": "True", "reason": reason, "message": "by the benchmark", "lastTransitionTime": _TIME}
            known[kind] = {"type": kind} | value
        body = json.dumps({"status": status | {"conditions": [*known.values()]}}).encode()
        url = f"{self._url(names.WORKLOADS)}/{workload['metadata']['name']}/status"
        kind = {"Content-Type": "application/merge-patch+json"}
        await self._answer(self._session.patch(url, data=body, headers=kind))

    async def recover(self) -> None:
        """Delete everything, and open the watches again."""
        for resource in (names.DDPJOBS, names.PODS, names.SERVICES, names.WORKLOADS):
            await self._delete(resource, "?gracePeriodSeconds=0")
        await asyncio.sleep(2)
        for found in self.known.values():
            found.clear()
        await self._open_watches()

    async def clear(self) -> None:
        """Delete everything, and wait until nothing is left."""
        for resource in (names.DDPJOBS, names.PODS, names.SERVICES, names.WORKLOADS):
            await self._delete(resource, "?gracePeriodSeconds=0")
        await self.until("nothing is left", lambda: not any(self.known.values()))
        gc.collect()
        await asyncio.sleep(0.2)


def _is_running(pod: Json) -> bool:
    return bool(pod["status"]["phase"] == "Running")


def _is_pod(resource: Resource, found: Json) -> bool:
    return resource is names.PODS


def _is_deleted_pod(resource: Resource, found: Json) -> bool:
    return resource is names.PODS and "deletionTimestamp" in found["metadata"]


def _is_workload(resource: Resource, found: Json) -> bool:
    return resource is names.WORKLOADS


async def repetition(api: Kueue, number: int) -> dict[str, float]:
    """Return the milliseconds of each row."""
    found: dict[str, float] = {}
    parts = (with_queue, without_operator) if number % 2 else (without_operator, with_queue)
    for part in parts:
        found |= await part(api, number)
    direct = json.dumps(_job(f"direct-{number}")).encode()
    *_, found[DIRECT] = await api.timed(api.post(names.DDPJOBS, direct), NODES, _is_pod)
    await api.clear()
    return found


async def without_operator(api: Kueue, number: int) -> dict[str, float]:
    """Return the times of creates and deletes without an operator."""
    bodies = [_with_slots(body) for body in pods_of(f"floor-{number}", NODES, SPACE)]
    *_, created = await api.timed(api.post_all(bodies), NODES, _is_pod)
    await api.run_pods()
    *_, deleted = await api.timed(api.delete_all(), NODES, _is_deleted_pod)
    await api.clear()
    return {CREATED: created, DELETED: deleted}


async def with_queue(api: Kueue, number: int) -> dict[str, float]:
    """Return the times of a job that Kueue admits and evicts."""
    name = f"queued-{number}"
    body = _job(name)
    body["metadata"]["labels"] = {names.LABEL_QUEUE: "research"}
    *_, queued = await api.timed(api.post(names.DDPJOBS, json.dumps(body).encode()), 1, _is_workload)
    await api.until("the job waits", lambda: _reason(api.known[names.DDPJOBS].get(name)) == "WaitingForQuota")
    await asyncio.sleep(0.2)
    (workload,) = api.known[names.WORKLOADS].values()
    assigned = {"name": "main", "flavors": {"cpu": queues.FLAVOR}}
    admission = {"admission": {"clusterQueue": "all", "podSetAssignments": [assigned]}}
    send = api.set_status(workload, admission, QuotaReserved="QuotaReserved", Admitted="Admitted")
    *_, admitted = await api.timed(send, NODES, _is_pod)
    await api.run_pods()
    await api.until("PodsReady", lambda: condition(_only(api, names.WORKLOADS).get("status"), "PodsReady"))
    await api.until("the job runs", lambda: _only(api, names.DDPJOBS)["status"]["state"] == "Running")
    await asyncio.sleep(0.2)
    send = api.set_status(_only(api, names.WORKLOADS), {}, Evicted="Preempted")
    evicted = await api.timed(send, NODES, _is_deleted_pod)
    await api.until("all pods are gone", lambda: not api.known[names.PODS])
    await api.clear()
    return {ADMITTED: admitted, EVICTED: evicted[NODES - AT_ONCE - 1], ALL_EVICTED: evicted[-1], QUEUED: queued}


def _only(api: Kueue, resource: Resource) -> Json:
    (found,) = api.known[resource].values()
    return found


def _reason(job: Json | None) -> str:
    return str(condition((job or {}).get("status"), "Running").get("reason"))


def _job(name: str) -> Json:
    """Return a job whose pods fit on the node of the benchmark."""
    job = copy.deepcopy(job_of(name, NODES))
    job["spec"]["resources"] = {"limits": {SLOT: 1}}
    return job


def _with_slots(body: bytes) -> bytes:
    """Return the body of a pod that fits on the node of the benchmark, and that the garbage collector leaves alone."""
    pod = json.loads(body)
    del pod["metadata"]["ownerReferences"]
    for container in pod["spec"]["containers"]:
        if container["name"] == "trainer":
            container["resources"] = {"limits": {SLOT: 1}}
    return json.dumps(pod).encode()


async def measure(plane: Kubernetes136, repetitions: int) -> dict[str, list[float]]:
    """Return the milliseconds of all repetitions, by row. The first one, of cold code, is not among them."""
    found: dict[str, list[float]] = {row: [] for row in ROWS}
    async with Kueue.reached_by(plane, SPACE) as api:
        for number in range(repetitions + 1):
            for row, ms in (await _repeated(api, number)).items():
                if number:
                    found[row].append(ms)
            print(f"repetition {number}", file=sys.stderr, flush=True)
    return found


async def _repeated(api: Kueue, number: int) -> dict[str, float]:
    """Return a repetition; begin again if the server closed a watch, which it does to slow ones."""
    while True:
        try:
            return await repetition(api, number)
        except WatchEndedError as error:
            print(f"{error}: measuring again", file=sys.stderr, flush=True)
            await api.recover()


def table(found: dict[str, list[float]], machine: str) -> str:
    """Return the times as a Markdown table."""
    lines = [
        f"| job of {NODES} nodes | median | 95th percentile | aim at the 95th percentile |",
        "|---|---:|---:|---:|",
    ]
    for row in ROWS:
        high, aim = percentile95(found[row]), AIMS.get(row)
        verdict = f"{aim:.0f} ms ({'held' if high <= aim else 'missed'})" if aim else ""
        lines.append(f"| {row} | {statistics.median(found[row]):.1f} ms | **{high:.1f} ms** | {verdict} |")
    return "\n".join([*lines, "", f"{len(found[ADMITTED])} repetitions each, in turns, on {machine}."])


def main() -> int:
    """Measure and print. Return 0 if the aims are held, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.admission", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="replace the table in docs/benchmarks.md")
    options = parser.parse_args()
    prepare.ensure("etcd", *Kubernetes136.programs.values())
    machine = describe_machine(version=GANGS_VERSION)
    with (
        contextlib.redirect_stdout(sys.stderr),
        Kubernetes136(scheduler=False) as plane,
        Nodes(plane, fields=BOUND) as nodes,
    ):
        plane.make_namespace(SPACE)
        queues.install(plane)
        nodes.add(NODE, slots=2 * NODES)
        nodes.stop_seconds = STOP_SECONDS
        with OperatorProcess(plane, SPACE, kueue=True):
            found = asyncio.run(measure(plane, options.repetitions))
        nodes.check()
    text = table(found, machine)
    print(text)
    if options.write:
        write_section("admission", text)
    return 0 if all(percentile95(found[row]) <= aim for row, aim in AIMS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
