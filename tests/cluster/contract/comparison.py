"""Sends one sequence of requests to both worlds and compares every answer, every watch event and the end.

What a server makes up by itself is given a name by the order of its first appearance, in each world: the third uid
seen is ``uid 3`` on both sides or the worlds differ. Times only have to be there. ``managedFields`` are dropped.
"""

import asyncio
import contextlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.wire import Json
from ddpjob.cluster.base import ClusterError, Invalid, NotFound, ObjectList
from tests.cluster.contract.bodies import FENCES
from tests.cluster.contract.requests import KINDS_BY_NAME, Request
from tests.cluster.contract.worlds import KINDS, NAMESPACE, MemoryWorld, RealWorld
from tests.processes import eventually_async

World = MemoryWorld | RealWorld

WAIT_SECONDS = 30.0
TIMES = ("creationTimestamp", "deletionTimestamp")
DEAD_UID = "dead0000-0000-4000-8000-000000000000"
UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass
class Side:
    """One world during one sequence: what was seen of it, under which names."""

    world: World
    seen: dict[tuple[str, str], list[Json]] = field(default_factory=lambda: defaultdict(list))
    uids: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def resolve(self, value: Any) -> Any:
        """A request's body or argument with the placeholders of ``requests`` filled in."""
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
        """The answer, or the error, in a form that can be compared."""
        verb = getattr(self.world.cluster, request.verb)
        arguments = {key: self.resolve(value) for key, value in request.arguments.items()}
        try:
            answer = await verb(KINDS_BY_NAME[request.kind], NAMESPACE, **arguments)
        except ClusterError as error:
            return self.normal(_description(error))
        if isinstance(answer, ObjectList):
            assert answer.resource_version.isdecimal()
            return [self.object(obj) for obj in answer.items]
        return self.object(answer) if "uid" in answer.get("metadata", {}) else self.normal(answer)

    def object(self, obj: Json) -> Json:
        meta = obj["metadata"]
        self.seen[obj["kind"], meta["name"]].append(meta)
        meta = {key: value for key, value in meta.items() if key != "managedFields"}
        version = meta["resourceVersion"]
        # The API server stores a claim anew at its first update even where that changes nothing.
        is_claim = obj["kind"] == names.CLAIMS.kind
        meta["resourceVersion"] = "<version>" if is_claim else self._named(self.versions, version, "version")
        meta |= {key: "<time>" for key in TIMES if key in meta}
        self._named(self.uids, meta["uid"], "uid")
        normal: Json = self.normal(obj | {"metadata": meta})
        return normal

    def normal(self, value: Any) -> Any:
        """With every uid that this world made up replaced by its name, wherever it stands."""
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
        """Everything there is of these kinds."""
        return [self.object(obj) for obj in await _everything(self.world, kinds)]

    def histories(self, events: list[tuple[Resource, Json]]) -> dict[str, list[Json]]:
        """Watch events of each object, in order; between objects controllers decide the order."""
        found: dict[str, list[Json]] = defaultdict(list)
        for resource, event in events:
            obj = event["object"]
            meta = obj["metadata"]
            key = f"{resource.plural}/{meta['name']}/{self.uids.get(meta['uid'], meta['uid'])}"
            told: Json = {"type": event["type"], "object": _without_version(self.object(obj))}
            if resource is names.CLAIMS and found[key] and found[key][-1]["object"] == told["object"]:
                continue  # see object()
            found[key].append(told)
        return dict(found)


def _description(error: ClusterError) -> Json:
    details = {key: value for key, value in error.details.items() if key != "causes"}
    causes = sorted({(c.get("field", ""), c.get("reason", "")) for c in error.details.get("causes", ())})
    said = {} if isinstance(error, Invalid) or _is_about_a_url(error) else {"message": str(error)}
    return {"error": type(error).__name__, "code": error.code, "details": details, "causes": causes} | said


def _with_reported_causes(expected: Any, got: Any) -> Any:
    """Return the API server's error with only those of its causes that memory reports, if it reports any.

    Of a DDPJob with several mistakes the models may find fewer than schema and CEL rules do, but nothing else.
    """
    both = [answer for answer in (expected, got) if isinstance(answer, dict) and answer.get("causes")]
    if len(both) < 2 or not (reported := [cause for cause in got["causes"] if cause in expected["causes"]]):
        return expected
    return expected | {"causes": reported}


def _is_about_a_url(error: ClusterError) -> bool:
    return isinstance(error, NotFound) and not error.details


def _without_version(obj: Json) -> Json:
    return obj | {"metadata": {key: value for key, value in obj["metadata"].items() if key != "resourceVersion"}}


