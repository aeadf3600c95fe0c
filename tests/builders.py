"""Builders of jobs and pods for tests, and a simulated cluster that executes the engine's plans."""

import copy
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal

from ddpjob.api import names
from ddpjob.api.log_failure import log_failure
from ddpjob.api.names import Resource
from ddpjob.api.pod_view import pod_view
from ddpjob.api.report import training_report
from ddpjob.api.status import DDPJobStatus
from ddpjob.api.times import timestamp
from ddpjob.engine.actions import Change, Delete, EngineSettings, Plan, Problem
from ddpjob.engine.observed import Elder, Observed, Polled, Unknown, owned_pods
from ddpjob.engine.plan import plan
from tests.worlds.memory.server import merge_patch

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
SETTINGS = EngineSettings()
UID = "0a1b2c3d-0000-4000-8000-000000000000"
DELETING = {"deletionTimestamp": "2026-03-01T12:00:30Z", "deletionGracePeriodSeconds": 30}
"""Metadata of a pod that was deleted at ``NOW``."""


def a_job(name: str = "mnist", *, status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Return a DDPJob of two nodes, as the API server would return it."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "DDPJob",
        "metadata": {"name": name, "namespace": "default", "uid": UID, "generation": 1, "resourceVersion": "1"},
        "spec": {"image": "trainer:1", "numNodes": 2} | spec,
        "status": status or {},
    }


def running(**more: Any) -> dict[str, Any]:
    """Return the status of a pod while the trainer runs."""
    state = {"name": "trainer", "state": {"running": {}}}
    return {"phase": "Running", "podIP": "127.0.0.1", "containerStatuses": [state]} | more


def ended(
    code: int,
    *,
    message: str = "",
    at: datetime = NOW,
    started: datetime | None = None,
    reason: str = "",
    **more: Any,
) -> dict[str, Any]:
    """Return the status of a pod after the trainer ended; it does not say when it started if ``started`` is None."""
    reason = reason or ("Completed" if code == 0 else "Error")
    terminated = {"exitCode": code, "reason": reason, "message": message, "finishedAt": timestamp(at)}
    if started is not None:
        terminated["startedAt"] = timestamp(started)
    state = {"name": "trainer", "state": {"terminated": terminated}}
    return {"phase": "Succeeded" if code == 0 else "Failed", "containerStatuses": [state]} | more


def failed(code: int = 1, *, cause: str = "own", at: datetime = NOW, **report: Any) -> dict[str, Any]:
    """Return the status of a pod after its trainer failed and reported the cause; ``report``: more fields of it."""
    return ended(code, message=json.dumps({"schema": 2, "cause": cause, "code": code} | report), at=at)


def disrupted(reason: str) -> dict[str, Any]:
    """Return the part of a pod's status that announces a disruption."""
    return {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason}]}


