"""A control plane with garbage collection, a proxy in front of it for the operators, and the requests of a test."""

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import aiohttp
from aiohttp import web

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from tests.builders import ended, running
from tests.injection.history import History
from tests.worlds.control_plane import ControlPlane
from tests.worlds.fault_proxy import Fault, FaultProxy
from tests.worlds.memory.store import Change

STOP_SECONDS = 0.2
"""How long the trainers of a deleted pod take to stop."""
SIGTERM_OBEYED = 75
WRITES = ("POST", "PATCH", "DELETE")

_numbers = itertools.count(1)


class Cluster:
    """Acts on the API server as users and as nodes do.

    A pod that is bound and deleted stops after ``STOP_SECONDS``, but not before the operator has recorded that its
    attempt ends: a trainer takes longer to save a checkpoint than an operator to start again.

    rules: by namespace, the rule of the requests of its operator.
    """

    def __init__(self, plane: ControlPlane, proxy: FaultProxy, session: aiohttp.ClientSession) -> None:
        self.plane = plane
        self.proxy = proxy
        self.history = History(session, self._on_change)
        self.rules: dict[str, Callable[[web.BaseRequest], Fault | None]] = {}
        self._session = session
        self._tasks: set[asyncio.Task[None]] = set()
        proxy.rule = self._fault

    def close(self) -> None:
        """Stop no more pods: those of a run that failed may wait for a record that never comes."""
        for task in self._tasks:
            task.cancel()

    async def request(self, method: str, path: str, body: Json | None = None) -> Json:
        """Send one request. A PATCH is a merge patch. Raises ``aiohttp.ClientResponseError``."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Content-Type": kind}
        async with self._session.request(method, f"/{path}", json=body, headers=headers) as answer:
            answer.raise_for_status()
            return dict(await answer.json())

    async def new_namespace(self) -> str:
        """Create a namespace in which pods can be created."""
        name = f"run-{next(_numbers)}"
        await self.request("POST", "api/v1/namespaces", {"metadata": {"name": name}})
        path = f"api/v1/namespaces/{name}/serviceaccounts"
        with contextlib.suppress(aiohttp.ClientResponseError):  # kube-controller-manager may have been faster
            await self.request("POST", path, {"metadata": {"name": "default"}})
        return name

    async def start(self, pod: Json) -> None:
        """Bind a pod to a node and start its containers; nothing happens if it is gone or being deleted."""
        node = f"worker-{pod['metadata']['labels'][names.LABEL_NODE_RANK]}"
        body = {"apiVersion": "v1", "kind": "Binding", "target": {"apiVersion": "v1", "kind": "Node", "name": node}}
        with contextlib.suppress(aiohttp.ClientResponseError):
            await self.request("POST", f"{path_of(names.PODS, pod)}/binding", body | {"metadata": _named(pod)})
            await self.report(pod, running())

    async def report(self, pod: Json, status: Json) -> None:
        """Write the status of a pod, as its kubelet."""
        await self.request("PATCH", f"{path_of(names.PODS, pod)}/status", {"status": status})

    async def evict(self, pod: Json) -> None:
        """Evict a pod, as `kubectl drain` does."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": _named(pod)}
        await self.request("POST", f"{path_of(names.PODS, pod)}/eviction", body)

    def _on_change(self, change: Change) -> None:
        """Stop a deleted pod. Called for each change."""
        is_new = "deletionTimestamp" not in (change.before or change.obj)["metadata"]
        is_deleted = change.type == "MODIFIED" and "deletionTimestamp" in change.obj["metadata"]
        if change.resource is names.PODS and is_deleted and is_new:
            task = asyncio.create_task(self._stop(change.obj))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _stop(self, pod: Json) -> None:
        await self.history.until(
            pod["metadata"]["namespace"], lambda: "the end is recorded", lambda: self._is_over(pod)
        )
        await asyncio.sleep(STOP_SECONDS)
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        with contextlib.suppress(aiohttp.ClientResponseError):
            if pod["status"].get("phase") not in ("Succeeded", "Failed"):
                await self.report(pod, ended(SIGTERM_OBEYED, at=datetime.now(UTC)))
            await self.request("DELETE", path_of(names.PODS, pod), options)

    def _is_over(self, pod: Json) -> bool:
        meta = pod["metadata"]
        job = self.history.get(names.DDPJOBS, meta["namespace"], meta["labels"][names.LABEL_JOB_NAME])
        status = (job or {}).get("status") or {}
        is_ending = (status.get("currentAttempt") or {}).get("phase") in (None, "Ending")
        return is_ending or status["attempt"] > int(meta["labels"][names.LABEL_ATTEMPT]) or "completionTime" in status

    def _fault(self, request: web.BaseRequest) -> Fault | None:
        rule = self.rules.get(namespace_of(request.path))
        return rule(request) if rule else None


def path_of(resource: Resource, obj: Json) -> str:
    """Return the URL path of an object."""
    return f"{resource.path(obj['metadata']['namespace'])}/{obj['metadata']['name']}"


def namespace_of(path: str) -> str:
    """Return the namespace in a URL path, or ""."""
    _, found, rest = path.partition("/namespaces/")
    return rest.partition("/")[0] if found else ""


def _named(obj: Json) -> Json:
    return {key: obj["metadata"][key] for key in ("name", "namespace")}


@asynccontextmanager
async def open_cluster(plane: ControlPlane) -> AsyncIterator[Cluster]:
    """Connect to a control plane, start a proxy in front of it, and watch it."""
    context = ssl.create_default_context(cafile=str(plane.ca_file))
    headers = {"Authorization": f"Bearer {plane.admin_token}"}
    session = aiohttp.ClientSession(
        plane.server,
        headers=headers,
        connector=aiohttp.TCPConnector(ssl=context, limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
    )
    with FaultProxy(plane) as proxy:
        async with session:
            cluster = Cluster(plane, proxy, session)
            async with cluster.history:
                try:
                    yield cluster
                finally:
                    cluster.close()
