"""The agreement of a group's launchers on restarts in place: pure functions from (state, event, now) to actions.

The launcher of node 0 leads. A *life* is one start of all ranks of an attempt; the first begins without an agreement.

    leader      Running ──▶ Aborting ──▶ Running (the next life)                   any phase ──▶ Released, Ended
    each node   Running ──▶ Failed, Done ──▶ Ending ──▶ Ready ──▶ Running          any phase ──▶ Released, Exited

A node tells the leader that its ranks failed, and the leader tells all nodes to end theirs. Only when *each* node has
said that no process of the life exists does the leader decide, with the failures of all nodes: it starts the next life,
or ends the attempt (``escalation``), and the operator takes over. So no two lives overlap, whatever is lost or delayed.
In Released each node ends by itself, as without an agreement: a node has succeeded, or a stop signal came.

A state is never changed; ``now`` is of a monotonic clock, and no two launchers compare theirs.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ddprun import exit_codes
from ddprun.launcher.life_messages import (
    Abort,
    Alive,
    Blamed,
    Done,
    End,
    Failed,
    Hello,
    Message,
    RanksFailure,
    Ready,
    Release,
    Start,
    Stop,
)

KEEPALIVE = 2.0  # seconds between messages
SILENCE = 10.0  # seconds without a message after which the other side is lost
RECONNECT = 2.0  # seconds for a launcher to come back after its connection has ended
FRUITLESS = 3  # lives in a row without progress
FIRST_STEP = 600.0  # seconds until a later life makes its first step: the load of 100 GB takes longer than 300
_SLOWER = 2.0  # it may need so many times the seconds of the first life
_NOT_JOINED = "node 0 was not reached, has no grant, or has another version of ddprun"


@dataclass(frozen=True)
class Received:
    """A message came; of the leader's events, from this node."""

    message: Message
    node: int = 0


@dataclass(frozen=True)
class Connected:
    """Of a node: a connection to the leader begins."""


@dataclass(frozen=True)
class Lost:
    """A connection has ended; of the leader's events, to this node."""

    node: int = 0


@dataclass(frozen=True)
class Tick:
    """Time has passed. Sent at least every second."""


@dataclass(frozen=True)
class Progressed:
    """Of the leader: rank 0 made its first step in this life, or has progressed.

    Attributes:
        mark: a number that only grows when work is saved or done that no life before has done.
    """

    number: int
    mark: int


@dataclass(frozen=True)
class Send:
    """Send the message to the node; from a node, to the leader (0)."""

    message: Message
    node: int = 0


Event = Received | Connected | Lost | Tick | Progressed | Message
"""What happened. A message that is not ``Received`` is what a node says of its own ranks, or that a signal came."""
Action = Send | Message
"""What to do. A message that is not to ``Send`` is an order for the node: Start, Abort, Release or End."""


@dataclass(frozen=True)
class Seat:
    """A node as the leader sees it: its launcher, its last message, and when its connection ended if it is without."""

    boot: str
    heard: float
    lost: float | None = None


@dataclass(frozen=True)
class Leader:
    """What node 0's launcher knows of the group.

    Attributes:
        granted: how many restarts in place the operator allows.
        ready: seconds from the end of a life until no process of it exists on any node; GPUs take longer.
        seats: the nodes that have said hello.
        missing: nodes on which processes of this life may exist.
        failures: of this life by node, in the order of their arrival.
        deadline: when all nodes must be ready, in the phase Aborting.
        port: the MASTER_PORT of this life, if it is not the first; while it is aborted, of the next one.
        began: when this life began.
        mark, best: the progress of this life, and of all before it.
        fruitless: lives in a row, before this one, without progress.
        last: what ended the life before.
        first_step_took: seconds, of the first life; None if it made none.
        ended: the message of the phase Ended.
    """

    nnodes: int
    granted: int
    life: int = 1
    ready: float = 10.0
    phase: Literal["Running", "Aborting", "Released", "Ended"] = "Running"
    seats: Mapping[int, Seat] = field(default_factory=dict)
    missing: frozenset[int] = frozenset()
    failures: Mapping[int, RanksFailure] = field(default_factory=dict)
    unhealthy: frozenset[int] = frozenset()
    deadline: float = 0.0
    port: int = 0
    began: float = 0.0
    has_stepped: bool = False
    mark: int = 0
    best: int = 0
    fruitless: int = 0
    last: Blamed | None = None
    first_step_took: float | None = None
    ticked: float = 0.0
    told: float = 0.0
    ended: End | None = None

    @property
    def spent(self) -> int:
        """How many restarts in place there were."""
        return self.life - 1

    @property
    def is_over(self) -> bool:
        return self.phase in ("Released", "Ended")

    @property
    def has_progressed(self) -> bool:
        return self.mark > self.best


