"""Kubernetes nodes without machines, and one kubelet for all of them, which runs pods without containers.

A pod that the scheduler bound becomes Running at once. A training ends when all pods of its job have run for a while:
its ranks wait for each other. A pod that is deleted runs on, as a trainer that saves a checkpoint does, and is then
removed. The kubelet also notes how long each gang was bound in part. It runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import aiohttp
import msgspec

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.builders import ended, running
from tests.processes import eventually
from tests.worlds.control_plane import ControlPlane

SLOT = "nvidia.com/gpu"
"""What a pod of these tests requests one of."""
_WATCH_SECONDS = 3600


@dataclass
class Gang:
    """The pods of an attempt of a job. Times are of the monotonic clock."""

    size: int
    bound: set[str] = field(default_factory=set)
    running: dict[str, Json] = field(default_factory=dict)
    was_whole: bool = False
    partial_since: float | None = None
    longest_partial: float = 0.0

    def bind(self, pod: str, now: float) -> None:
        self.bound.add(pod)
        self.was_whole = self.was_whole or len(self.bound) == self.size
        self._note(now)

    def lose(self, pod: str, now: float) -> None:
        self.bound.discard(pod)
        self.running.pop(pod, None)
        self._note(now)

    def _note(self, now: float) -> None:
        """Note how long some of the pods have been bound and others not, until all were for the first time."""
        if self.partial_since is not None:
            self.longest_partial = max(self.longest_partial, now - self.partial_since)
        is_partial = bool(self.bound) and not self.was_whole
        self.partial_since = (self.partial_since or now) if is_partial else None


class Nodes:
    """Use as a context manager beside a control plane.

    places: names of nodes that pods without one are bound to in turn, as by a scheduler; no node need exist.
    stop_seconds: for which a deleted pod runs on, at most for its grace period.
    train_seconds: for which a training runs; None means until the test ends its pods.
    gangs: what is known of each gang, by namespace, job and attempt.
    on_pod: called in the kubelet's thread with the type and the pod of each event.
    """

    def __init__(self, plane: ControlPlane, *, places: Sequence[str] = ()) -> None:
        self.gangs: dict[tuple[str, str, str], Gang] = {}
        self.stop_seconds = 0.0
        self.train_seconds: float | None = None
        self.on_pod: Callable[[str, Json], None] = lambda kind, pod: None
        self._plane = plane
        self._places = itertools.cycle(places) if places else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kubelet")
        self._watching = threading.Event()
        self._earlier: set[str] | None = None  # pods that another kubelet left
        self._started: set[str] = set()
        self._stopping: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        eventually("the kubelet watches", lambda: self._watching.is_set() or not self._thread.is_alive())
        self.check()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._main.cancel)
            self._thread.join(30)

    def check(self) -> None:
        """Raise the error that ended the kubelet."""
        if self._error is not None:
            raise RuntimeError("the simulated kubelet failed") from self._error

    def add(self, name: str, *, labels: Mapping[str, str] | None = None) -> None:
        """Add a node that is ready for one pod of these tests."""
        size = {SLOT: "1", "cpu": "64", "memory": "256Gi", "pods": "110"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
        status = {"capacity": size, "allocatable": size, "conditions": [ready]}
        path = "/api/v1/nodes"
        self._plane.request("POST", path, {"metadata": {"name": name, "labels": dict(labels or {})}, "status": status})
        # The API server taints a new node as not ready; the controller that removes the taint does not run.
        self._plane.request("PATCH", f"{path}/{name}", {"spec": {"taints": None}})

    def longest_partial(self) -> float:
        """Return for how many seconds a gang was bound in part, at most; pods of a gang are bound one by one."""
        now = time.monotonic()
        since = [now - gang.partial_since for gang in self.gangs.values() if gang.partial_since is not None]
        return max([gang.longest_partial for gang in self.gangs.values()] + since, default=0.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        trust = ssl.create_default_context(cafile=str(self._plane.ca_file))
        headers = {"Authorization": f"Bearer {self._plane.admin_token}"}
        connector = aiohttp.TCPConnector(limit=32, ssl=trust)
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:
            self._session = session
            while True:
                await self._list_and_watch()

    async def _list_and_watch(self) -> None:
        url = f"{self._plane.server}/api/v1/pods"
        async with self._session.get(url) as answer:
            listed = msgspec.json.decode(await answer.read())
        if self._earlier is None:
            self._earlier = {pod["metadata"]["uid"] for pod in listed["items"]}
        for pod in listed["items"]:
            self._take("ADDED", pod)
        query = f"?watch=1&resourceVersion={listed['metadata']['resourceVersion']}&timeoutSeconds={_WATCH_SECONDS}"
        no_limit = aiohttp.ClientTimeout(total=None)
        async with self._session.get(url + query, timeout=no_limit, read_bufsize=2**21) as answer:
            self._watching.set()
            async for line in answer.content:
                event = msgspec.json.decode(line)
                if event["type"] == "ERROR":
                    return
                self._take(event["type"], event["object"])

    def _take(self, kind: str, pod: Json) -> None:
        meta = pod["metadata"]
        if meta["uid"] in (self._earlier or ()):
            return
        self._count(kind, pod)
        self.on_pod(kind, pod)
        if kind == "ADDED" and self._places is not None and "nodeName" not in pod["spec"]:
            self._do(self._bind(pod, next(self._places)))
        if kind == "DELETED" or "nodeName" not in pod["spec"]:
            return
        if "deletionTimestamp" in meta:
            if meta["uid"] not in self._stopping:
                self._stopping.add(meta["uid"])
                self._do(self._stop(pod))
        elif pod["status"]["phase"] == "Pending" and meta["uid"] not in self._started:
            self._started.add(meta["uid"])
            self._do(self._start(pod))

    def _count(self, kind: str, pod: Json) -> None:
        if "nodeName" not in pod["spec"] or (gang := self._gang(pod)) is None:
            return
        name = pod["metadata"]["name"]
        change = gang.lose if kind == "DELETED" else gang.bind
        change(name, time.monotonic())

    def _gang(self, pod: Json) -> Gang | None:
        labels = pod["metadata"].get("labels") or {}
        if names.LABEL_JOB_NAME not in labels:
            return None
        key = (pod["metadata"]["namespace"], labels[names.LABEL_JOB_NAME], labels[names.LABEL_ATTEMPT])
        if key not in self.gangs:
            self.gangs[key] = Gang(_size(pod))
        return self.gangs[key]

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
            self._main.cancel()

    async def _bind(self, pod: Json, node: str) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        await self._send("POST", pod, "/binding", {"metadata": {"name": pod["metadata"]["name"]}, "target": target})

    async def _start(self, pod: Json) -> None:
        await self._send("PATCH", pod, "/status", {"status": running()})
        if (gang := self._gang(pod)) is None or self.train_seconds is None:
            return
        gang.running[pod["metadata"]["name"]] = pod
        if len(gang.running) < gang.size:
            return
        await asyncio.sleep(self.train_seconds)
        if len(gang.running) == gang.size:
            for member in [*gang.running.values()]:
                await self._send("PATCH", member, "/status", {"status": ended(0)})

    async def _stop(self, pod: Json) -> None:
        await asyncio.sleep(min(self.stop_seconds, pod["metadata"].get("deletionGracePeriodSeconds") or 0))
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        await self._send("DELETE", pod, "", options)

    async def _send(self, method: str, pod: Json, more: str, body: Json) -> None:
        """Send a request. A pod that is gone is as good as stopped."""
        meta = pod["metadata"]
        url = f"{self._plane.server}/{names.PODS.path(meta['namespace'])}/{meta['name']}{more}"
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        async with self._session.request(method, url, json=body, headers={"Content-Type": kind}) as answer:
            text = await answer.text()
            if answer.status >= 300 and answer.status not in (404, 409):
                raise RuntimeError(f"{method} {url}: {answer.status} {text[:500]}")


def _size(pod: Json) -> int:
    """Return the number of nodes of a pod's job."""
    (trainer,) = (each for each in pod["spec"]["containers"] if each["name"] == "trainer")
    (size,) = (each["value"] for each in trainer["env"] if each["name"] == names.ENV_NNODES)
    return int(size)
