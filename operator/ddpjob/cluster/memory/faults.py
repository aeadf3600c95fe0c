"""Faults on request: what a test or a demonstration wants to go wrong with one call.

A hook sees every call before it is carried out and says what shall happen to it; None means that nothing does.
"""

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
    """One call of a client. ``number`` counts all calls from 1, so that a fault can be put at any of them."""

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
    """What happens to a call.

    before: raised instead of carrying it out, whatever exception (a typed error, or one that ends the client).
    after: raised when it was carried out: the answer is lost.
    delay: seconds of the loop's time before anything else.
    """

    before: BaseException | None = None
    after: BaseException | None = None
    delay: float = 0.0


Hook = Callable[[Call], Fault | None]


def lost_answer(verb: Verb) -> Fault:
    """The write happens, and its client never learns."""
    return Fault(after=Unavailable(f"{verb}: connection reset"))
