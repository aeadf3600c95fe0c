"""Sends a sequence of requests to both clusters and compares every response, every watch event and the end state.

Uids and versions are replaced by names in the order of their first appearance in each cluster: the third uid must be
``uid 3`` on both sides. Times must be present, with any value. ``managedFields`` are dropped.
"""

import asyncio
import contextlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import ClusterError, Invalid, NotFound, NotServed, Page
from tests.processes import eventually_async
from tests.worlds.contract.bodies import FENCES
from tests.worlds.contract.requests import KINDS_BY_NAME, Request
from tests.worlds.contract.targets import KINDS, NAMESPACE, MemoryTarget, RealTarget
from tests.worlds.listing import list_all

Target = MemoryTarget | RealTarget

WAIT_SECONDS = 30.0
TIMES = ("creationTimestamp", "deletionTimestamp")
DEAD_UID = "dead0000-0000-4000-8000-000000000000"
UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass
class Side:
    """One cluster during one sequence: the metadata it returned, and the names given to its uids and versions."""

    target: Target
    seen: dict[tuple[str, str], list[Json]] = field(default_factory=lambda: defaultdict(list))
    uids: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def resolve(self, value: Any) -> Any:
        """Return a request's body or argument with the placeholders of ``requests`` replaced."""
        if isinstance(value, dict):
            if "$uid" in value:
                return self._of(value["$uid"], "uid", value.get("first", False)) or DEAD_UID
            if "$version" in value:
                return self._of(value["$version"], "resourceVersion", value.get("first", False)) or "1"
            return {key: self.resolve(item) for key, item in value.items()}
        return [self.resolve(item) for item in value] if isinstance(value, list) else value

    def _of(self, place: list[str], key: str, first: bool) -> str:
        objects = self.seen.get((place[0], place[1])) or [{}]
        return str(objects[0 if first else -1].get(key, ""))

    async def send(self, request: Request) -> Any:
        """Return the response or error in a form that can be compared."""
        cluster = self.target.cluster
        verb = partial(list_all, cluster) if request.verb == "list" else getattr(cluster, request.verb)
        arguments = {key: self.resolve(value) for key, value in request.arguments.items()}
        try:
            response = await verb(KINDS_BY_NAME[request.kind], NAMESPACE, **arguments)
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

    async def state(self, kinds: Sequence[Resource]) -> list[Json]:
        """Return all objects of these kinds."""
        return [self.object(obj) for obj in await _everything(self.target, kinds)]

    def histories(self, events: list[tuple[Resource, Json]]) -> dict[str, list[Json]]:
        """Return the watch events of each object, in order. The order between objects depends on controllers."""
        found: dict[str, list[Json]] = defaultdict(list)
        for resource, event in events:
            obj = event["object"]
            meta = obj["metadata"]
            key = f"{resource.plural}/{meta['name']}/{self.uids.get(meta['uid'], meta['uid'])}"
            compared: Json = {"type": event["type"], "object": _without_version(self.object(obj))}
            if resource is names.CLAIMS and found[key] and found[key][-1]["object"] == compared["object"]:
                continue  # see object()
            found[key].append(compared)
        return dict(found)


def _description(error: ClusterError) -> Json:
    details = {key: value for key, value in error.details.items() if key != "causes"}
    causes = sorted({(c.get("field", ""), c.get("reason", "")) for c in error.details.get("causes", ())})
    said = {} if isinstance(error, Invalid) or _is_about_a_url(error) else {"message": str(error)}
    return {"error": type(error).__name__, "code": error.code, "details": details, "causes": causes} | said


_STOPS_RULES = frozenset({"FieldValueRequired", "FieldValueTypeInvalid", "FieldValueTooLong", "FieldValueTooMany"})
"""Reasons of causes after which kube-apiserver does not evaluate CEL rules (hasBlockingErr of apiextensions)."""


def _with_reported_causes(expected: Any, got: Any) -> Any:
    """Return the API server's error with only those of its causes that memory reports, if it reports any.

    Of a DDPJob with several mistakes the models may find fewer than schema and CEL rules do. They may find more only if
    the API server skipped the CEL rules.
    """
    both = [response for response in (expected, got) if isinstance(response, dict) and response.get("causes")]
    if len(both) < 2 or not (reported := [cause for cause in got["causes"] if cause in expected["causes"]]):
        return expected
    if any(reason in _STOPS_RULES for _, reason in expected["causes"]):
        reported = [cause for cause in got["causes"] if cause in reported or cause[1] == "FieldValueInvalid"]
    return expected | {"causes": reported}


def _is_about_a_url(error: ClusterError) -> bool:
    return isinstance(error, NotServed)


def _without_version(obj: Json) -> Json:
    return obj | {"metadata": {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}}


