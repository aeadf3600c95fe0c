"""An in-memory cluster with fault injection: a hook receives each call before it is carried out and returns a fault."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from ddpjob.api import names
from ddpjob.api.names import Resource
from ddpjob.api.objects import Json
from ddpjob_operator.cluster.base import ClusterError, Page, Unavailable
from tests.worlds.memory import MemoryCluster

Verb = Literal["create", "get", "list", "delete", "patch", "patch_status"]
WRITES: frozenset[Verb] = frozenset({"create", "delete", "patch", "patch_status"})
T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of a client. ``number`` counts all calls from 1, so that a fault can be injected at any of them."""

    number: int
    verb: Verb
    resource: Resource
    namespace: str | None
    name: str
    body: Json | None = None

    @property
    def is_write(self) -> bool:
        return self.verb in WRITES

    @property
    def reads_log(self) -> bool:
        return self.resource is names.PODS and self.name.endswith("/log")


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a call.

    before: raised instead of carrying it out: a typed error, or any exception that ends the client.
    after: raised after carrying it out: the response is lost.
    late_seconds: with ``before``, the request is carried out this much later, as when a network delays it.
    slow_seconds: how long the client waits for the answer, or for ``before``.
    """

    before: BaseException | None = None
    after: BaseException | None = None
    late_seconds: float | None = None
    slow_seconds: float = 0.0


Hook = Callable[[Call], Fault | None]


def lost_answer(verb: Verb) -> Fault:
    """Return the fault of a write that happens but whose response is lost."""
    return Fault(after=Unavailable(f"{verb}: connection reset"))


class FaultyCluster(MemoryCluster):
    """``hook`` returns the fault of each call, or None. Calls of ``server`` have no faults.

    late: the requests that are carried out later; they outlive the client that sent them.
    """

    def __init__(self, hook: Hook, **options: Any) -> None:
        super().__init__(**options)
        self.late: list[asyncio.Task[None]] = []
        self._hook = hook
        self._calls = 0

    async def request(self, verb: Any, *arguments: Any, **options: Any) -> Any:
        act = partial(super().request, verb, *arguments, **options)
        if verb == "read_log":
            return await self._call(act, "get", names.PODS, arguments[0], f"{arguments[1]}/log")
        resource, namespace, *rest = arguments
        name, body = (rest[0]["metadata"]["name"], rest[0]) if verb == "create" else (rest[0], (*rest, None)[1])
        return await self._call(act, verb, resource, namespace, name, body=body)

    async def pages(
        self, resource: Resource, namespace: str | None = None, *selectors: str | None, **named: Any
    ) -> AsyncIterator[Page]:
        """Yield pages; each is a call of its own, as it is a request on a real server."""
        async for page in super().pages(resource, namespace, *selectors, **named):
            yield await self._call(partial(_answer, page), "list", resource, namespace, "")

    async def _call(
        self,
        act: Callable[[], Awaitable[T]],
        verb: Verb,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        body: Json | None = None,
    ) -> T:
        self._calls += 1
        fault = self._hook(Call(self._calls, verb, resource, namespace, name, body)) or Fault()
        if fault.slow_seconds:
            await asyncio.sleep(fault.slow_seconds)
        if fault.before is not None:
            if fault.late_seconds is not None:
                self.late.append(asyncio.create_task(_later(act, fault.late_seconds)))
            raise fault.before
        response = await act()
        if fault.after is not None:
            raise fault.after
        return response


async def _later(act: Callable[[], Awaitable[Any]], seconds: float) -> None:
    await asyncio.sleep(seconds)
    with contextlib.suppress(ClusterError):
        await act()


async def _answer(page: Page) -> Page:
    return page