@dataclass(frozen=True)
class Follower:
    """What the launcher of a node, also of node 0, knows of its ranks and the leader.

    Attributes:
        joined: the leader has answered. Before, the node ends by itself, as without an agreement.
        lost: when the connection ended; None while there is one.
        failure: of this life.
        ready: what it has said last of the end of a life.
        stopping: a stop signal came.
    """

    boot: str
    life: int = 1
    phase: Literal["Running", "Failed", "Done", "Ending", "Ready", "Released", "Exited"] = "Running"
    joined: bool = False
    heard: float = 0.0
    lost: float | None = None
    ticked: float = 0.0
    told: float = 0.0
    failure: RanksFailure | None = None
    ready: Ready | None = None
    stopping: bool = False

    @property
    def is_over(self) -> bool:
        return self.phase in ("Released", "Exited")

    @property
    def runs(self) -> bool:
        """Whether ranks of this life may run."""
        return self.phase in ("Running", "Failed", "Done")


def lead(s: Leader, event: Event, now: float) -> tuple[Leader, tuple[Action, ...]]:
    """Return the leader's next state, and what it is to do."""
    match event:
        case Received():
            return _received(s, event.node, event.message, now)
        case Lost() if event.node in s.seats and s.seats[event.node].lost is None:
            return _with_seat(s, event.node, dataclasses.replace(s.seats[event.node], lost=now)), ()
        case Progressed() if s.phase in ("Running", "Aborting") and event.number == s.life:
            return _progressed(s, event.mark, now), ()
        case Tick():
            return _leader_tick(s, now)
    return s, ()


def _received(s: Leader, node: int, message: Message, now: float) -> tuple[Leader, tuple[Action, ...]]:
    if isinstance(message, Hello):
        return _hello(s, node, message, now)
    seat = s.seats.get(node)
    if seat is None or seat.lost is not None:
        return s, ()  # of a connection that has ended
    s = _with_seat(s, node, dataclasses.replace(seat, heard=now))
    if isinstance(message, Stop) and not s.is_over:
        # Ranks of all nodes save a checkpoint together, unless this node has none, or they are being ended.
        saves = message.runs and message.life == s.life and s.phase == "Running"
        return _release(s) if saves else _end(s, f"a signal has stopped node {node}")
    return _of_life(s, node, message, now) if message.life == s.life else (s, ())


def _of_life(s: Leader, node: int, message: Message, now: float) -> tuple[Leader, tuple[Action, ...]]:
    match message:
        case Done() if s.phase == "Running":
            return _release(s)
        case Failed() if s.phase == "Running":
            return _abort(_with_failure(s, node, message.failure), now)
        case Ready() if s.phase == "Aborting":
            s = _with_failure(s, node, message.failure)
            unhealthy = s.unhealthy if message.healthy else s.unhealthy | {node}
            port = message.port if node == 0 else s.port
            s = dataclasses.replace(s, missing=s.missing - {node}, unhealthy=unhealthy, port=port)
            return (s, ()) if s.missing else _decide(s, now)
    return s, ()