class Comparison:
    """Runs sequences. ``outcomes`` counts the answers, ``collections`` how often the collectors had work."""

    def __init__(self, memory: MemoryWorld, real: RealWorld) -> None:
        self._memory, self._real = memory, real
        self.outcomes: Counter[tuple[str, str, str]] = Counter()
        self.collections = 0

    async def run(self, sequence: Sequence[Request]) -> None:
        """Raises ``AssertionError`` at the first difference. Leaves both worlds empty."""
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

    async def _settle(self, where: str, kinds: Sequence[Resource]) -> None:
        """Where the collector has work in memory, wait until the real one has done the same."""
        if not self._memory.cluster.collect():
            return
        self.collections += 1
        await self._agree(where, kinds)

    async def _agree(self, where: str, kinds: Sequence[Resource]) -> None:
        expected = await _outline(self._memory, kinds)
        deadline = time.monotonic() + WAIT_SECONDS
        while (found := await _outline(self._real, kinds)) != expected:
            assert time.monotonic() < deadline, f"{where}: memory came down to {expected}, the API server to {found}"
            await asyncio.sleep(0.005)

    async def _clean(self, kinds: Sequence[Resource]) -> None:
        """Delete everything, then let go what finalizers hold; in two steps, so that controllers do the same twice."""
        left = await _everything(self._memory, kinds)
        for obj in _dependents_first(left):
            for world in (self._memory, self._real):
                await _delete(world, obj)
        await self._settle("cleaning up", kinds)
        for obj in await _everything(self._memory, kinds):
            for world in (self._memory, self._real):
                await _let_go(world, obj)
        await self._settle("letting go", kinds)

    async def clear(self) -> None:
        """After a difference, when neither world can be told from the other: empty both, forget all events."""
        for world in (self._memory, self._real):
            for act in (_delete, _let_go):
                for obj in await _everything(world, KINDS):
                    await act(world, obj)
        self._memory.cluster.collect()
        await self._agree("clearing both worlds", KINDS)
        await self._drain()

    async def _compare_events(self, memory: Side, real: Side) -> None:
        """What watches told of the whole sequence, the cleaning included."""
        expected = self._memory.take_events()
        number = _deletions(expected)
        await eventually_async(f"{number} DELETED events", lambda: _deletions(self._real.events) >= number)
        told, got = real.histories(self._real.take_events()), memory.histories(expected)
        assert got == told, f"watches: {_difference(got, told)}"

    async def _drain(self) -> None:
        """Forget all events up to now: those of two fences, one in each world, are the last."""
        for world in (self._memory, self._real):
            for kind in KINDS:
                body = FENCES[kind.kind] | {"metadata": {"name": "fence"}}
                await world.cluster.create(kind, NAMESPACE, body)
                await world.cluster.delete(kind, NAMESPACE, "fence", grace_seconds=0)
        await self._settle("draining the watches", KINDS)
        left = {kind.kind for kind in KINDS}
        deadline = time.monotonic() + WAIT_SECONDS
        while left:
            assert time.monotonic() < deadline, f"the watches do not come to the fence: {left}"
            await asyncio.sleep(0.005)
            for _, event in self._real.take_events():
                if event["type"] == "DELETED" and event["object"]["metadata"]["name"] == "fence":
                    left.discard(event["object"]["kind"])
        self._memory.take_events()


async def _delete(world: World, obj: Json) -> None:
    with contextlib.suppress(NotFound):
        kind, name = KINDS_BY_NAME[obj["kind"]], obj["metadata"]["name"]
        await world.cluster.delete(kind, NAMESPACE, name, grace_seconds=0)


async def _let_go(world: World, obj: Json) -> None:
    with contextlib.suppress(NotFound):
        kind, name = KINDS_BY_NAME[obj["kind"]], obj["metadata"]["name"]
        await world.cluster.patch(kind, NAMESPACE, name, {"metadata": {"finalizers": None}})


def _dependents_first(objects: list[Json]) -> Iterator[Json]:
    """No object before those that it owns, so that no collector gets at them first."""
    left = list(objects)
    while left:
        owners = {ref["uid"] for obj in left for ref in obj["metadata"].get("ownerReferences", ())}
        free = [obj for obj in left if obj["metadata"]["uid"] not in owners]
        yield from free
        left = [obj for obj in left if obj not in free]


def _outcome(answer: Any) -> str:
    return str(answer["error"]) if isinstance(answer, dict) and "error" in answer else "ok"


def _deletions(events: list[tuple[Resource, Json]]) -> int:
    """How many objects came to their end: after the cleaning, all."""
    return sum(event["type"] == "DELETED" for _, event in events)


async def _everything(world: World, kinds: Sequence[Resource]) -> list[Json]:
    lists = await asyncio.gather(*(world.cluster.list(kind, NAMESPACE) for kind in kinds))
    return [obj for listed in lists for obj in listed.items]


async def _outline(world: World, kinds: Sequence[Resource]) -> list[Any]:
    """What collectors change: which objects there are, which of them are going, what holds them."""
    objects = [(obj["kind"], obj["metadata"]) for obj in await _everything(world, kinds)]
    return [
        (kind, meta["name"], "deletionTimestamp" in meta, meta.get("finalizers"), len(meta.get("ownerReferences", ())))
        for kind, meta in objects
    ]


def _difference(got: Any, expected: Any, path: str = "answer") -> str:
    """The first place where memory and the API server differ."""
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in sorted({*got, *expected}):
            if got.get(key, "(absent)") != expected.get(key, "(absent)"):
                return _difference(got.get(key, "(absent)"), expected.get(key, "(absent)"), f"{path}.{key}")
    if isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            if one != other:
                return _difference(one, other, f"{path}[{index}]")
    return f"{path}\n  memory:     {got}\n  API server: {expected}"
