"""One launcher's part in the agreement on restarts in place: carries out what the pure functions of ``lives`` decide.

Node 0 has the leader's part, too, and is a follower of itself without a connection.
"""

import collections
import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddprun.distributed.topology import Ranks, free_port, number_of
from ddprun.files import Json
from ddprun.launcher import lives
from ddprun.launcher.life_messages import Blamed, Life
from ddprun.launcher.lives import (
    ChoosePort,
    Close,
    EndRanks,
    Event,
    Exit,
    Follower,
    Leader,
    LeaveAlone,
    Limits,
    OtherVersion,
    PortChosen,
    Progressed,
    Received,
    Send,
    StartRanks,
    Tick,
)
from ddprun.launcher.peers import Peers

GRANT = "DDPJOB_INPLACE_RESTARTS"
_MOST_GRANTED = 10**6
_TICK = 0.5  # seconds
_STARTING_TICK = 0.05  # seconds, until a later life has made its first step
_GPU_LIMITS = {"ready": 60.0, "first_step": 120.0}  # the driver releases memory and makes contexts in seconds
_KEPT = 5
Order = StartRanks | EndRanks | LeaveAlone | Exit | OtherVersion


def granted(env: Mapping[str, str] = os.environ) -> int:
    """Return how many restarts in place the operator, or the user in its place, has granted this attempt.

    Raises:
        UsageError: the variable is not a whole number.
    """
    return number_of(env, GRANT, 0, 0, _MOST_GRANTED)


@dataclass(frozen=True)
class EndedLife:
    """A life that has ended, as ``lives`` of the reports shows it.

    Attributes:
        failed_at: when the leader heard of the failure, by its monotonic clock.
        recovered_after: seconds from then to the first step of the next life; None before that.
    """

    number: int
    blamed: Blamed | None
    progressed: bool
    failed_at: float
    recovered_after: float | None = None

    @property
    def report(self) -> Json:
        failure = self.blamed.failure if self.blamed else None
        return {
            "life": self.number, "node": self.blamed.node if self.blamed else None,
            "rank": failure.rank if failure else None, "kind": failure.kind if failure else None,
            "message": failure.message if failure else None, "progressed": self.progressed,
            "recoveryMilliseconds": None if self.recovered_after is None else round(1000 * self.recovered_after),
        }  # fmt: skip


class Agreement:
    """The launchers of a group as this one sees them, through all lives of an attempt.

    Attributes:
        orders: what this launcher is to do, until it takes them.
        is_complete: of node 0: all launchers take part, so ranks can be restarted in place.
    """

    def __init__(self, ranks: Ranks, peers: Peers, grant: int, *, gpus: bool = False) -> None:
        now, life = time.monotonic(), Life(peers.group_id, os.environ.get("DDPJOB_ATTEMPT", ""))
        limits = Limits(grant, **_GPU_LIMITS) if gpus else Limits(grant)
        self._peers, self._next_tick = peers, now
        self._follower = Follower(secrets.token_hex(8), life, joined=peers.is_leader, heard=now, ticked=now)
        self._leader = Leader(ranks.nnodes, limits, life, began=now, ticked=now) if peers.is_leader else None
        self._for_leader: collections.deque[Event] = collections.deque()
        self._for_follower: collections.deque[Event] = collections.deque()
        self._ended: list[EndedLife] = []
        self._failed_at = now
        self._others: set[OtherVersion] = set()  # which are known
        self.orders: collections.deque[Order] = collections.deque()
        if self._leader:
            self.tell(lives.Connected())

    @property
    def number(self) -> int:
        """The number of the current life."""
        return self._follower.life.number

    @property
    def is_over(self) -> bool:
        """Whether no other life follows."""
        return self._follower.is_over

    @property
    def is_complete(self) -> bool:
        return self._leader is not None and len(self._leader.seats) == self._leader.nnodes

    @property
    def has_joined(self) -> bool:
        """Whether the leader decides what follows a failure."""
        return self._follower.joined and not self.is_over

    @property
    def longest_wait(self) -> float:
        """Seconds until ``turn`` is to be called again."""
        return 0.05 if self._peers.seeks_leader else self._tick

    @property
    def _tick(self) -> float:
        leader = self._leader
        starts = leader is not None and leader.spent and leader.phase == "Running" and not leader.has_stepped
        return _STARTING_TICK if starts else _TICK

    def reports(self) -> Json:
        """Of node 0: return the fields ``life`` and ``lives`` of the reports; empty on other nodes."""
        if self._leader is None:
            return {}
        return {"life": self._leader.life.number, "lives": [life.report for life in self._ended]}

    def tell(self, event: Event) -> None:
        """Tell what happened on this node, and carry out what follows."""
        self._for_follower.append(event)
        self._carry_out()

    def progressed(self, life: int, mark: int) -> None:
        """Of node 0: tell how far the ranks of a life are, which may be over."""
        if self._leader:
            self._for_leader.append(Progressed(life, mark))
            self._carry_out()

    def turn(self) -> bool:
        """Handle what the other launchers have sent, and the time that has passed.

        Returns:
            whether it is time to tell the progress again.
        """
        while self._peers.life_events:
            event = self._peers.life_events.popleft()
            if isinstance(event, OtherVersion):
                self.orders += {event} - self._others
                self._others.add(event)
                continue
            (self._for_leader if self._leader else self._for_follower).append(event)
        self._carry_out()
        if time.monotonic() >= self._next_tick:  # after what has come meanwhile: it shows who is not silent
            self._next_tick = time.monotonic() + self._tick
            self._for_leader.append(Tick())
            self._for_follower.append(Tick())
            self._carry_out()
            return True
        return False

    def _carry_out(self) -> None:
        while self._for_leader or self._for_follower:
            if self._for_leader:
                self._lead(self._for_leader.popleft())
            else:
                self._follow(self._for_follower.popleft())

    def _lead(self, event: Event) -> None:
        if self._leader is None:
            return
        before, now = self._leader, time.monotonic()
        self._leader, actions = lives.lead(before, event, now)
        self._note(before, self._leader, now)
        for action in actions:
            match action:
                case Send(node=0):
                    self._for_follower.append(Received(action.message))
                case Send():
                    self._peers.say(action.message, action.node)
                case Close():
                    self._peers.drop(action.node)
                case ChoosePort():
                    port = None
                    with contextlib.suppress(OSError):
                        port = free_port()
                    self._for_leader.append(PortChosen(action.number, port))

    def _note(self, before: Leader, after: Leader, now: float) -> None:
        """Note when a life fails, how it ended, and when the next one has made its first step."""
        if after.phase != before.phase and after.phase == "Aborting":
            self._failed_at = now
        if after.life != before.life:
            self._next_tick = now  # to see the first step when it is made, and not up to _TICK later
        if after.phase != before.phase and after.phase in ("Choosing", "Ended"):
            blamed = lives.blame(after.failures)
            if blamed or after.phase == "Choosing":
                ended = EndedLife(after.life.number, blamed, after.has_progressed, self._failed_at)
                self._ended = [*self._ended, ended][-_KEPT:]
        if after.has_stepped and not before.has_stepped and after.spent:
            *earlier, last = self._ended
            self._ended = [*earlier, replace(last, recovered_after=now - last.failed_at)]

    def _follow(self, event: Event) -> None:
        self._follower, actions = lives.follow(self._follower, event, time.monotonic())
        for action in actions:
            match action:
                case Send() if self._leader:
                    self._for_leader.append(Received(action.message, 0))
                case Send():
                    self._peers.say(action.message)
                case StartRanks() | EndRanks() | LeaveAlone() | Exit():
                    self.orders.append(action)
