"""Gangs on Kubernetes 1.36: its API server, scheduler and controllers, and nodes without machines. Part of `make soak`.

Each test has a namespace with an operator, and six nodes for one pod each.
"""

import itertools
from collections.abc import Iterator

import pytest
from aiohttp import web

from ddpjob.api import names
from ddpjob.api.objects import Json, condition
from tests.controller.operator_process import OperatorProcess
from tests.gangs.cell import Cell
from tests.gangs.cluster import GATES, Kubernetes136
from tests.install.test_rights_suffice import check_rights
from tests.processes import eventually
from tests.worlds.fault_proxy import Fault, FaultProxy
from tests.worlds.nodes import Nodes

GROUPS = names.KUBERNETES_GROUPS[1]
SECONDS = 240.0
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def plane() -> Iterator[Kubernetes136]:
    with Kubernetes136() as plane:
        for name, value in (("low", 10), ("high", 1000)):
            body = {"metadata": {"name": name}, "value": value}
            plane.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", body)
        yield plane


@pytest.fixture
def nodes(plane: Kubernetes136) -> Iterator[Nodes]:
    with Nodes(plane) as nodes:
        yield nodes
        nodes.check()


@pytest.fixture
def cell(plane: Kubernetes136, nodes: Nodes) -> Cell:
    return Cell(plane, nodes, f"gangs-{next(_numbers)}", 6)


@pytest.fixture
def operator(plane: Kubernetes136, cell: Cell) -> Iterator[OperatorProcess]:
    name = f"operator-{cell.namespace}"
    with OperatorProcess(plane, cell.namespace, name=name, gang_scheduler="kubernetes") as operator:
        yield operator


def state(cell: Cell, name: str) -> str:
    return str(cell.status(name).get("state"))


def runs(cell: Cell, name: str, attempt: int = 1) -> bool:
    status = cell.status(name)
    return (status.get("state"), status.get("attempt")) == ("Running", attempt)


def waits_whole(cell: Cell, name: str, nodes: int) -> bool:
    """Return whether a job has all its pods, none of them with a node, and says why."""
    found = cell.condition("Scheduled", name)
    is_shown = found.get("reason") == "Unschedulable" and "PodGroup" in found.get("message", "")
    pods = cell.pods(name, cell.status(name).get("attempt"))
    return is_shown and len(pods) == nodes and cell.bound(name) == 0


def test_gangs_are_bound_whole_and_leave_no_group(cell: Cell, nodes: Nodes, operator: OperatorProcess) -> None:
    nodes.train_seconds = 0.5
    sizes = {f"job-{number}": size for number, size in enumerate((4, 4, 1, 6, 3, 5, 2, 6))}
    for name, size in sizes.items():
        cell.train(name, size)
    for name in sizes:
        eventually(f"{name} succeeds", lambda name=name: state(cell, name) == "Succeeded", timeout=SECONDS)
        assert cell.status(name).get("restarts", 0) == 0 and cell.status(name)["attempt"] == 1
    assert len(nodes.gangs) == len(sizes) and all(gang.was_whole for gang in nodes.gangs.values())
    assert nodes.longest_partial() < 2
    eventually("no group is left", lambda: not cell.groups(GROUPS), timeout=SECONDS)


def test_a_restart_on_a_full_cluster_waits_for_its_own_nodes(
    cell: Cell, nodes: Nodes, operator: OperatorProcess
) -> None:
    nodes.stop_seconds = 1.0
    cell.train("first", 4)
    eventually("first runs", lambda: runs(cell, "first"), timeout=SECONDS)
    cell.train("second", 3)
    eventually("second waits whole", lambda: waits_whole(cell, "second", 3), timeout=SECONDS)
    cell.end(cell.pods("first")[2], 1)
    either = ("first", 2), ("second", 1)
    winner = eventually("one runs", lambda: next((job for job in either if runs(cell, *job)), None), timeout=SECONDS)
    for job in (winner, *(job for job in either if job != winner)):
        eventually(f"{job} runs", lambda job=job: runs(cell, *job), timeout=SECONDS)
        for pod in cell.pods(*job):
            cell.end(pod, 0)
    for name in ("first", "second"):
        eventually(f"{name} succeeds", lambda name=name: state(cell, name) == "Succeeded", timeout=SECONDS)
    assert cell.status("first")["restarts"] == 1 and cell.status("second").get("restarts", 0) == 0
    assert nodes.longest_partial() < 2
    eventually("no group is left", lambda: not cell.groups(GROUPS), timeout=SECONDS)


