"""A job in a queue, and a Kueue of few lines that the test calls."""

from typing import Any

from ddpjob.api import names
from ddpjob.engine.actions import EngineSettings
from tests.builders import UID, World, a_job

NAME = names.service_name("mnist", UID)
FLAVOR = {"spec": {"nodeLabels": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}}


class Queued(World):
    """A job with a queue, and a Kueue of few lines that the test calls."""

    def __init__(self, *, kueue: bool | None = True, labels: dict[str, str] | None = None, **spec: Any) -> None:
        super().__init__(a_job(**spec))
        self.job["metadata"]["labels"] = {names.LABEL_QUEUE: "research"} | (labels or {})
        self.settings = EngineSettings(kueue=kueue)
        self.found[names.FLAVORS, "h100"] = FLAVOR

    @property
    def workload(self) -> dict[str, Any]:
        return self.groups[names.WORKLOADS][NAME]

    def conditions(self) -> dict[str, tuple[str, str]]:
        found = self.workload["status"].get("conditions") or ()
        return {each["type"]: (each["status"], each["reason"]) for each in found}

    def says(self, kind: str, status: str, reason: str, message: str = "") -> None:
        """Set a condition of the Workload, as Kueue does."""
        new = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-01-01"}
        old = [each for each in self.workload["status"].get("conditions") or () if each["type"] != kind]
        self.workload["status"] |= {"conditions": [*old, new]}
        self.workload["metadata"]["resourceVersion"] += "0"

    def admits(self, **status: Any) -> None:
        assigned = {"name": "main", "flavors": {"cpu": "h100"}}
        self.workload["status"] |= {"admission": {"clusterQueue": "all", "podSetAssignments": [assigned]}} | status
        self.says("Evicted", "False", "QuotaReserved")
        self.says("QuotaReserved", "True", "QuotaReserved")
        self.says("Admitted", "True", "Admitted")

    def evicts(self, reason: str = "Preempted", message: str = "Preempted to accommodate a workload") -> None:
        self.says("Evicted", "True", reason, message)

    def admitted(self, **status: Any) -> None:
        self.admits(**status)
        self.settle()

    def evicted(self, *why: str) -> None:
        self.evicts(*why)
        self.settle()

    def label(self, labels: dict[str, str]) -> None:
        """Settle with other labels of the job."""
        self.job["metadata"]["labels"] = labels
        self.settle()

    def starts(self) -> None:
        """Let the job run in its first attempt."""
        self.settle()
        self.admitted()
        self.run_all_and_settle()

    def gives_back(self) -> None:
        """Settle, let Kueue evict what was deactivated, and check that the job rests then without quota."""
        self.settle()
        assert self.workload["spec"]["active"] is False and not self.pods_in_use()
        self.evicts("Deactivated", "The workload is deactivated")
        self.settle()
        self.forward(3600)
        assert self.settle() <= 1, "the status may change once, and then nothing"
        assert self.workload["spec"]["active"] is False and self.conditions()["QuotaReserved"][0] == "False"

    def pods_in_use(self) -> list[str]:
        return [name for name, pod in self.pods.items() if pod["status"]["phase"] in ("Pending", "Running")]

    def stops_pods(self) -> None:
        self.pods = {name: pod for name, pod in self.pods.items() if "deletionTimestamp" not in pod["metadata"]}


def started(**given: Any) -> Queued:
    """Return the world of a job in a queue that runs in its first attempt."""
    world = Queued(**given)
    world.starts()
    return world
