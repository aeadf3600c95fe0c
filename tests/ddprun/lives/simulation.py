"""A group of launchers that agree on lives, with the network, the ranks and the faults of one random schedule.

The launchers are the pure functions of ``ddprun.launcher.lives``. Everything else is simulated here: connections that
delay, repeat and lose messages, launchers that are killed, paused or told to stop, clocks that differ, and ranks that
train, fail, wait for each other, or take long to end. ``Group`` checks after each event what must hold in any schedule.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from ddprun.launcher.life_messages import Abort, Done, End, Failed, Message, RanksFailure, Ready, Release, Start, Stop
from ddprun.launcher.lives import (
    RECONNECT,
    SILENCE,
    Action,
    Connected,
    Event,
    Follower,
    Leader,
    Lost,
    Progressed,
    Received,
    Send,
    Tick,
    follow,
    lead,
)

LONGEST = 2000.0  # seconds: a group that has not ended then never ends
WAIT_FOR_PEERS = 60.0  # seconds after which ranks that miss a peer fail
Kind = Literal["crashes", "fault", "storm"]


class ViolationError(AssertionError):
    """A schedule broke a rule."""


@dataclass(frozen=True)
class Schedule:
    """What happens in a run, all drawn from its seed.

    Attributes:
        kind: "crashes" of ranks only, of which each life makes progress; one "fault" that ends the group; a "storm".
        crashes: how often a rank fails.
    """

    seed: int
    kind: Kind
    nodes: int
    granted: int
    crashes: int
    work: int  # steps to train

    @classmethod
    def of(cls, seed: int) -> Schedule:
        """Return the schedule of a seed."""
        draw = random.Random(seed)
        kind: Kind = ("crashes", "fault", "storm", "storm")[seed % 4]
        crashes = draw.choice((0, 1, 1, 2, 3, 5)) if kind != "fault" else draw.choice((0, 1))
        return cls(seed, kind, draw.randint(1, 4), draw.choice((0, 1, 2, 3, 6)), crashes, draw.randint(8, 30))


@dataclass
class Agent:
    """A launcher, and the processes of its ranks.

    Attributes:
        offset, rate: of its clock.
        ranks: the number of the life whose processes exist; None for none.
        ended: how the launcher ended: "succeeded", "failed", "exited" (told to, or without a leader) or "killed".
        paused_until: it handles nothing before.
        connection: the number of its connection to the leader; 0 for none.
        said_ready: the number of the last life that it has reported as ended.
    """

    node: int
    offset: float
    rate: float
    follower: Follower
    ranks: int | None = 1
    have_failed: bool = False
    have_succeeded: bool = False
    ended: str = ""
    ended_at: float = 0.0
    paused_until: float = 0.0
    connection: int = 0
    said_ready: int = 0
    delivered: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    cut_until: float = 0.0  # messages are held back


@dataclass
class Group:
    """The group; ``run`` carries out its schedule."""

    schedule: Schedule

    def __post_init__(self) -> None:
        plan = self.schedule
        self.draw = random.Random(plan.seed + 1)
        self.now, self._order = 0.0, count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self.agents = [self._agent(node) for node in range(plan.nodes)]
        self.leader = Leader(plan.nodes, plan.granted, began=self.clock(self.agents[0]))
        self.step = self.saved = self.left = 0
        self.left = plan.crashes
        self.crashed: list[tuple[float, int]] = []  # when, and on which node, a rank failed by itself
        self.restarted: list[float] = []  # when the last node started the ranks of a later life
        self.sent: list[tuple[int, Message, bool]] = []
        self.stopping = False
        self.faulted_at = self.allowed = 0.0
        self.lives: dict[int, set[int]] = {}

    def _agent(self, node: int) -> Agent:
        offset, rate = self.draw.uniform(0, 1e6), self.draw.uniform(0.95, 1.05)
        joined = node == 0
        return Agent(node, offset, rate, Follower(f"boot-{node}", joined=joined, heard=offset, ticked=offset))

    def clock(self, agent: Agent) -> float:
        """Return the time by the clock of a launcher."""
        return agent.offset + agent.rate * self.now

    # The schedule

    def run(self) -> Group:
        """Carry out the schedule, and check what must hold at its end."""
        calm = self.schedule.kind == "crashes"
        for agent in self.agents:
            self._later(
                0.0 if agent.node == 0 or calm else self.draw.choice((0.0, 0.1, 0.1, 1.0)), self._connect(agent)
            )
            self._later(self.draw.uniform(0, 1), self._tick(agent))
        self._later(0.5, self._train)
        if self.schedule.kind == "fault":
            self._later(self.draw.uniform(2, 9), self._fault)
        elif self.schedule.kind == "storm":
            for _ in range(self.draw.randint(1, 8)):
                self._later(self.draw.expovariate(1 / 6), self.draw.choice(self._storm()))
        while self._heap and self.now < LONGEST:
            self.now, _, happen = heapq.heappop(self._heap)
            happen()
        self._check_end()
        return self

    def _later(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), happen))

    def _storm(self) -> list[Callable[[], None]]:
        return [
            self._drop, self._drop, self._cut, self._pause, self._kill_agent, self._stop, self._repeat, self._repeat,
            self._repeat, self._crash_now, self._crash_now, self._drop_during_restart,
        ]  # fmt: skip

    def _anyone(self) -> Agent | None:
        alive = [agent for agent in self.agents if not agent.ended]
        return self.draw.choice(alive) if alive else None

    def _fault(self) -> None:
        self.faulted_at = self.now
        fault, self.allowed = self.draw.choice(
            ((self._kill_agent, RECONNECT / 0.95), (self._cut_for_ever, SILENCE / 0.95), (self._stop, 1.0))
        )
        fault()

    def _cut_for_ever(self) -> None:
        if len(self.agents) > 1:
            self.draw.choice(self.agents[1:]).cut_until = float("inf")

    def _cut(self) -> None:
        if agent := self._anyone():
            agent.cut_until = self.now + self.draw.choice((0.5, 3.0, 9.0, 15.0, 60.0))

    def _pause(self) -> None:
        if agent := self._anyone():
            agent.paused_until = self.now + self.draw.choice((0.5, 4.0, 12.0))

    def _kill_agent(self) -> None:
        if agent := self._anyone():
            self._finish(agent, "killed")

    def _stop(self) -> None:
        if agent := self._anyone():
            self._handle(agent, Stop(agent.follower.life))

    def _stop_ranks(self, agent: Agent) -> None:
        """Pass a stop signal on to the ranks: those of all nodes save a checkpoint together, and end."""
        if agent.ranks is not None and not self.stopping:
            self.stopping = True
            number = agent.ranks
            everywhere = all(other.ranks == number for other in self.agents)
            for other in self.agents if everywhere else [agent]:
                self._later(
                    self.draw.uniform(0.5, 1.0), self._rank_fails(other, number, RanksFailure(75, "own", "Stopped"))
                )

    def _repeat(self) -> None:
        """Deliver a message again that was sent at any time before."""
        if self.sent:
            node, message, to_leader = self.draw.choice(self.sent)
            if to_leader:
                self._lead(Received(message, node))
            else:
                self._handle(self.agents[node], Received(message))

    def _crash_now(self) -> None:
        if agent := self._anyone():
            number = agent.ranks
            if number is not None:
                self._rank_fails(agent, number, self._own_failure())()

    def _drop_during_restart(self) -> None:
        self._crash_now()
        self._later(self.draw.uniform(0, 0.3), self.draw.choice((self._drop, self._kill_agent, self._crash_now)))

    def _own_failure(self) -> RanksFailure:
        code = self.draw.choice((1, 1, 137, 76)) if self.schedule.kind != "storm" else self.draw.choice((1, 137, 79))
        exception = "ValueError" if code == 1 else None
        return RanksFailure(code, "own", exception, exception, 0, self.step, "failed")

    # Ranks

    def _train(self) -> None:
        """One step of all ranks, if all of them are in the same life and work."""
        if all(agent.ended for agent in self.agents):
            return
        lives = {agent.ranks for agent in self.agents}
        if len(lives) == 1 and None not in lives and not any(a.have_failed or a.have_succeeded for a in self.agents):
            self._step()
        self._later(0.25, self._train)

    def _step(self) -> None:
        number = self.agents[0].ranks
        assert number is not None
        self.step += 1
        if self.step % 4 == 0:
            self.saved = self.step
        self._lead(Progressed(number, self.saved))
        if self.step >= self.schedule.work and not self.left:
            for agent in self.agents:
                self._later(self.draw.uniform(0, 0.5), self._ranks_succeed(agent, number))
        elif self.left and self.leader.has_progressed and self.draw.random() < 0.3:
            self.left -= 1
            agent = self.draw.choice(self.agents)
            if not agent.ended:
                self.crashed.append((self.now, agent.node))
                self._rank_fails(agent, number, self._own_failure())()

    def _ranks_succeed(self, agent: Agent, number: int) -> Callable[[], None]:
        def happen() -> None:
            if agent.ranks == number and not (agent.have_failed or agent.have_succeeded or agent.ended):
                agent.have_succeeded = True
                self._handle(agent, Done(number))
                self._end_if_left_alone(agent)

        return happen

    def _rank_fails(self, agent: Agent, number: int, failure: RanksFailure) -> Callable[[], None]:
        def happen() -> None:
            if agent.ranks != number or agent.have_failed or agent.have_succeeded or agent.ended:
                return
            agent.have_failed = True
            self._handle(agent, Failed(number, failure))
            self._end_if_left_alone(agent)
            self._peers_notice(number, agent)

        return happen

    def _peers_notice(self, number: int, gone: Agent) -> None:
        for other in self.agents:
            if other is not gone:
                seconds = self.draw.choice((0.001, 0.05, 0.3))
                self._later(seconds, self._rank_fails(other, number, RanksFailure(77, "peer", "PeerLost")))

    def _end_if_left_alone(self, agent: Agent) -> None:
        have_ended = agent.have_failed or agent.have_succeeded or agent.ranks is None
        if agent.follower.phase == "Released" and have_ended and not agent.ended:
            self._finish(agent, "succeeded" if agent.have_succeeded else "failed")

    def _finish(self, agent: Agent, how: str) -> None:
        number, agent.ended, agent.ended_at = agent.ranks, how, self.now
        agent.ranks = None  # the kernel kills them with their launcher
        if number is not None and how != "succeeded":
            self._peers_notice(number, agent)
        self._disconnect(agent)
        if agent.node == 0:
            for other in self.agents:
                self._disconnect(other)

    def _start_ranks(self, agent: Agent, number: int) -> None:
        for other in self.agents:
            if other.ranks is not None and other.ranks != number:
                raise ViolationError(f"life {number} starts on node {agent.node}, {other.ranks} runs on {other.node}")
            if other.ended == "succeeded":
                raise ViolationError(f"life {number} starts after node {other.node} has ended with success")
        if agent.ranks is not None:
            raise ViolationError(f"life {number} starts twice on node {agent.node}")
        agent.ranks, agent.have_failed, agent.have_succeeded = number, False, False
        self.step = self.saved
        started = self.lives.setdefault(number, set())
        started.add(agent.node)
        if len(started) == len(self.agents):
            self.restarted.append(self.now)
        self._later(WAIT_FOR_PEERS, self._give_up(agent, number))
        if self.schedule.kind == "storm" and self.draw.random() < 0.05:
            self._later(0.0, self._rank_fails(agent, number, RanksFailure(1, "own", "OSError", "OSError")))

    def _give_up(self, agent: Agent, number: int) -> Callable[[], None]:
        """Ranks that have waited for their peers for so long fail."""

        def happen() -> None:
            if any(other.ranks != number for other in self.agents):
                self._rank_fails(agent, number, RanksFailure(69, "own", "RendezvousFailed"))()

        return happen

    # Launchers

    def _tick(self, agent: Agent) -> Callable[[], None]:
        def happen() -> None:
            if agent.ended:
                return
            if agent.node == 0:
                self._lead(Tick())
            if not agent.ended:
                self._handle(agent, Tick())
                self._later(self.draw.uniform(0.5, 1.0), happen)

        return happen

    def _handle(self, agent: Agent, event: Event) -> None:
        if agent.ended:
            return
        if agent.paused_until > self.now:
            self._later(agent.paused_until - self.now, lambda: self._handle(agent, event))
            return
        agent.follower, actions = follow(agent.follower, event, self.clock(agent))
        for action in actions:
            self._act(agent, action)
        if isinstance(event, Stop):
            self._stop_ranks(agent)

    def _lead(self, event: Event) -> None:
        agent = self.agents[0]
        if agent.ended:
            return
        if agent.paused_until > self.now:
            self._later(agent.paused_until - self.now, lambda: self._lead(event))
            return
        before = self.leader
        self.leader, actions = lead(before, event, self.clock(agent))
        if self.leader.life != before.life:
            self._check_start()
        for action in actions:
            if isinstance(action, Send):
                self._send(action.node, action.message, to_leader=False)

    def _check_start(self) -> None:
        number = self.leader.life
        if self.leader.spent > self.schedule.granted:
            raise ViolationError(f"{self.leader.spent} restarts in place, {self.schedule.granted} are granted")
        for agent in self.agents:
            if agent.said_ready != number - 1:
                raise ViolationError(f"life {number} starts, and node {agent.node} was not ready")

    def _act(self, agent: Agent, action: Action) -> None:
        match action:
            case Send(message=message):
                if isinstance(message, Ready):
                    agent.said_ready = message.life
                self._send(agent.node, message, to_leader=True)
            case Start():
                self._start_ranks(agent, action.life)
            case Abort():
                slow = self.schedule.kind == "storm" and self.draw.random() < 0.03
                self._later(self.draw.uniform(0.005, 0.1) + 15 * slow, self._ranks_end(agent, action.life))
            case Release():
                self._end_if_left_alone(agent)
            case End():
                self._finish(agent, "exited")

    def _ranks_end(self, agent: Agent, number: int) -> Callable[[], None]:
        def happen() -> None:
            if agent.ranks == number and not agent.ended:
                agent.ranks = None
                healthy = self.schedule.kind != "storm" or self.draw.random() > 0.05
                is_free = self.schedule.kind != "storm" or self.draw.random() > 0.02
                self._handle(agent, Ready(number, healthy, port=20_000 if is_free else 0))
                self._peers_notice(number, agent)

        return happen

    # Network

    def _connect(self, agent: Agent) -> Callable[[], None]:
        def happen() -> None:
            if agent.ended or agent.connection or agent.follower.is_over or self.agents[0].ended:
                return
            if agent.cut_until > self.now:
                self._later(self.draw.uniform(0.1, 1.0), happen)
                return
            agent.connection = next(self._order)
            agent.delivered = {True: self.now, False: self.now}
            self._handle(agent, Connected())

        return happen

    def _disconnect(self, agent: Agent) -> None:
        """End the connection of a node, and what is on its way; nobody hears of it while the node is cut off."""
        if not agent.connection or (agent.node == 0 and not agent.ended):
            return
        if agent.cut_until > self.now:
            if agent.cut_until < LONGEST:
                self._later(agent.cut_until - self.now, lambda: self._disconnect(agent))
            return
        agent.connection = 0
        self._lead(Lost(agent.node))
        self._handle(agent, Lost())

    def _drop(self) -> None:
        if (agent := self._anyone()) and agent.node:
            self._disconnect(agent)
            self._later(self.draw.choice((0.0, 0.05, 1.0, 3.0)), self._connect(agent))

    def _send(self, node: int, message: Message, *, to_leader: bool) -> None:
        agent = self.agents[node]
        connection = agent.connection
        if not connection:
            return
        self.sent.append((node, message, to_leader))
        delay = 0.0 if node == 0 else self.draw.choice((0.0005, 0.005, 0.05))
        arrival = max(self.now + delay, agent.delivered[to_leader])
        agent.delivered[to_leader] = arrival

        def arrive() -> None:
            if agent.connection != connection:
                return
            if agent.cut_until > self.now:
                if agent.cut_until < LONGEST:
                    self._later(agent.cut_until - self.now, arrive)
            elif to_leader:
                self._lead(Received(message, node))
            else:
                self._handle(agent, Received(message))

        self._later(arrival - self.now, arrive)

    # What must hold at the end

    def _check_end(self) -> None:
        if left := [agent.node for agent in self.agents if not agent.ended]:
            phases = [self.agents[node].follower.phase for node in left]
            raise ViolationError(f"nodes {left} never end: {phases}, leader {self.leader.phase}")
        if self.schedule.kind == "crashes":
            self._check_crashes()
        if self.schedule.kind == "fault":
            self._check_fault()

    def _check_crashes(self) -> None:
        """Each failure of a rank is followed by a life at once, as long as one is granted; the right node is blamed."""
        crashes, granted = self.schedule.crashes, self.schedule.granted
        hows = {agent.ended for agent in self.agents}
        restarts = min(crashes, granted)
        if self.leader.spent != restarts:
            raise ViolationError(f"{self.leader.spent} restarts in place after {crashes} failures, {granted} granted")
        if hows != ({"succeeded"} if crashes <= granted else {"exited"}):
            raise ViolationError(f"{crashes} failures, {granted} granted, and the nodes have {hows}")
        for (failed, _), started in zip(self.crashed, self.restarted, strict=False):
            if started - failed > 0.6:
                raise ViolationError(f"a life started {started - failed:.2f} s after the failure")
        blamed = self.leader.ended.blamed if self.leader.ended else None
        if self.leader.ended and (blamed is None or blamed.node != self.crashed[-1][1]):
            raise ViolationError(f"{blamed} is blamed for {self.crashed[-1]}")

    def _check_fault(self) -> None:
        """After a launcher is lost, cut off or stopped the group ends soon, without another life."""
        latest = max(agent.ended_at for agent in self.agents)
        if self.faulted_at and latest - self.faulted_at > self.allowed + 4.0:
            raise ViolationError(f"the group ended {latest - self.faulted_at:.1f} s after the fault")
