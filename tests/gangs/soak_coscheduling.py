"""Gangs with the coscheduling plugin of kubernetes-sigs/scheduler-plugins, and nodes without machines. `make soak`."""

from collections.abc import Iterator

import pytest

from ddpjob.api import names
from tests.controller.operator_process import OperatorProcess
from tests.gangs.cell import Cell
from tests.gangs.cluster import WithCoscheduling
from tests.processes import eventually
from tests.worlds.nodes import Nodes

SECONDS = 300.0


@pytest.fixture(scope="module")
def plane() -> Iterator[WithCoscheduling]:
    with WithCoscheduling() as plane, OperatorProcess(plane, "", gang_scheduler="coscheduling"):
        yield plane


def test_gangs_are_bound_whole_and_leave_no_group(plane: WithCoscheduling) -> None:
    """More gangs than fit, each with nodes for six pods; the first one restarts while the nodes are full."""
    with Nodes(plane) as nodes:
        cell = Cell(plane, nodes, "gangs", 6)
        cell.train("restarts", 6)
        eventually("it runs", lambda: cell.status("restarts").get("state") == "Running", timeout=SECONDS)
        sizes = {f"job-{number}": size for number, size in enumerate((4, 4, 1, 6, 3, 5))}
        for name, size in sizes.items():
            cell.train(name, size)
            cell.wait_for_pods(size, name)
        nodes.train_seconds = 0.5
        cell.end(cell.pods("restarts")[1], 1)
        for name in ("restarts", *sizes):
            eventually(f"{name} succeeds", lambda name=name: cell.status(name)["state"] == "Succeeded", timeout=SECONDS)
        assert cell.status("restarts")["attempt"] == 2
        assert all(gang.was_whole for gang in nodes.gangs.values())
        assert nodes.longest_partial() < 2
        eventually("no group is left", lambda: not cell.groups(names.COSCHEDULING_GROUPS))
        nodes.check()