def _hello(s: Leader, node: int, hello: Hello, now: float) -> tuple[Leader, tuple[Action, ...]]:
    """Admit a node, or one that has lost its connection; tell it what the others were told."""
    known = s.seats.get(node)
    is_restarted = hello.life != 1 if known is None else known.boot != hello.boot
    if is_restarted and not s.is_over:
        return _end(s, f"the launcher of node {node} was restarted")
    s = _with_seat(s, node, Seat(hello.boot, now))
    order: Message = Alive(s.life)
    match s.phase:
        case "Running" if s.spent:
            order = Start(s.life, s.port, s.last)
        case "Aborting":
            order = Abort(s.life)
        case "Released":
            order = Release(s.life)
        case "Ended" if s.ended:
            order = s.ended
    return s, (Send(order, node),)


def _with_seat(s: Leader, node: int, seat: Seat) -> Leader:
    return dataclasses.replace(s, seats={**s.seats, node: seat})


def _with_failure(s: Leader, node: int, failure: RanksFailure | None) -> Leader:
    """Return the state with a node's failure; its own one replaces an earlier report of a lost peer."""
    known = s.failures.get(node)
    if failure is None or (known is not None and (known.cause == "own" or failure.cause != "own")):
        return s
    return dataclasses.replace(s, failures={**s.failures, node: failure})


def _progressed(s: Leader, mark: int, now: float) -> Leader:
    took = s.first_step_took
    if not s.spent and not s.has_stepped:
        took = now - s.began
    return dataclasses.replace(s, has_stepped=True, mark=max(s.mark, mark), first_step_took=took)


def _abort(s: Leader, now: float) -> tuple[Leader, tuple[Action, ...]]:
    """End the life on all nodes; if the launcher of a node takes no part, each node ends by itself."""
    if absent := sorted(set(range(s.nnodes)) - set(s.seats)):
        return _release(
            s,
            f"the launcher of node {listed(absent)} is not connected yet, was started without restarts in place, or is "
            "another version of ddprun",
        )
    s = dataclasses.replace(
        s, phase="Aborting", missing=frozenset(s.seats), unhealthy=frozenset(), deadline=now + s.ready
    )
    return s, _to_all(s, Abort(s.life))


def listed(nodes: Sequence[int]) -> str:
    """Return the numbers of the nodes as text, at most eight of them."""
    return ", ".join(map(str, nodes[:8])) + (f" and {len(nodes) - 8} more" if len(nodes) > 8 else "")


def _decide(s: Leader, now: float) -> tuple[Leader, tuple[Action, ...]]:
    """Start the next life or end the attempt: no process of this life exists on any node."""
    blamed = blame(s.failures)
    if reason := escalation(s, blamed):
        return _end(s, reason)
    s = dataclasses.replace(
        s, life=s.life + 1, phase="Running", began=now, has_stepped=False, failures={},
        fruitless=_fruitless(s), last=blamed, best=max(s.best, s.mark), mark=0,
    )  # fmt: skip
    return s, _to_all(s, Start(s.life, s.port, s.last))


def blame(failures: Mapping[int, RanksFailure]) -> Blamed | None:
    """Return the failure that ended the life: a node's own before a lost peer, then the first that arrived.

    A rank whose script had ended may have had nothing more to do, so another node's own failure comes before it.
    """
    own = [node for node, failure in failures.items() if failure.cause == "own"]
    node = min(own or failures, key=lambda node: failures[node].kind == "ExitedEarly", default=None)
    return None if node is None else Blamed(node, failures[node])


def escalation(s: Leader, blamed: Blamed | None) -> str:
    """Return why the attempt ends instead of another life; empty if another life follows."""
    failure = blamed.failure if blamed else None
    return next((reason for reason, applies in _ESCALATIONS if applies(s, blamed, failure)), "")