def unplaced(message: str = "0/3 nodes: no gpu") -> dict[str, Any]:
    """Return the status of a pod for which the scheduler finds no Kubernetes node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


def is_idle(made: Plan) -> bool:
    """Return whether a plan writes nothing."""
    return made.status is None and not (made.deletes or made.changes or made.creates or made.events)


class World:
    """A job and the objects that its plans created; plans are executed one at a time.

    It is not an API server: it keeps only the objects that ``plan`` reads, so that a test needs few lines.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.pods: dict[str, dict[str, Any]] = {}
        self.former: list[dict[str, Any]] = []
        self.sharing: list[str] = []
        self.service: dict[str, Any] | None = None
        self.policy: dict[str, Any] | None = None
        self.claim: dict[str, Any] | None = None
        self.groups: dict[Resource, dict[str, dict[str, Any]]] = {}
        self.served: frozenset[str] | None = None
        self.workload_answers = True
        self.found: dict[tuple[Resource, str], dict[str, Any] | Unknown] = {}
        self.elder: Elder | None = None
        self.logs: dict[str, str] = {}  # by the pod's uid, as far as they have been read
        self.progress: tuple[dict[str, Any], str] | None = None
        self.now = NOW
        self.settings = SETTINGS
        self.token_key = b"of this operator process"
        self.plans: list[Plan] = []
        self.problems: tuple[Problem, ...] = ()
        self.round: tuple[int, Literal["begun", "complete"]] | None = None
        self.deleted_job = False
        self.stalled_seconds: float | None = None
        self.progress_problem: Literal["unreachable", "unusable"] | None = None
        self.lingering = False  # whether a deleted pod stays until the test removes it, as one in its grace period

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.job["status"])

    def condition(self, name: str) -> dict[str, Any]:
        return next(dict(c) for c in self.status["conditions"] if c["type"] == name)

    def observed(self, *, live: bool) -> Observed:
        report, pod = self.progress or (None, "")
        shown = training_report(report) if report is not None else None
        number, made = self.round or (0, "begun")
        return Observed(
            owned_pods(self.job, map(pod_view, self.pods.values())),
            former=[pod_view(pod) for pod in self.former],
            sharing=self.sharing,
            service=self.service,
            policy=self.policy,
            claim=self.claim,
            objects={kind: list(groups.values()) for kind, groups in self.groups.items()},
            served=self.served,
            found=self.found,
            problems=self.problems,
            round=made if number and number == self.status.get("attempt") else "unknown",
            logs={uid: log_failure(text) for uid, text in self.logs.items()},
            elder=self.elder,
            token_key=self.token_key,
            progress=Polled(pod, shown, self.stalled_seconds, self.progress_problem),
            live=live,
            has_workload=bool(self.groups.get(names.WORKLOADS)) if live and self.workload_answers else None,
        )

    def reconcile(self, *, crash_after: int | None = None) -> Plan:
        """Reconcile once and return the plan. With ``crash_after``, the operator is killed after that many writes."""
        made = plan(self.job, self.observed(live=False), self.now, self.settings)
        if made.lookups:
            self.found = dict.fromkeys(made.lookups, Unknown("not found")) | self.found
            made = plan(self.job, self.observed(live=False), self.now, self.settings)
        if made.needs_live:
            made = plan(self.job, self.observed(live=True), self.now, self.settings)
        self.plans.append(made)
        for write in [*self._writes(made)][:crash_after]:
            write()
        if crash_after is not None:
            self.round, self.problems = None, ()
        elif made.creates_attempt:
            self.round = made.creates_attempt, "complete"
        return made

    def _writes(self, made: Plan) -> Iterator[Callable[[], None]]:
        if made.status is not None:
            DDPJobStatus.model_validate(made.status)  # the API server would refuse any other status
            yield partial(self.job.__setitem__, "status", made.status)
        for delete in made.deletes:
            yield partial(self._delete, delete)
        for change in made.changes:
            yield partial(self._change, change)
        for phase in made.creates:
            for create in phase:
                yield partial(self._create, create.resource, create.name, create.body)

    def settle(self) -> int:
        """Reconcile until nothing is written, and return the number of reconciles that wrote."""
        for count in range(20):
            if is_idle(self.reconcile()):
                return count
        raise AssertionError("the job still writes after 20 reconciles")

    def settle_after_backoff(self) -> None:
        """Settle, and again after the longest delay before a restart."""
        self.settle()
        self.later(361)

    def run_next_attempt(self) -> None:
        """Let the next attempt start and run, unless the job has failed."""
        self.settle_after_backoff()
        if self.status["state"] != "Failed":
            self.run_all_and_settle()

    def later(self, seconds: float) -> None:
        """Settle after so many seconds."""
        self.forward(seconds)
        self.settle()

    def show(self, rank: int, status: dict[str, Any], *, node: str = "worker") -> None:
        """Settle with this status of a pod."""
        self.set_pod(rank, status, node=node)
        self.settle()

    def show_all(self, status: dict[str, Any]) -> None:
        """Settle with this status of each pod of the attempt."""
        for rank in range(self.job["spec"]["numNodes"]):
            self.set_pod(rank, status)
        self.settle()

    def edit(self, **spec: Any) -> None:
        """Settle with an edited spec of the next generation."""
        self.job["spec"] |= spec
        self.job["metadata"]["generation"] += 1
        self.settle()

    def fail(self, rank: int, code: int = 1, /, **report: Any) -> None:
        """Settle with the failure of a rank; ``report``: as for ``failed``."""
        self.show(rank, failed(code, **report))

    def report(self, progress: dict[str, Any]) -> None:
        """Settle with a report of rank 0's current pod."""
        self.progress = progress, self.pod(0)["metadata"]["name"]
        self.settle()

    def suspend(self, value: bool) -> None:
        """Settle with this value of spec.suspend."""
        self.job["spec"]["suspend"] = value
        self.settle()

    def run_all(self) -> None:
        for rank in range(self.job["spec"]["numNodes"]):
            self.set_pod(rank, running())

    def run_all_and_settle(self) -> None:
        """Settle when all pods run."""
        self.run_all()
        self.settle()

    def set_pod(self, rank: int, status: dict[str, Any], *, node: str = "worker") -> dict[str, Any]:
        pod = self.pod(rank)
        pod["status"] = status
        pod["spec"] = pod["spec"] | {"nodeName": node}
        return pod

    def pod(self, rank: int, attempt: int | None = None) -> dict[str, Any]:
        name = names.pod_name(self.job["metadata"]["name"], UID, attempt or self.status["attempt"], rank)
        return self.pods[name]

    def attempts(self) -> list[str]:
        return sorted({pod["metadata"]["labels"][names.LABEL_ATTEMPT] for pod in self.pods.values()})

    def forward(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def _delete(self, delete: Delete) -> None:
        if delete.resource is names.DDPJOBS:
            self.deleted_job = True
            return
        if delete.resource is names.NETWORK_POLICIES:
            assert self.policy is not None and self.policy["metadata"]["uid"] == delete.uid
            self.policy = None
            return
        if delete.resource in names.SCHEDULING_KINDS:
            assert self.groups[delete.resource].pop(delete.name)["metadata"]["uid"] == delete.uid
            return
        assert self.pods[delete.name]["metadata"]["uid"] == delete.uid
        if self.lingering and self.pods[delete.name]["status"]["phase"] not in ("Succeeded", "Failed"):
            deadline = timestamp(self.now + timedelta(seconds=30))
            self.pods[delete.name]["metadata"] |= {"deletionTimestamp": deadline, "deletionGracePeriodSeconds": 30}
            return
        del self.pods[delete.name]

    def _change(self, change: Change) -> None:
        """Change Service, policy or Workload, annotate a pod, or stop its sidecars, as at a deadline."""
        if change.resource is names.WORKLOADS:
            workload = self.groups[names.WORKLOADS][change.name]
            meta = workload["metadata"]
            if change.version in ("", meta["resourceVersion"]):
                patched = merge_patch(
                    workload,
                    {
                        change.part: change.value,
                        "metadata": {"annotations": change.annotations},
                    },
                )
                meta = patched["metadata"] | {"resourceVersion": str(int(meta["resourceVersion"]) + 1)}
                self.groups[names.WORKLOADS][change.name] = patched | {"metadata": meta}
            return
        if change.resource is names.NETWORK_POLICIES:
            assert self.policy is not None
            self.policy["spec"] = merge_patch(self.policy["spec"], change.value)
            return
        if change.resource is names.SERVICES:
            assert self.service is not None
            selector = {key: value for key, value in change.value["selector"].items() if value is not None}
            spec = self.service["spec"] | change.value | {"selector": selector}
            self.service["spec"] = {key: value for key, value in spec.items() if value is not None}
            return
        pod = self.pods[change.name]
        assert pod["metadata"]["uid"] == change.uid
        if change.annotations:
            pod["metadata"] = merge_patch(pod["metadata"], {"annotations": change.annotations})
            return
        pod["spec"] = pod["spec"] | change.value
        pod["status"] = pod["status"] | {"phase": "Failed", "reason": "DeadlineExceeded", "message": "Pod was active"}

    def _create(self, resource: Resource, name: str, body: dict[str, Any]) -> None:
        kind = resource.kind
        if resource in names.SCHEDULING_KINDS:
            meta = body["metadata"] | {"uid": f"uid-of-{name}", "resourceVersion": "1", "generation": 1}
            group = body | {"metadata": meta, "status": {}}
            assert self.groups.setdefault(resource, {}).setdefault(name, group) is group, f"{name} exists already"
        elif kind == "Service":
            self.service = body | {"metadata": body["metadata"] | {"uid": f"uid-of-{name}"}}
        elif kind == "NetworkPolicy":
            self.policy = copy.deepcopy(body) | {"metadata": body["metadata"] | {"uid": f"uid-of-{name}"}}
        elif kind == "PersistentVolumeClaim":
            self.claim = body
        else:
            assert name not in self.pods, f"{name} exists already"
            of = body["metadata"]["labels"].get(names.LABEL_ATTEMPT)  # a probe has none
            peers = [p for p in self.pods.values() if of and p["metadata"]["labels"].get(names.LABEL_ATTEMPT) == of]
            over = [p["metadata"]["name"] for p in peers if p["status"]["phase"] in ("Succeeded", "Failed")]
            assert not over, f"{name} is created after {over} of its attempt ended"
            meta = body["metadata"] | {"uid": f"uid-of-{name}", "creationTimestamp": timestamp(self.now)}
            self.pods[name] = body | {"metadata": meta, "status": {"phase": "Pending"}}


def a_started_world(job: dict[str, Any]) -> World:
    """Return a world in which the pods of the job's first attempt are created."""
    world = World(job)
    world.settle()
    return world


def a_running_world(job: dict[str, Any]) -> World:
    """Return a world in which all pods of the job's first attempt run and the status shows it."""
    world = a_started_world(job)
    world.run_all_and_settle()
    return world
