"""One launcher's part in the agreement on restarts in place: carries out what the pure functions of ``lives`` decide.

Node 0 has the leader's part, too, and is a follower of itself without a connection. The supervisor of a life says what
happens to its ranks, and asks what is agreed on.
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
from ddprun.launcher.life_messages import (
    Abort,
    Blamed,
    Done,
    End,
    Failed,
    Message,
    RanksFailure,
    Ready,
    Release,
    Start,
    Stop,
)
from ddprun.launcher.lives import (
    Event,
    Follower,
    Leader,
    Progressed,
    Received,
    Send,
    Tick,
)
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.peers import Peers
from ddprun.launcher.processes import launcher_line
from ddprun.reporting.termination import Report

GRANT = "DDPJOB_INPLACE_RESTARTS"
MOST_RESTARTS = 10**6
_TICK = 0.5  # seconds
_STARTING_TICK = 0.05  # seconds, until a later life has made its first step
_READY, _GPU_READY = 10.0, 60.0  # seconds for all processes of a life to end; the driver of GPUs releases memory slowly
_KEPT = 5


def granted(env: Mapping[str, str] = os.environ) -> int:
    """Return how many restarts in place the operator, or the user in its place, has granted this attempt.

    Raises:
        UsageError: the variable is not a whole number.
    """
    return number_of(env, GRANT, 0, 0, MOST_RESTARTS)


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

    Args:
        grant: how many restarts in place there may be; with 0 this launcher takes no part: each node ends by itself.

    Attributes:
        orders: what this launcher is to do, until it takes them.
        number: of the life that is supervised.
        next_life: what follows the end of its ranks; None for no restart in place.
        exit: why the attempt ends; None if it does not, or not by the agreement.
        must_end: its ranks are to end, and ``ended`` is to be called when none is left.
    """

    def __init__(self, ranks: Ranks, peers: Peers, grant: int, progress: NodeProgress, *, gpus: bool = False) -> None:
        now = time.monotonic()
        self._peers, self._next_tick, self._nnodes, self._is_granted = peers, now, ranks.nnodes, grant > 0
        self._progress = progress
        self._follower = Follower(secrets.token_hex(8), joined=peers.is_leader, heard=now, ticked=now)
        leader = Leader(ranks.nnodes, grant, ready=_GPU_READY if gpus else _READY, began=now, ticked=now)
        self._leader = leader if peers.is_leader else None
        self._for_leader: collections.deque[Event] = collections.deque()
        self._for_follower: collections.deque[Event] = collections.deque()
        self._ended: list[EndedLife] = []
        self._failed_at = now
        self.orders: collections.deque[Message] = collections.deque()
        self.begin(1)
        if self._leader:
            self._tell(lives.Connected())

    def begin(self, number: int) -> None:
        """Begin to supervise the life with this number."""
        self.number = number
        self.next_life: Start | None = None
        self.exit: End | None = None
        self.must_end = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be agreed on."""
        return not self._is_granted or self._follower.is_over

    @property
    def is_released(self) -> bool:
        """Whether each node ends by itself; while ranks run, because all of another node have succeeded."""
        return self._is_granted and self._follower.is_over

    @property
    def has_joined(self) -> bool:
        """Whether the leader decides what follows a failure."""
        return self._is_granted and self._follower.joined and not self.is_over

    @property
    def longest_wait(self) -> float:
        """Seconds until ``turn`` is to be called again."""
        if not self._is_granted:
            return float("inf")
        return 0.05 if self._peers.seeks_leader else self._tick

    @property
    def _tick(self) -> float:
        leader = self._leader
        starts = leader is not None and leader.spent and leader.phase == "Running" and not leader.has_stepped
        return _STARTING_TICK if starts else _TICK

    def reports(self) -> Json:
        """Of node 0: return the fields ``life`` and ``lives`` of the reports; empty on other nodes."""
        if self._leader is None or not self._is_granted:
            return {}
        return {"life": self._leader.life, "lives": [life.report for life in self._ended]}

    def failed(self, report: Report) -> None:
        """Tell that a rank of this node has failed, and why."""
        self._tell_progress()
        self._tell(Failed(self._follower.life, RanksFailure.of_report(report)))

    def succeeded(self) -> None:
        """Tell that all ranks of this node have succeeded."""
        self._tell(Done(self._follower.life))

    def ended(self, *, healthy: bool, failure: RanksFailure | None) -> None:
        """Tell that no process of this life is left, or that some are."""
        self.must_end, port = False, 0
        if self._leader:
            with contextlib.suppress(OSError):
                port = free_port()
        self._tell(Ready(self._follower.life, healthy, failure, port))

    def told_to_stop(self) -> None:
        """Tell that a stop signal has come, and was passed on to the ranks."""
        self._tell(Stop(self._follower.life))

    def turn(self) -> bool:
        """Hear what the launchers of the group agree on. Returns whether the ranks are to be killed."""
        if not self._is_granted:
            return False
        missing = self.missing
        if self._hear():
            self._tell_progress()
        if missing and not self.missing:
            launcher_line(f"all {self._nnodes} launchers take part in restarts in place")
        return self.obey()

    def obey(self) -> bool:
        """Take what is agreed on this life; what follows its end is for the next one. Returns as ``turn``."""
        kills = False
        while self.orders and self.next_life is None:
            match order := self.orders.popleft():
                case Abort():
                    self.must_end = kills = True
                case End():
                    self.exit, kills = order, True
                case Start():
                    self.next_life = order
                case Release() if order.reason:
                    ends = "this attempt ends on all nodes, and a new one follows if the job has restarts left"
                    launcher_line(f"no restart in place: {order.reason}; {ends}")
        return kills

    @property
    def missing(self) -> int:
        """Of node 0: how many launchers do not take part yet; ranks cannot be restarted in place without them."""
        return self._leader.nnodes - len(self._leader.seats) if self._leader else 0

    def _tell(self, event: Event) -> None:
        if self._is_granted:
            self._for_follower.append(event)
            self._carry_out()

    def _tell_progress(self) -> None:
        """Of node 0: tell how far the ranks of the supervised life are; the next one may be agreed on already."""
        if self._is_granted and self._leader and (mark := self._progress.mark()) is not None:
            self._for_leader.append(Progressed(self.number, mark))
            self._carry_out()

    def _hear(self) -> bool:
        """Handle what the other launchers have sent, and the time that has passed. Returns whether a tick has come."""
        while self._peers.life_events:
            event = self._peers.life_events.popleft()
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

    def _note(self, before: Leader, after: Leader, now: float) -> None:
        """Note when a life fails, how it ended, and when the next one has made its first step."""
        if after.phase != before.phase and after.phase == "Aborting":
            self._failed_at = now
        goes_on = after.life != before.life
        if goes_on:
            self._next_tick = now  # to see the first step when it is made, and not up to _TICK later
        blamed = after.last if goes_on else lives.blame(after.failures)
        if goes_on or (blamed and after.phase == "Ended" != before.phase):
            ended = EndedLife(before.life, blamed, before.has_progressed, self._failed_at)
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
                case Message():
                    self.orders.append(action)
