"""The kubelet of local mode: binds the pods of the in-memory cluster to this machine and runs each in a task."""

import asyncio
from collections.abc import Callable

from ddpjob.api import names
from ddpjob.cluster.base import Json
from ddpjob.cluster.memory import MemoryCluster
from ddpjob.local.machine import Machine
from ddpjob.local.pod import PodRun


class Kubelet:
    """Runs every pod of ``cluster``; cancelling ``run`` kills what runs before it returns.

    on_end: called when nothing is left to do for a pod.
    """

    def __init__(self, cluster: MemoryCluster, machine: Machine, on_end: Callable[[], None]) -> None:
        self._cluster = cluster
        self._machine = machine
        self._on_end = on_end
        # By uid, and for ever: a late event of a pod that has ended must not start it again.
        self._runs: dict[str, tuple[PodRun, asyncio.Task[None]]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether any pod still has a process or is about to have one."""
        return any(not task.done() for _, task in self._runs.values())

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as group:
            async for event in self._cluster.watch(names.PODS):
                self._see(event["type"], event["object"], group)

    def _see(self, change: str, pod: Json, group: asyncio.TaskGroup) -> None:
        meta = pod["metadata"]
        known = self._runs.get(meta["uid"])
        if known is None:
            if change != "DELETED" and "deletionTimestamp" not in meta and not is_over(pod):
                run = PodRun(pod, self._machine)
                task = group.create_task(run.run(), name=f"pod {meta['name']}")
                task.add_done_callback(lambda _: self._on_end())
                self._runs[meta["uid"]] = run, task
            return
        run, _ = known
        if change == "DELETED":
            run.stop(0.0)
        elif "deletionTimestamp" in meta:
            run.stop(float(meta.get("deletionGracePeriodSeconds") or 0))


def is_over(pod: Json) -> bool:
    """Whether all containers of a pod have ended."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
