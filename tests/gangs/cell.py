"""A namespace with Kubernetes nodes of its own, so that several tests, or repetitions, share one control plane."""

from typing import Any

from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from tests.controller.jobs import Jobs
from tests.worlds.control_plane import ControlPlane
from tests.worlds.nodes import SLOT, Nodes

_LABEL = "example.com/cell"


class Cell(Jobs):
    """Jobs whose pods fit on the nodes of this cell only, one pod on each."""

    def __init__(self, plane: ControlPlane, nodes: Nodes, name: str, size: int) -> None:
        super().__init__(plane, name)
        self._nodes = nodes
        plane.make_namespace(name)
        for number in range(size):
            nodes.add(f"{name}-{number}", labels={_LABEL: name})

    def train(self, name: str, num_nodes: int, *, priority: str = "", **spec: Any) -> Json:
        """Apply a job."""
        pod: Json = {"nodeSelector": {_LABEL: self.namespace}}
        if priority:
            pod["priorityClassName"] = priority
        limits = {"limits": {SLOT: 1}}
        return self.submit(name, numNodes=num_nodes, resources=limits, template={"spec": pod}, **spec)

    def status(self, name: str = "mnist") -> Json:
        self._nodes.check()
        return super().status(name)

    def bound(self, name: str) -> int:
        """Return how many of a job's pods have a node, have not ended and are not being deleted."""
        pods = [pod for pod in self.pods(name) if pod["status"]["phase"] not in ("Succeeded", "Failed")]
        return sum("nodeName" in pod["spec"] and "deletionTimestamp" not in pod["metadata"] for pod in pods)

    def groups(self, kind: Resource) -> list[str]:
        """Return the names of the PodGroups."""
        items = self.plane.request("GET", f"/{kind.path(self.namespace)}")["items"]
        return [each["metadata"]["name"] for each in items]
