"""The table of fault and context in docs/reference/failures.md: what the engine decides, from whole plans."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ddpjob.api.times import timestamp
from tests.builders import World, a_job, ended, failed, running

Json = dict[str, Any]
Fault = Callable[[World], Json]
"""Returns the status of a pod in which the fault occurs."""
_LONGEST = 2000
"""Seconds after which a decision is made, at the latest: a refused container of a job that has trained has 1,800."""


def _reports(code: int = 1, **report: Any) -> Fault:
    return lambda world: failed(code, at=world.now, **({"message": "m", "where": "train.py:9"} | report))


def _ends(code: int, reason: str = "") -> Fault:
    return lambda world: ended(code, reason=reason, at=world.now, started=world.now - timedelta(seconds=2))


def _disrupted(reason: str) -> Fault:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason}
    return lambda world: running(conditions=[condition]) | {"deleting": True}


def _refused(world: World) -> Json:
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "token" not found'}
    return {"phase": "Pending", "containerStatuses": [{"name": "trainer", "state": {"waiting": waiting}}]}


_BUG = {"exception": "ValueError", "kind": "ValueError"}
FAULTS: dict[str, Fault] = {
    "`StartError`: the runtime cannot start the container": _ends(128, "StartError"),
    "exit code 127 after 2 s: the command does not exist": _ends(127),
    "a Secret or ConfigMap does not exist": _refused,
    "exit code 2 in a report: wrong settings": _reports(2, kind="UsageError"),
    "exit code 71 in a report: fewer GPUs than ranks": _reports(71, kind="RanksImpossible"),
    "exit code 78 in a report: another checkpoint or data": _reports(78, kind="ConfigMismatch"),
    "an exception of the program, at a step that was counted": _reports(step=7, exact=True, **_BUG),
    "the same, at a step that the script reported before": _reports(step=7, **_BUG),
    "an exception of a library, as botocore's `ClientError`": _reports(exception="ClientError", kind="ClientError"),
    "a GPU fails": _reports(kind="DeviceFailed", exception="DeviceError"),
    "the loss is not finite": _reports(79, kind="NotFinite"),
    "`OOMKilled`": _ends(137, "OOMKilled"),
    "SIGSEGV": _ends(139),
    "a hang": _reports(76, kind="Hang"),
    "`ContainerStatusUnknown`": _ends(137, "ContainerStatusUnknown"),
    "a Kubernetes node is lost": _disrupted("DeletionByTaintManager"),
    "a Kubernetes node is drained": _disrupted("EvictionByEvictionAPI"),
}


@dataclass(frozen=True)
class Context:
    """When and where a fault occurs: in the attempts that run on these nodes, in one pod of two or in both."""

    nodes: tuple[str, ...]
    has_trained: bool = True
    everywhere: bool = False


CONTEXTS = {
    "first attempt, one node": Context(("a",), has_trained=False),
    "first attempt, all nodes": Context(("a",), has_trained=False, everywhere=True),
    "twice before the first step": Context(("a", "b"), has_trained=False),
    "after progress, one node": Context(("a",)),
    "after progress, all nodes": Context(("a",), everywhere=True),
    "twice, on one node": Context(("a", "a")),
    "twice, on two nodes": Context(("a", "b")),
}


def lines() -> Iterator[str]:
    """Yield the lines of the table, in which faults with the same verdicts are one row."""
    yield f"| fault | {' | '.join(CONTEXTS)} |"
    yield "|---" * (len(CONTEXTS) + 1) + "|"
    rows: dict[str, list[str]] = {}
    for name, fault in FAULTS.items():
        decided = " | ".join(verdict(fault, context) for context in CONTEXTS.values())
        rows.setdefault(decided, []).append(name)
    for decided, faults in rows.items():
        yield f"| {'; '.join(faults)} | {decided} |"


def verdict(fault: Fault, context: Context) -> str:
    """Return what the engine decides about the last of the faults."""
    world = World(a_job())
    world.settle()
    if context.has_trained:
        _run(world, context.nodes[0])
        world.progress = {"step": 5, "totalSteps": 9, "checkpoint": {"path": "p", "step": 5}}, _name(world)
        world.settle()
    for node in context.nodes:
        _run(world, node)
        began = world.now
        _occur(world, fault, context, node)
        waited = int((world.now - began).total_seconds())
        if world.status["state"] == "Failed":
            break
        world.settle_after_backoff()
    last = world.status["failures"][-1]
    if last["action"] == "Fail":
        decided = "**Fail**"
    else:
        decided = "restart" if last["counted"] else "restart, not counted"
        if any(avoided["nodeName"] == context.nodes[-1] for avoided in world.status.get("avoidNodes") or ()):
            decided += ", avoids"
        elif last.get("nodeSuspected"):
            decided += ", suspects"
    return f"{decided}, after {waited} s" if waited > 30 else decided


def _run(world: World, node: str) -> None:
    world.set_pod(0, running(), node="other")
    world.set_pod(1, running(), node=node)
    world.settle()


def _occur(world: World, fault: Fault, context: Context, node: str) -> None:
    """Let the fault occur, and wait for the decision."""
    known = len(world.status.get("failures") or ())
    for node_rank in (0, 1) if context.everywhere else (1,):
        status = fault(world)
        pod = world.set_pod(node_rank, status, node=node if node_rank else "other")
        if status.pop("deleting", False):
            deadline = timestamp(world.now + timedelta(seconds=30))
            pod["metadata"] |= {"deletionTimestamp": deadline, "deletionGracePeriodSeconds": 30}
    if fault is _refused:  # its container has not run in this attempt
        world.job["status"]["currentAttempt"].pop("allRunningTime", None)
    for _ in range(_LONGEST):
        world.settle()
        if len(world.status.get("failures") or ()) > known:
            return
        world.forward(1)
    raise AssertionError("nothing was decided")


def _name(world: World) -> str:
    return str(world.pod(0)["metadata"]["name"])