def test_preemption_takes_whole_gangs_and_costs_no_restart(cell: Cell, nodes: Nodes, operator: OperatorProcess) -> None:
    """Three gangs of two fill the nodes. The scheduler evicts two of them for a gang of three, all four pods."""
    evicted: set[tuple[str, str]] = set()

    def note(kind: str, pod: Json) -> None:
        target = condition(pod["status"], "DisruptionTarget")
        if target.get("reason") == "PreemptionByScheduler":
            evicted.add((pod["metadata"]["labels"][names.LABEL_JOB_NAME], pod["metadata"]["name"]))

    nodes.on_pod = note
    victims = ("low-0", "low-1", "low-2")
    for name in victims:
        cell.train(name, 2, priority="low")
        eventually(f"{name} runs", lambda name=name: state(cell, name) == "Running", timeout=SECONDS)
    cell.train("high", 3, priority="high")
    eventually("high runs", lambda: state(cell, "high") == "Running", timeout=SECONDS)
    eventually("two wait whole", lambda: sum(waits_whole(cell, name, 2) for name in victims) == 2, timeout=SECONDS)
    (spared,) = (name for name in victims if state(cell, name) == "Running")
    assert cell.status(spared)["attempt"] == 1
    assert sorted(job for job, _ in evicted) == sorted(2 * [*set(victims) - {spared}])
    nodes.train_seconds = 0.5
    for pod in cell.pods("high"):
        cell.end(pod, 0)
    for name in set(victims) - {spared}:
        eventually(f"{name} succeeds", lambda name=name: state(cell, name) == "Succeeded", timeout=SECONDS)
        status = cell.status(name)
        assert (status["attempt"], status.get("restartsCountedTowardsLimit", 0)) == (2, 0)
        assert [failure["reason"] for failure in status["failures"]] == ["Preempted"]
    assert nodes.longest_partial() < 2


@pytest.mark.parametrize("kind", ["podgroups", "pods", "status"])
def test_operator_killed_after_a_write_leaves_no_partial_gang(plane: Kubernetes136, nodes: Nodes, kind: str) -> None:
    """It is killed after the first write of this kind, before any other, and started again."""
    cell = Cell(plane, nodes, f"gangs-{next(_numbers)}", 6)
    nodes.train_seconds = 0.5
    with FaultProxy(plane) as proxy:
        operator = OperatorProcess(plane, cell.namespace, server=proxy.server, gang_scheduler="kubernetes")
        wrote: list[str] = []

        def rule(request: web.BaseRequest) -> Fault | None:
            """Let writes pass until the first of this kind is stored, and hold it and all later ones."""
            if request.method == "GET" or cell.namespace not in request.path:
                return None
            is_first = not wrote and request.path.rpartition("/")[2] == kind
            if is_first:
                wrote.append(request.path)
            return Fault(after_commit=is_first, hold=3600 if wrote and not is_first else 0) if wrote else None

        proxy.rule = rule
        operator.start()
        cell.train("mnist", 4)
        eventually(f"a write of {kind}", lambda: wrote, timeout=SECONDS)
        operator.kill()
        proxy.rule = lambda request: None
        with operator:
            eventually("mnist succeeds", lambda: state(cell, "mnist") == "Succeeded", timeout=SECONDS)
            assert cell.status("mnist").get("restarts", 0) == 0
            eventually("no group is left", lambda: not cell.groups(GROUPS), timeout=SECONDS)
    assert nodes.longest_partial() < 2


def test_rights_of_the_chart_suffice_and_all_are_used() -> None:
    check_rights(Kubernetes136(scheduler=False, audit=True), "cluster", "kubernetes")


def test_fields_of_a_gate_that_is_off_do_no_harm() -> None:
    """The API server drops the priority of a group and stores the default of its mode of disruption."""
    with (
        Kubernetes136(GATES[:2]) as plane,
        Nodes(plane) as nodes,
        OperatorProcess(plane, "", gang_scheduler="kubernetes"),
    ):
        body = {"metadata": {"name": "low"}, "value": 10}
        plane.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", body)
        cell = Cell(plane, nodes, "gangs", 6)
        cell.train("mnist", 4, priority="low")
        eventually("mnist runs", lambda: state(cell, "mnist") == "Running", timeout=SECONDS)
        (group,) = plane.request("GET", f"/{GROUPS.path('gangs')}")["items"]
        spec: Json = group["spec"]
        assert spec["schedulingPolicy"] == {"gang": {"minCount": 4}}
        assert spec["disruptionMode"] == "Pod" and not spec.keys() & {"priority", "priorityClassName"}
