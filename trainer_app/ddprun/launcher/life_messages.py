"""What the launchers of a group say to each other about restarts in place, and its form as JSON.

Each message carries the number of its life, the fencing token: a message of another life changes nothing. Launchers of
another job or attempt are not connected (``peers``). The launcher of a node uses the same classes for what happens to
its ranks, and for the orders that it carries out.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from ddprun.files import Json

_LONGEST_TEXT = 300  # characters; a report of the failure, with its traceback, stays on its node


@dataclass(frozen=True)
class RanksFailure:
    """How the ranks of a node failed: the fields of its report on which the decision depends, and its message.

    Attributes:
        cause: "own", or "peer" if the node only lost another one.
    """

    code: int
    cause: str = "own"
    kind: str | None = None
    exception: str | None = None
    rank: int | None = None
    step: int | None = None
    message: str = ""

    @classmethod
    def of_report(cls, report: Json) -> "RanksFailure":
        """Return what the leader needs of a termination report; a rank may have sent values of any type."""
        known: dict[str, Any] = {"code": 1}
        for field in dataclasses.fields(cls):
            value, types = report.get(field.name), cast("Any", field.type)
            if value is not None and isinstance(value, types):
                known[field.name] = value[:_LONGEST_TEXT] if isinstance(value, str) else value
        return cls(**known)


@dataclass(frozen=True)
class Blamed:
    """The failure that ended a life, and its node."""

    node: int
    failure: RanksFailure


@dataclass(frozen=True)
class Message:
    """Base of the messages."""

    name: ClassVar[str]
    life: int


@dataclass(frozen=True)
class Hello(Message):
    """From a node, as the first message of each connection.

    Attributes:
        boot: drawn when the launcher started, so another launcher of the same node is not taken for it.
    """

    name = "hello"
    boot: str


@dataclass(frozen=True)
class Alive(Message):
    """From both sides, when there is nothing else to say."""

    name = "alive"


@dataclass(frozen=True)
class Failed(Message):
    """From a node whose ranks have failed; some may still run."""

    name = "failed"
    failure: RanksFailure


@dataclass(frozen=True)
class Ready(Message):
    """From a node on which no process of the life exists any more.

    Attributes:
        healthy: whether ranks can be started on it again.
        port: of node 0: one that is free, the MASTER_PORT of the next life; 0 if none is.
    """

    name = "ready"
    healthy: bool = True
    failure: RanksFailure | None = None
    port: int = 0


@dataclass(frozen=True)
class Done(Message):
    """From a node whose ranks have all succeeded."""

    name = "done"


@dataclass(frozen=True)
class Stop(Message):
    """From a node that got a stop signal.

    Attributes:
        runs: its ranks run, and save a checkpoint together with all others.
    """

    name = "stop"
    runs: bool = True


@dataclass(frozen=True)
class Start(Message):
    """To all nodes, and the order for a node's own launcher: start the ranks of this life.

    Attributes:
        port: its MASTER_PORT on node 0.
        blamed: what ended the life before.
    """

    name = "start"
    port: int
    blamed: Blamed | None = None


@dataclass(frozen=True)
class Abort(Message):
    """To all nodes: kill every process of this life, and answer ``Ready``."""

    name = "abort"


@dataclass(frozen=True)
class Release(Message):
    """To all nodes: there will be no other life, and each node ends by itself.

    Attributes:
        reason: why a failure is followed by no other life; empty without a failure.
    """

    name = "release"
    reason: str = ""


@dataclass(frozen=True)
class End(Message):
    """To all nodes: kill the ranks that still run, and exit.

    Attributes:
        reason: why there is no other life.
    """

    name = "end"
    reason: str
    blamed: Blamed | None = None


_BY_NAME: dict[str, type[Message]] = {
    kind.name: kind for kind in (Hello, Alive, Failed, Ready, Done, Stop, Start, Abort, Release, End)
}


def to_json(message: Message) -> Json:
    """Return the message as JSON."""
    return {"message": message.name, **dataclasses.asdict(message)}


def from_json(document: Json) -> Message:
    """Return the message that ``to_json`` of a launcher of the same version has made.

    Raises:
        KeyError, TypeError: it is none.
    """
    fields = dict(document)
    kind = _BY_NAME[fields.pop("message")]
    if fields.get("failure"):
        fields["failure"] = RanksFailure(**fields["failure"])
    if blamed := fields.get("blamed"):
        fields["blamed"] = Blamed(blamed["node"], RanksFailure(**blamed["failure"]))
    return kind(**fields)