_ESCALATIONS: tuple[tuple[str, Callable[[Leader, Blamed | None, RanksFailure | None], bool]], ...] = (
    ("a restart cannot change this failure", lambda s, b, f: f is not None and f.code in exit_codes.NOT_RESTARTED),
    ("the memory limit was reached", lambda s, b, f: f is not None and f.kind == "OOMKilled"),
    ("no port of node 0 is free", lambda s, b, f: not s.port),
    ("a node is not healthy", lambda s, b, f: bool(s.unhealthy)),
    ("no restart in place is left", lambda s, b, f: s.spent >= s.granted),
    (f"{FRUITLESS} lives in a row made no progress", lambda s, b, f: _fruitless(s) >= FRUITLESS),
    ("the same exception at the same step ended the life before", lambda s, b, f: _repeats(s, f)),
    ("the same node failed in the life before", lambda s, b, f: _is_same_node(s, b)),
)  # fmt: skip


def _fruitless(s: Leader) -> int:
    return 0 if s.has_progressed else s.fruitless + 1


def _repeats(s: Leader, failure: RanksFailure | None) -> bool:
    last = s.last.failure if s.last else None
    if last is None or failure is None or failure.exception is None or failure.cause != "own":
        return False
    return (failure.exception, failure.step) == (last.exception, last.step)


def _is_same_node(s: Leader, blamed: Blamed | None) -> bool:
    """Return whether the node failed twice without progress in between: perhaps its hardware fails."""
    if s.last is None or blamed is None or s.nnodes == 1 or s.has_progressed:
        return False
    return blamed.failure.cause == s.last.failure.cause == "own" and blamed.node == s.last.node


def _release(s: Leader, reason: str = "") -> tuple[Leader, tuple[Action, ...]]:
    s = dataclasses.replace(s, phase="Released")
    return s, _to_all(s, Release(s.life, reason))


def _end(s: Leader, reason: str) -> tuple[Leader, tuple[Action, ...]]:
    message = End(s.life, reason, blame(s.failures))
    s = dataclasses.replace(s, phase="Ended", ended=message)
    return s, _to_all(s, message)


def _to_all(s: Leader, message: Message) -> tuple[Action, ...]:
    return tuple(Send(message, node) for node, seat in s.seats.items() if seat.lost is None)


def _leader_tick(s: Leader, now: float) -> tuple[Leader, tuple[Action, ...]]:
    if _was_paused(s.ticked, now):  # then its own silence is no sign that the nodes were silent
        s = dataclasses.replace(s, seats={node: dataclasses.replace(seat, heard=now) for node, seat in s.seats.items()})
    s = dataclasses.replace(s, ticked=now)
    if not s.is_over and (reason := _overdue(s, now)):
        return _end(s, reason)
    if now - s.told < KEEPALIVE:
        return s, ()
    return dataclasses.replace(s, told=now), _to_all(s, Alive(s.life))


def _overdue(s: Leader, now: float) -> str:
    for node, seat in s.seats.items():
        if seat.lost is not None and now - seat.lost >= RECONNECT:
            return f"node {node} is lost: its connection has ended"
        if now - seat.heard >= SILENCE:
            return f"node {node} is lost: it has said nothing for {SILENCE:g} s"
    if s.phase == "Aborting" and now >= s.deadline:
        return f"processes of the last life did not end within {s.ready:g} s on node {min(s.missing)}"
    if s.phase == "Running" and s.spent and not s.has_stepped and s.first_step_took is not None:
        limit = max(FIRST_STEP, _SLOWER * s.first_step_took)
        if now - s.began >= limit:
            return f"no step within {limit:.0f} s after a restart in place"
    return ""


def _was_paused(ticked: float, now: float) -> bool:
    """Return whether this launcher did not run for a while: a stopped process, or a machine that was suspended."""
    return now - ticked > SILENCE / 2


