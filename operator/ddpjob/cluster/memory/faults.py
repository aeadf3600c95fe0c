"""Fault injection: a hook is called with every call before it is carried out, and returns the fault for it or None."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ddpjob.api.names import Resource
from ddpjob.api.wire import Json
from ddpjob.cluster.base import Unavailable

Verb = Literal["create", "get", "list", "delete", "patch", "patch_status"]
WRITES: frozenset[Verb] = frozenset({"create", "delete", "patch", "patch_status"})


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


@dataclass(frozen=True)
class Fault:
    """What goes wrong with a call.

    before: raised instead of carrying it out: a typed error, or any exception that ends the client.
    after: raised after carrying it out: the response is lost.
    delay: seconds of the loop's time to wait first.
    """

    before: BaseException | None = None
    after: BaseException | None = None
    delay: float = 0.0


Hook = Callable[[Call], Fault | None]


def lost_answer(verb: Verb) -> Fault:
    """Return the fault of a write that happens but whose response is lost."""
    return Fault(after=Unavailable(f"{verb}: connection reset"))
