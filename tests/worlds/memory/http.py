"""The in-memory cluster behind HTTP on loopback, so that the operator's whole process can run against it.

It serves what the operator and kopf request: discovery, LISTs in pages, watches, and the six kinds' writes. Events are
accepted but not stored. There is no authentication and no TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import AlreadyExists, ClusterError
from tests.worlds.kubeconfig import write_kubeconfig
from tests.worlds.memory import RESOURCES, MemoryCluster
from tests.worlds.memory.watch import WatchEvent

BOOKMARK_SECONDS = 30.0
# kopf waits until discovery has these two, and requests nothing of them.
ONLY_DISCOVERED = (
    Resource("v1", "Namespace", "namespaces"),
    Resource("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions"),
)
VERBS = ["create", "delete", "get", "list", "patch", "watch"]


class MemoryHttp:
    """Use as an asynchronous context manager; ``url`` is the server's address."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.url = ""
        self._cluster = cluster
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.5)
        self._by_path = {(r.api_version, r.plural): r for r in RESOURCES}
        self._lists: dict[str, list[Json]] = {}
        self._tokens = (str(number) for number in itertools.count(1))

    async def __aenter__(self) -> MemoryHttp:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def kubeconfig(self, folder: Path) -> Path:
        """Write a kubeconfig for this server, and return its path."""
        return write_kubeconfig(folder / "kubeconfig", self.url, {"token": "none"})

    def encode(self, value: Any) -> bytes:
        """Return the JSON of a response or an event."""
        return json.dumps(value).encode()

    def _response(self, value: Any, status: int = 200) -> web.Response:
        return web.Response(body=self.encode(value), status=status, content_type="application/json")

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        version = "/".join(parts[1:2] if parts[0] == "api" else parts[1:3])
        rest = parts[2 if parts[0] == "api" else 3 :]
        if not rest:
            return self._response(_discovery(parts[0], version))
        namespace = rest[1] if rest[0] == "namespaces" and len(rest) > 2 else None
        plural, *name = rest[2:] if namespace else rest
        resource = self._by_path.get((version, plural))
        if resource is None:
            return self._response(_status(404, "NotFound", f"no {plural} in {version}"), status=404)
        try:
            return await self._serve(request, resource, namespace, name)
        except ClusterError as error:
            code = error.code or 500
            reason = "AlreadyExists" if isinstance(error, AlreadyExists) else type(error).__name__
            return self._response(_status(code, reason, str(error), error.details), status=code)

    async def _serve(
        self, request: web.BaseRequest, resource: Resource, namespace: str | None, name: list[str]
    ) -> web.StreamResponse:
        server, query = self._cluster.server, request.query
        if namespace is None or not (name or request.method == "POST"):
            if query.get("watch") == "true":
                return await self._watch(request, resource, namespace)
            return self._response(self._page(resource, namespace, query.get("labelSelector"), query))
        body = json.loads(await request.read() or b"{}")
        match request.method:
            case "POST" if resource is names.EVENTS:
                return self._response(body, status=201)
            case "POST":
                return self._response(server.create(resource, namespace, body), status=201)
            case "PATCH" if name[1:] == ["status"]:
                return self._response(server.patch_status(resource, namespace, name[0], body))
            case "PATCH":
                return self._response(server.patch(resource, namespace, name[0], body))
            case "DELETE":
                uid, grace = (body.get("preconditions") or {}).get("uid"), body.get("gracePeriodSeconds")
                return self._response(server.delete(resource, namespace, name[0], uid=uid, grace_seconds=grace))
            case _:
                return self._get(resource, namespace, name, query)

    def _get(self, resource: Resource, namespace: str, name: list[str], query: Any) -> web.Response:
        server = self._cluster.server
        if name[1:] != ["log"]:
            return self._response(server.get(resource, namespace, name[0]))
        lines, limit = int(query["tailLines"]), int(query["limitBytes"])
        log = server.read_log(namespace, name[0], query["container"], lines=lines, limit=limit)
        return web.Response(text=log)

    def _page(self, resource: Resource, namespace: str | None, selector: str | None, query: Any) -> Json:
        token, limit = query.get("continue"), int(query.get("limit") or 0)
        if token:
            items, version = self._lists.pop(token), token.partition(".")[0]
        else:
            listed = self._cluster.server.list(resource, namespace, selector)
            items, version = list(listed.items), listed.resource_version
        page, rest = (items[:limit], items[limit:]) if limit else (items, [])
        metadata = {"resourceVersion": version}
        if rest:
            metadata["continue"] = f"{version}.{next(self._tokens)}"
            self._lists[metadata["continue"]] = rest
        kind = f"{resource.kind}List"
        return {"kind": kind, "apiVersion": resource.api_version, "metadata": metadata, "items": page}

    async def _watch(self, request: web.BaseRequest, resource: Resource, namespace: str | None) -> web.StreamResponse:
        query = request.query
        watch = self._cluster.watch(
            resource, namespace, query.get("labelSelector"), resource_version=query.get("resourceVersion")
        )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            with contextlib.suppress(ConnectionError):
                events = [self._bookmark()]  # aiohttp sends the headers with the first bytes of the body
                while True:
                    await response.write(b"".join([self.encode(event) + b"\n" for event in events]))
                    events = await self._next(watch)
        finally:
            watch.close()
        return response

    async def _next(self, watch: Any) -> list[WatchEvent]:
        """Return the events that have arrived; after a while without any a bookmark."""
        try:
            first = await asyncio.wait_for(anext(watch), BOOKMARK_SECONDS)
        except TimeoutError:
            return [self._bookmark()]
        return [first, *watch.take()]

    def _bookmark(self) -> WatchEvent:
        return {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self._cluster.store.version)}}}


def _discovery(root: str, version: str) -> Json:
    """Return the versions of a root, or the resources of a version."""
    if version:
        found = [r for r in (*RESOURCES, *ONLY_DISCOVERED) if r.api_version == version]
        return {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [
                {"name": r.plural, "singularName": r.kind.lower(), "kind": r.kind, "namespaced": True, "verbs": VERBS}
                for r in found
            ],
        }
    if root == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    groups = []
    for path in sorted({r.api_version for r in (*RESOURCES, *ONLY_DISCOVERED) if "/" in r.api_version}):
        served = {"groupVersion": path, "version": path.partition("/")[2]}
        groups.append({"name": path.partition("/")[0], "versions": [served], "preferredVersion": served})
    return {"kind": "APIGroupList", "groups": groups}


def _status(code: int, reason: str, message: str, details: Json | None = None) -> Json:
    return {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message,
        "details": details or {},
    }  # fmt: skip