def follow(s: Follower, event: Event, now: float) -> tuple[Follower, tuple[Action, ...]]:
    """Return a node's next state, and what it is to do."""
    if s.is_over:
        return s, ()
    match event:
        case Received():
            return _ordered(s, event.message, now)
        case Connected():
            return dataclasses.replace(s, lost=None, heard=now), (Send(Hello(s.life, s.boot)), *_said_again(s))
        case Lost() if s.joined and s.lost is None:
            return dataclasses.replace(s, lost=now), ()
        case Failed() | Done() | Ready() if event.life == s.life:
            return _of_ranks(s, event)
        case Stop() if not s.stopping:
            s = dataclasses.replace(s, stopping=True)
            return s, (Send(Stop(s.life, s.runs)),) if s.joined else ()
        case Tick():
            return _follower_tick(s, now)
    return s, ()


def _of_ranks(s: Follower, event: Failed | Done | Ready) -> tuple[Follower, tuple[Action, ...]]:
    match event:
        case Ready() if s.phase == "Ending":
            ready = dataclasses.replace(event, failure=event.failure or s.failure)
            s = dataclasses.replace(s, phase="Ready", ready=ready)
            return s, _said_again(s)
        case Done() if s.phase == "Running" and not s.joined:
            s, actions = _leave_alone(s)  # the leader may have the hello, and would miss this node
            return s, (Send(event), *actions)
        case Failed() if s.phase == "Running" and not s.joined:
            return _leave_alone(s, "" if s.stopping else _NOT_JOINED)
        case Failed() if s.phase == "Running":
            s = dataclasses.replace(s, phase="Failed", failure=event.failure)
            return s, _said_again(s)
        case Done() if s.phase == "Running":
            s = dataclasses.replace(s, phase="Done")
            return s, _said_again(s)
    return s, ()


def _said_again(s: Follower) -> tuple[Action, ...]:
    """Return what the leader must know of this node; it may not have received it over the connection before."""
    told: list[Message] = [Stop(s.life, s.runs)] if s.stopping else []
    match s.phase:
        case "Failed" if s.failure:
            told.append(Failed(s.life, s.failure))
        case "Done":
            told.append(Done(s.life))
        case "Ready" if s.ready:
            told.append(s.ready)
    return tuple(map(Send, told))


def _ordered(s: Follower, order: Message, now: float) -> tuple[Follower, tuple[Action, ...]]:
    s = dataclasses.replace(s, joined=True, heard=now)
    match order:
        case End():
            return dataclasses.replace(s, phase="Exited"), (order,)
        case Release() if order.life == s.life:
            return _leave_alone(s, order.reason)
        case Abort() if s.runs and order.life == s.life:
            return dataclasses.replace(s, phase="Ending"), (order,)
        case Start() if s.phase == "Ready" and order.life == s.life + 1 and not s.stopping:
            return dataclasses.replace(s, phase="Running", life=order.life, failure=None), (order,)
    return s, ()


def _leave_alone(s: Follower, reason: str = "") -> tuple[Follower, tuple[Action, ...]]:
    return dataclasses.replace(s, phase="Released"), (Release(s.life, reason),)


def _follower_tick(s: Follower, now: float) -> tuple[Follower, tuple[Action, ...]]:
    if _was_paused(s.ticked, now):
        s = dataclasses.replace(s, heard=now)
    s = dataclasses.replace(s, ticked=now)
    if not s.joined:
        return s, ()
    is_lost = now - s.heard >= SILENCE or (s.lost is not None and now - s.lost >= RECONNECT)
    if is_lost and s.phase == "Done":
        return _leave_alone(s)  # its ranks have succeeded
    if is_lost:
        how = "its connection has ended" if s.lost is not None else f"it has said nothing for {SILENCE:g} s"
        return dataclasses.replace(s, phase="Exited"), (End(s.life, f"node 0 is lost: {how}"),)
    if s.lost is not None or now - s.told < KEEPALIVE:
        return s, ()
    return dataclasses.replace(s, told=now), (Send(Alive(s.life)),)
