"""Sends a sequence of requests to both clusters and compares every response, every watch event and the end state.

What memory returns must be in the API server's response, which may have more, such as defaults of pods. Uids and
versions are replaced by names in the order of their first appearance in each cluster: the third uid must be
``uid 3`` on both sides. Times must be present, with any value. ``managedFields`` are dropped.
"""

import asyncio
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob.api.quantities import amount
from ddpjob_operator.cluster.base import ClusterError, Invalid, NotServed, Page
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.cluster.kubernetes import KubernetesCluster
from tests.processes import eventually_async
from tests.worlds.client import list_all
from tests.worlds.contract.requests import KINDS_BY_NAME, NAMESPACE, Request
from tests.worlds.control_plane import ControlPlane
from tests.worlds.memory import RESOURCES, MemoryCluster

WAIT_SECONDS = 30.0
TIMES = ("creationTimestamp", "deletionTimestamp")
DEAD_UID = "dead0000-0000-4000-8000-000000000000"
UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
Event = tuple[Resource, Json]


class Side:
    """One cluster during one sequence: the metadata it returned, and the names given to its uids and versions."""

    def __init__(self, cluster: MemoryCluster | KubernetesCluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.seen: dict[tuple[str, str], list[Json]] = defaultdict(list)
        self.uids: dict[str, str] = {}
        self.versions: dict[str, str] = {}

    def resolve(self, value: Any) -> Any:
        """Return a request's body or argument with the placeholders of ``requests`` replaced."""
        if isinstance(value, dict):
            if "$uid" in value:
                return self._of(value["$uid"], "uid", value.get("first", False)) or DEAD_UID
            if "$version" in value:
                return self._of(value["$version"], "resourceVersion", value.get("first", False)) or "1"
            return {key: self.resolve(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.resolve(item) for item in value]
        return self.namespace if value == NAMESPACE else value

    def _of(self, place: list[str], key: str, first: bool) -> str:
        objects = self.seen.get((place[0], place[1])) or [{}]
        return str(objects[0 if first else -1].get(key, ""))

    async def send(self, request: Request) -> Any:
        """Return the response or error in a form that can be compared."""
        verb = partial(list_all, self.cluster) if request.verb == "list" else getattr(self.cluster, request.verb)
        arguments = {key: self.resolve(value) for key, value in request.arguments.items()}
        try:
            response = await verb(KINDS_BY_NAME[request.kind], self.namespace, **arguments)
        except ClusterError as error:
            return self.normal(_description(error))
        if isinstance(response, Page):
            assert response.resource_version.isdecimal()
            return [self.object(obj) for obj in response.items]
        return self.object(response) if "uid" in response.get("metadata", {}) else self.normal(response)

    def object(self, obj: Json) -> Json:
        """Return an object in a form that can be compared."""
        meta = obj["metadata"]
        self.seen[obj["kind"], meta["name"]].append(meta)
        meta = {key: value for key, value in meta.items() if key != "managedFields"}
        version = meta["resourceVersion"]
        # The API server stores a claim again at its first update, even if nothing changes.
        is_claim = obj["kind"] == names.CLAIMS.kind
        meta["resourceVersion"] = "<version>" if is_claim else self._named(self.versions, version, "version")
        meta |= {key: "<time>" for key in TIMES if key in meta}
        self._named(self.uids, meta["uid"], "uid")
        normal: Json = self.normal(obj | {"metadata": meta})
        return normal

    def normal(self, value: Any) -> Any:
        """Return a value with every uid of this cluster replaced by its name."""
        if isinstance(value, dict):
            return {key: self.normal(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.normal(item) for item in value]
        if isinstance(value, str):
            return UID.sub(lambda found: self.uids.get(found[0], found[0]), value)
        return value

    @staticmethod
    def _named(known: dict[str, str], value: str, what: str) -> str:
        return known.setdefault(value, f"{what} {len(known) + 1}")

    async def objects(self) -> list[Json]:
        """Return all objects of the namespace."""
        lists = await asyncio.gather(*(list_all(self.cluster, kind, self.namespace) for kind in RESOURCES))
        return [obj for listed in lists for obj in listed.items]

    async def outline(self) -> list[Any]:
        """Return what collectors change: the objects, whether they terminate, their finalizers and number of owners."""
        found = [(obj["kind"], obj["metadata"]) for obj in await self.objects()]
        return [
            (
                kind,
                meta["name"],
                "deletionTimestamp" in meta,
                meta.get("finalizers"),
                len(meta.get("ownerReferences", ())),
            )
            for kind, meta in found
        ]

    def histories(self, events: Sequence[Event]) -> dict[str, list[Json]]:
        """Return the watch events of each object, in order. The order between objects depends on controllers."""
        found: dict[str, list[Json]] = defaultdict(list)
        for resource, event in events:
            obj = event["object"]
            meta = obj["metadata"]
            key = f"{resource.plural}/{meta['name']}/{self.uids.get(meta['uid'], meta['uid'])}"
            normal = self.object(obj)
            normal["metadata"].pop("resourceVersion")
            compared: Json = {"type": event["type"], "object": normal}
            if resource is names.CLAIMS and found[key] and found[key][-1]["object"] == normal:
                continue  # see object()
            found[key].append(compared)
        return dict(found)


def _description(error: ClusterError) -> Json:
    details = {key: value for key, value in error.details.items() if key != "causes"}
    causes = sorted({cause.get("field", "") for cause in error.details.get("causes", ())})
    said = {} if isinstance(error, Invalid | NotServed) else {"message": str(error)}
    return {"error": type(error).__name__, "code": error.code, "details": details, "causes": causes} | said


def _with_reported_causes(expected: Any, got: Any, *, of_job: bool) -> Any:
    """Return the API server's error with the causes that memory reports, which may be fewer.

    Of a DDPJob with several mistakes the models may also find more, if the API server skipped the CEL rules because of
    other mistakes.
    """
    theirs, ours = (set(error.get("causes") or ()) if isinstance(error, dict) else set() for error in (expected, got))
    is_part = bool(theirs & ours) if of_job else bool(ours) and ours <= theirs
    return expected | {"causes": got["causes"]} if is_part else expected


class Comparison:
    """Runs sequences, each in a namespace of its own. ``outcomes`` counts the responses.

    real: the client of the API server. events: of its watches, by namespace.
    """

    def __init__(self, plane: ControlPlane, real: KubernetesCluster) -> None:
        self.real = real
        self.outcomes: Counter[tuple[str, str, str]] = Counter()
        self.events: dict[str, list[Event]] = defaultdict(list)
        self._plane = plane
        self._numbers = itertools.count(1)

    def new_namespace(self) -> str:
        """Create a namespace in the real cluster, and return its name."""
        self._plane.make_namespace(name := f"{NAMESPACE}-{next(self._numbers)}")
        return name

    async def run(self, sequence: Sequence[Request]) -> None:
        """Run a sequence. Raises ``AssertionError`` at the first difference."""
        namespace, cluster = self.new_namespace(), MemoryCluster(collects=False)
        cluster.create_namespace(namespace)
        watches = [(resource, cluster.watch(resource, namespace)) for resource in RESOURCES]
        memory, real = Side(cluster, namespace), Side(self.real, namespace)
        for number, request in enumerate(sequence, 1):
            where = f"request {number} of {len(sequence)}, {request}"
            expected, got = await real.send(request), await memory.send(request)
            expected = _with_reported_causes(expected, got, of_job=request.kind == names.DDPJOBS.kind)
            is_error = isinstance(got, dict) and "error" in got
            self.outcomes[request.verb, request.kind, got["error"] if is_error else "ok"] += 1
            assert not (found := difference(got, expected)), f"{where}: {found}"
            await self.collect(memory, real, where)
        expected, got = [[side.object(obj) for obj in await side.objects()] for side in (real, memory)]
        assert not (found := difference(got, expected)), f"at the end: {found}"
        got = memory.histories([(resource, event) for resource, watch in watches for event in watch.take()])
        number = sum(map(len, got.values()))
        await self._until(lambda: sum(map(len, real.histories(self.events[namespace]).values())) >= number)
        expected = real.histories(self.events.pop(namespace, ()))
        assert not (found := difference(got, expected)), f"watches: {found}"

    async def collect(self, memory: Side, real: Side, where: str) -> None:
        """Run the in-memory collector. If it had work, wait until the controllers of the real cluster did the same."""
        if not memory.cluster.collect():
            return
        expected, found = await memory.outline(), await real.outline()
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while found != expected:
            late = asyncio.get_running_loop().time() > deadline
            assert not late, f"{where}: memory has {expected}, the API server {found}"
            await asyncio.sleep(0.005)
            found = await real.outline()

    async def _until(self, probe: Any) -> None:
        try:
            await eventually_async("the watch events", probe, timeout=WAIT_SECONDS)
        except AssertionError:
            return  # the caller shows the difference

    async def follow(self, session: aiohttp.ClientSession, server: str, resource: Resource, since: str) -> None:
        """Read a watch of all namespaces until the task is cancelled."""
        query = {"watch": "true", "resourceVersion": since}
        unlimited = aiohttp.ClientTimeout(total=None)
        async with session.get(f"{server}/{resource.path()}", params=query, timeout=unlimited) as response:
            response.raise_for_status()
            async for line in response.content:
                event = json.loads(line)
                self.events[event["object"]["metadata"].get("namespace", "")].append((resource, event))


@asynccontextmanager
async def comparing(plane: ControlPlane) -> AsyncIterator[Comparison]:
    """Yield a comparison with the watches of the real cluster open."""
    connection = await Connection.open(str(plane.kubeconfig()))
    comparison = Comparison(plane, KubernetesCluster(connection))
    async with connection.session(0) as session:
        since = (await list_all(comparison.real, names.EVENTS)).resource_version
        watches = [comparison.follow(session, connection.server, kind, since) for kind in RESOURCES]
        followers = [asyncio.create_task(watch) for watch in watches]
        try:
            yield comparison
        finally:
            for task in followers:
                task.cancel()
            results: list[Any] = await asyncio.gather(*followers, return_exceptions=True)
            await comparison.real.close()
    broken = [result for result in results if not isinstance(result, asyncio.CancelledError)]
    assert not broken, f"a watch of the real API server ended: {broken}"


def difference(got: Any, expected: Any, path: str = "response") -> str:
    """Return the first place where the API server lacks what memory has; empty if there is none."""
    if isinstance(got, dict) and isinstance(expected, dict):
        found = (difference(value, expected.get(key), f"{path}.{key}") for key, value in got.items())
        return next(filter(None, found), "")
    if isinstance(got, list) and isinstance(expected, list):
        same_length = len(got) == len(expected) or path.endswith(".tolerations")  # of node loss, which a plugin adds
        pairs = zip(got, expected, strict=False)
        found = (difference(*pair, f"{path}[{index}]") for index, pair in enumerate(pairs))
        return next(filter(None, found), "") if same_length else f"{path}: {len(got)} and {len(expected)} items"
    is_same = got == expected or not (got or expected) or _is_same_amount(got, expected)
    return "" if is_same else f"{path}\n  memory:     {got}\n  API server: {expected}"


def _is_same_amount(one: Any, other: Any) -> bool:
    try:
        return amount(one) == amount(other)
    except ValueError:
        return False