class Comparison:
    """Runs sequences. ``outcomes`` counts the responses, ``collections`` the times that the collectors had work.

    ``equal``: the number of sequences without a difference.
    """

    def __init__(self, memory: MemoryTarget, real: RealTarget) -> None:
        self._memory, self._real = memory, real
        self.outcomes: Counter[tuple[str, str, str]] = Counter()
        self.collections = 0
        self.equal = 0

    async def run(self, sequence: Sequence[Request]) -> None:
        """Run a sequence. Raises ``AssertionError`` at the first difference. Leaves both clusters empty."""
        memory, real = Side(self._memory), Side(self._real)
        kinds = [kind for kind in KINDS if kind.kind in {request.kind for request in sequence}]
        try:
            for number, request in enumerate(sequence, 1):
                where = f"request {number} of {len(sequence)}, {request}"
                expected, got = await real.send(request), await memory.send(request)
                if request.kind == names.DDPJOBS.kind:
                    expected = _with_reported_causes(expected, got)
                self.outcomes[request.verb, request.kind, _outcome(got)] += 1
                assert got == expected, f"{where}: {_difference(got, expected)}"
                await self._settle(where, kinds)
            expected, got = await real.state(kinds), await memory.state(kinds)
            assert got == expected, f"at the end: {_difference(got, expected)}"
        except AssertionError:
            await self.clear()
            raise
        await self._clean(kinds)
        await self._compare_events(memory, real)
        self.equal += 1

    async def _settle(self, where: str, kinds: Sequence[Resource]) -> None:
        """Run the in-memory collector. If it had work, wait until the real one has done the same."""
        if not self._memory.cluster.collect():
            return
        self.collections += 1
        await self._agree(where, kinds)

    async def _agree(self, where: str, kinds: Sequence[Resource]) -> None:
        expected = await _outline(self._memory, kinds)
        deadline = time.monotonic() + WAIT_SECONDS
        while (found := await _outline(self._real, kinds)) != expected:
            assert time.monotonic() < deadline, f"{where}: memory has {expected}, the API server {found}"
            await asyncio.sleep(0.005)

    async def _clean(self, kinds: Sequence[Resource]) -> None:
        """Delete all objects, then remove finalizers. In two steps, so that both controllers do the same."""
        left = await _everything(self._memory, kinds)
        for obj in _dependents_first(left):
            for target in (self._memory, self._real):
                await _delete(target, obj)
        await self._settle("cleaning up", kinds)
        for obj in await _everything(self._memory, kinds):
            for target in (self._memory, self._real):
                await _let_go(target, obj)
        await self._settle("letting go", kinds)

    async def clear(self) -> None:
        """Empty both clusters and drop all events, after a difference."""
        for target in (self._memory, self._real):
            for act in (_delete, _let_go):
                for obj in await _everything(target, KINDS):
                    await act(target, obj)
        self._memory.cluster.collect()
        await self._agree("clearing both clusters", KINDS)
        await self._drain()

    async def _compare_events(self, memory: Side, real: Side) -> None:
        """Compare the watch events of the whole sequence, including the cleaning."""
        expected = self._memory.take_events()
        number = _deletions(expected)
        await eventually_async(f"{number} DELETED events", lambda: _deletions(self._real.events) >= number)
        wanted, got = real.histories(self._real.take_events()), memory.histories(expected)
        assert got == wanted, f"watches: {_difference(got, wanted)}"

    async def _drain(self) -> None:
        """Drop all events up to now. The events of a fence object, created in each cluster, are the last."""
        for target in (self._memory, self._real):
            for kind in KINDS:
                body = FENCES[kind.kind] | {"metadata": {"name": "fence"}}
                await target.cluster.create(kind, NAMESPACE, body)
                await target.cluster.delete(kind, NAMESPACE, "fence", grace_seconds=0)
        await self._settle("draining the watches", KINDS)
        left = {kind.kind for kind in KINDS}
        deadline = time.monotonic() + WAIT_SECONDS
        while left:
            assert time.monotonic() < deadline, f"no events of the fence on the watches of {left}"
            await asyncio.sleep(0.005)
            for _, event in self._real.take_events():
                if event["type"] == "DELETED" and event["object"]["metadata"]["name"] == "fence":
                    left.discard(event["object"]["kind"])
        self._memory.take_events()


async def _delete(target: Target, obj: Json) -> None:
    with contextlib.suppress(NotFound):
        kind, name = KINDS_BY_NAME[obj["kind"]], obj["metadata"]["name"]
        await target.cluster.delete(kind, NAMESPACE, name, grace_seconds=0)


async def _let_go(target: Target, obj: Json) -> None:
    with contextlib.suppress(NotFound):
        kind, name = KINDS_BY_NAME[obj["kind"]], obj["metadata"]["name"]
        await target.cluster.patch(kind, NAMESPACE, name, {"metadata": {"finalizers": None}})


def _dependents_first(objects: list[Json]) -> Iterator[Json]:
    """Yield each object after those that it owns, so that no collector deletes them first."""
    left = list(objects)
    while left:
        owners = {ref["uid"] for obj in left for ref in obj["metadata"].get("ownerReferences", ())}
        free = [obj for obj in left if obj["metadata"]["uid"] not in owners]
        yield from free
        left = [obj for obj in left if obj not in free]


def _outcome(response: Any) -> str:
    return str(response["error"]) if isinstance(response, dict) and "error" in response else "ok"


def _deletions(events: list[tuple[Resource, Json]]) -> int:
    """Return the number of objects that were deleted: after the cleaning, all."""
    return sum(event["type"] == "DELETED" for _, event in events)


async def _everything(target: Target, kinds: Sequence[Resource]) -> list[Json]:
    lists = await asyncio.gather(*(list_all(target.cluster, kind, NAMESPACE) for kind in kinds))
    return [obj for listed in lists for obj in listed.items]


async def _outline(target: Target, kinds: Sequence[Resource]) -> list[Any]:
    """Return what collectors change: the objects, whether they terminate, their finalizers and number of owners."""
    objects = [(obj["kind"], obj["metadata"]) for obj in await _everything(target, kinds)]
    return [
        (kind, meta["name"], "deletionTimestamp" in meta, meta.get("finalizers"), len(meta.get("ownerReferences", ())))
        for kind, meta in objects
    ]


def _difference(got: Any, expected: Any, path: str = "response") -> str:
    """Return the first place where memory and the API server differ."""
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in sorted({*got, *expected}):
            if got.get(key, "(absent)") != expected.get(key, "(absent)"):
                return _difference(got.get(key, "(absent)"), expected.get(key, "(absent)"), f"{path}.{key}")
    if isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            if one != other:
                return _difference(one, other, f"{path}[{index}]")
    return f"{path}\n  memory:     {got}\n  API server: {expected}"
