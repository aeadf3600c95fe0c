"""The scheduler and the kubelets of a simulated run: they bind and start pods, report their ends, and stop them.

A webhook may inject a sidecar into every pod, and the clocks of the nodes may differ from the API server's.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.api.times import parse_time, timestamp
from ddpjob_operator.cluster.base import ClusterError, Conflict, NotFound
from tests.builders import ended, failed, running
from tests.worlds.memory.server import ApiServer
from tests.worlds.memory.store import Change

GRACE_SECONDS = 30.0
"""Longest time in which a kubelet stops a pod; the default of Kubernetes."""
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.",
}
NO_NODE_FREE = UNSCHEDULABLE | {"message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."}
Sidecar = Literal["none", "ordinary", "native"]
"""What a webhook injects. An ordinary container runs on after the trainer. A native sidecar is an init container that
ends with the pod; here it has been restarted and cannot start again, because its Secret is gone."""
PROXY = "proxy"
CULPRIT = 1
"""The node, and the rank on it, that fails first where only logs show it."""
SECRET = "token-7f3a"
"""Stands in the logs of all containers, as a password may; it must not get into the status or an event."""
LOG_OF_PROXY = (
    f"{SECRET}\nTraceback (most recent call last):\n  File \"/proxy.py\", line 1, in <module>\nKeyError: 'route'\n"
)
LOG_DELAY_SECONDS = 5.0
"""The longest time by which a log may be late."""
NO_SECRET = {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "of-the-proxy" not found'}}
SKEWS = (0, -120, 300)
"""By how many seconds the clock of a node may be ahead."""


class Kubelets:
    """Acts on the API server as the nodes do. What a pod does depends on the seed and its name, not on the time.

    eager: each pod starts by itself soon after its creation; otherwise ``start`` starts it.
    has_spares: whether a pod that must not run on its own node can run on another.
    skewed: the clocks of the nodes differ by ``SKEWS``.
    spoils_logs: the logs of some pods are late, and those of others stay empty.
    """

    def __init__(
        self,
        server: ApiServer,
        seed: str,
        now: Callable[[], datetime],
        *,
        eager: bool,
        sidecar: Sidecar = "none",
        skewed: bool = False,
        spoils_logs: bool = False,
    ) -> None:
        self._sidecar, self._skewed, self._spoils_logs = sidecar, skewed, spoils_logs
        server.mutate = self._inject
        self._server = server
        self._now = now
        self._seed = seed
        self._eager = eager
        self.has_spares = True
        self.nodes: int | None = None
        """How many pods fit on the nodes; the scheduler places one by one, each as soon as it fits. None: all fit."""
        self._unplaced: dict[str, Json] = {}
        self.unreachable: set[str] = set()
        """uids of pods on nodes that do not respond."""
        self.failed_together: list[list[str]] = []
        """Names of the pods of each attempt whose failure only the logs show, by node_rank."""
        self.spoiled_logs: set[str] = set()
        """Names of pods whose logs were late or empty."""
        self.were_unreachable: set[str] = set()

    def on_change(self, change: Change) -> None:
        """Schedule what the nodes do about a change of a pod."""
        if change.resource is not names.PODS:
            return
        if change.type == "DELETED" or has_ended(change.obj):
            self.place_waiting()
        if change.type == "DELETED":
            return
        loop, chance = asyncio.get_running_loop(), self._chance(change.obj)
        is_new = change.before is None
        if self._eager and is_new and names.LABEL_JOB_UID in change.obj["metadata"].get("labels", {}):
            loop.call_later(chance.uniform(0.0, 2.0), self.start, change.obj)
        was_deleted = change.before is not None and "deletionTimestamp" in change.before["metadata"]
        if "deletionTimestamp" in change.obj["metadata"] and not was_deleted:
            loop.call_later(chance.uniform(0.1, 5.0), self._stop, change.obj)
        deadline = change.obj["spec"].get("activeDeadlineSeconds")
        if deadline is not None and not is_new and change.before["spec"].get("activeDeadlineSeconds") != deadline:
            loop.call_later(chance.uniform(0.1, 5.0), self._end_sidecar, change.obj)

    def _inject(self, resource: Resource, obj: Json) -> None:
        """Add a sidecar to a pod, as a mutating webhook does."""
        if resource is not names.PODS or self._sidecar == "none":
            return
        proxy = {"name": PROXY, "image": "proxy:1"}
        if self._sidecar == "ordinary":
            obj["spec"]["containers"].append(proxy)
        else:
            obj["spec"]["initContainers"] = [proxy | {"restartPolicy": "Always"}]

    def start(self, pod: Json) -> None:
        """Bind a pod to a node and start its containers; nothing happens if it ended or is being deleted."""
        meta = pod["metadata"]
        known = self._known(pod)
        if known is None or known["status"].get("phase") != "Pending" or "deletionTimestamp" in known["metadata"]:
            return
        if not self._has_room():
            self._unplaced[meta["uid"]] = pod
            if not known["status"].get("conditions"):
                self.report(pod, {"phase": "Pending", "conditions": [NO_NODE_FREE]})
            return
        node = f"worker-{meta['labels'][names.LABEL_NODE_RANK]}"
        if node in avoided(known):
            if not self.has_spares:
                self.report(pod, {"phase": "Pending", "conditions": [UNSCHEDULABLE]})
                return
            node = node.replace("worker", "spare")
        self.place_on(node, pod)
        self.report(pod, running(podIP="192.0.2.1"))

    def place_waiting(self) -> None:
        """Try again to place the pods for which no node was free, in any order."""
        waiting, self._unplaced = self._unplaced, {}
        for pod in waiting.values():
            delay = self._chance(pod).uniform(0.0, 2.0)
            asyncio.get_running_loop().call_later(delay, self.start, pod)

    def _has_room(self) -> bool:
        if self.nodes is None:
            return True
        pods = self._server.store.all(names.PODS)
        return sum("nodeName" in pod["spec"] and not has_ended(pod) for pod in pods) < self.nodes

    def used_nodes(self) -> set[str | None]:
        """Return the names of the nodes with a pod that has not ended, and None if such a pod waits for a node."""
        return {pod["spec"].get("nodeName") for pod in self._server.store.all(names.PODS) if not has_ended(pod)}

    def waiting_pods(self) -> list[Json]:
        """Return the pods that have no node and are not being deleted."""
        pods = self._server.store.all(names.PODS)
        return [pod for pod in pods if not pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]]

    def place_on(self, node: str, pod: Json) -> bool:
        """Bind a pod as the scheduler, and return whether the API server accepts it."""
        with contextlib.suppress(ClusterError):
            self._server.bind(pod["metadata"]["namespace"], pod["metadata"]["name"], node)
            return True
        return False

    def write_logs(self, pods: Mapping[int, Json], culprit: str, peer: str) -> None:
        """Write the logs of an attempt's pods before their ends are reported or, if logs are spoiled, perhaps later."""
        self.failed_together.append([pods[node_rank]["metadata"]["name"] for node_rank in sorted(pods)])
        for node_rank, pod in sorted(pods.items()):
            self._write_log(pod, culprit if node_rank == CULPRIT else peer)

    def _write_log(self, pod: Json, text: str) -> None:
        place = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self._server.logs[*place, PROXY] = LOG_OF_PROXY
        chance = random.Random(f"log {self._seed} {place[1]}")
        write = partial(self._server.logs.__setitem__, (*place, names.TRAINER_CONTAINER), f"{SECRET}\n{text}")
        how = chance.choice(("prompt", "prompt", "late", "empty")) if self._spoils_logs else "prompt"
        if how == "prompt":
            write()
            return
        self.spoiled_logs.add(place[1])
        if how == "late":
            asyncio.get_running_loop().call_later(chance.uniform(0.0, LOG_DELAY_SECONDS), write)

    def report(self, pod: Json, status: Json) -> None:
        """Write the status of a pod unless it is gone, or ended before."""
        known = self._known(pod)
        if known is None or has_ended(known):
            return
        self._write(known, self._beside_sidecar(known, self._by_clock_of_node(known, status)))

    def refuse(self, pod: Json, reason: str) -> None:
        """Do not start the trainer of a pod that has not started, for this reason of a kubelet."""
        known = self._known(pod)
        if known is None or known["status"].get("phase") != "Pending" or "deletionTimestamp" in known["metadata"]:
            return
        states = [{"name": names.TRAINER_CONTAINER, "state": {"waiting": {"reason": reason, "message": "not found"}}}]
        started = timestamp(self._now() + self._skew(known))
        self._write(known, {"phase": "Pending", "startTime": started, "containerStatuses": states})

    def _write(self, pod: Json, status: Json) -> None:
        self._server.patch_status(names.PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], {"status": status})

    def _beside_sidecar(self, pod: Json, status: Json) -> Json:
        """Return the status of a pod with a sidecar, given that of one without."""
        states = status.get("containerStatuses")
        if self._sidecar == "none" or states is None or "deletionTimestamp" in pod["metadata"]:
            return status
        if self._sidecar == "native":
            ended = {"terminated": {"exitCode": 0, "reason": "Completed"}}
            state = ended if has_ended({"status": status}) else NO_SECRET
            return status | {"initContainerStatuses": [{"name": PROXY, "state": state}]}
        return status | {"phase": "Running", "containerStatuses": [*states, {"name": PROXY, "state": {"running": {}}}]}

    def _end_sidecar(self, pod: Json) -> None:
        """End all containers of a pod whose deadline has passed; the pod stays."""
        known = self._known(pod)
        if known is None or has_ended(known) or pod["metadata"]["uid"] in self.unreachable:
            return
        states = [state for state in known["status"]["containerStatuses"] if state["name"] != PROXY]
        proxy = {"name": PROXY, "state": {"terminated": {"exitCode": 143, "reason": "Error"}}}
        told = {"phase": "Failed", "reason": "DeadlineExceeded", "message": "Pod was active longer than the deadline"}
        self._write(known, told | {"containerStatuses": [*states, proxy]})

    def _by_clock_of_node(self, pod: Json, status: Json) -> Json:
        """Return the status with the times that the clock of the pod's node shows."""
        skew, states = self._skew(pod), []
        for container in status.get("containerStatuses", ()):
            over, shown = container["state"].get("terminated"), container
            if over is not None and "finishedAt" in over:
                finished = timestamp(parse_time(over["finishedAt"]) + skew)
                shown = container | {"state": {"terminated": over | {"finishedAt": finished}}}
            states.append(shown)
        return status | {"containerStatuses": states} if states else status

    def _skew(self, pod: Json) -> timedelta:
        node = pod["spec"].get("nodeName") or "none"
        return timedelta(seconds=random.Random(f"{self._seed} {node}").choice(SKEWS) if self._skewed else 0)

    def remove(self, pod: Json) -> None:
        """Remove a pod at once, as the garbage collector of pods does when its node is gone."""
        meta = pod["metadata"]
        with contextlib.suppress(NotFound, Conflict):
            self._server.delete(names.PODS, meta["namespace"], meta["name"], uid=meta["uid"], grace_seconds=0)

    def cut_off(self, pod: Json) -> None:
        """Make the pod's node unreachable: nothing reports or stops the pod any more."""
        self.unreachable.add(pod["metadata"]["uid"])
        self.were_unreachable.add(pod["metadata"]["uid"])

    def mark_lost(self, pod: Json) -> None:
        """Delete the pod of an unreachable node, as the control plane does when it notices the loss."""
        meta, reason = pod["metadata"], "DeletionByTaintManager"
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "node is unreachable"}
        with contextlib.suppress(NotFound, Conflict):
            body = {"status": {"conditions": [condition]}}
            self._server.patch_status(names.PODS, meta["namespace"], meta["name"], body)
            self._server.delete(names.PODS, meta["namespace"], meta["name"], uid=meta["uid"])

    def reconnect(self) -> None:
        """Let the unreachable nodes respond again: they stop what was deleted meanwhile."""
        pods, self.unreachable = self.unreachable, set()
        for pod in list(self._server.store.all(names.PODS)):
            if pod["metadata"]["uid"] in pods and "deletionTimestamp" in pod["metadata"]:
                self._stop(pod)

    def _stop(self, pod: Json) -> None:
        """End the containers of a deleted pod, each with one of the results of SIGTERM, and remove the pod."""
        known = self._known(pod)
        if known is None or pod["metadata"]["uid"] in self.unreachable:
            return
        if known["spec"].get("nodeName"):
            at = self._now()
            results = (ended(143, at=at), ended(0, at=at), failed(77, cause="peer", at=at), ended(137, at=at))
            self.report(pod, self._chance(pod).choice(results))
        self.remove(pod)

    def _known(self, pod: Json) -> Json | None:
        known = self._server.store.get(names.PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])
        return known if known is not None and known["metadata"]["uid"] == pod["metadata"]["uid"] else None

    def _chance(self, pod: Json) -> random.Random:
        return random.Random(f"{self._seed} {pod['metadata']['name']}")


def has_ended(pod: Json) -> bool:
    """Return whether no container of a pod runs or will run."""
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def avoided(pod: Json) -> set[str]:
    """Return the names of the nodes on which the pod's affinity does not let it run."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    return {name for term in terms for field in term.get("matchFields") or () for name in field["values"]}
