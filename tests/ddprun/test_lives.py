"""The agreement on restarts in place: random schedules, the table of escalations, and what messages are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import pytest

from ddprun.distributed.topology import Ranks
from ddprun.errors import UsageError
from ddprun.launcher.agreement import Agreement, granted
from ddprun.launcher.life_messages import (
    Abort,
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
    from_json,
    to_json,
)
from ddprun.launcher.lives import (
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
from ddprun.launcher.node_progress import NodeProgress
from ddprun.launcher.peers import Peers
from tests.ddprun.lives.simulation import Group, Schedule, ViolationError

LIFE = 1
FAILURE = RanksFailure(1, "own", "ValueError", "ValueError", 2, 30, "wrong")


@pytest.mark.parametrize("runs", [2000, pytest.param(100_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_random_schedules_keep_lives_apart_and_end(runs: int) -> None:
    restarts, broken = 0, []
    for seed in range(runs):
        group = Group(Schedule.of(seed))
        try:
            restarts += group.run().leader.spent
        except ViolationError as error:
            broken.append(f"seed {seed}: {error}")
    assert broken == []
    assert restarts > 0.4 * runs  # the schedules do what they are for


def after(s: Leader, now: float, *events: Event) -> tuple[Leader, list[Action]]:
    actions: list[Action] = []
    for event in events:
        s, more = lead(s, event, now)
        actions += more
    return s, actions


def group_of_two(life: int = LIFE, **fields: object) -> Leader:
    """A leader whose two nodes are in this life, the second or a later one unless it is the first."""
    s = Leader(2, 5, ticked=100.0)
    s, _ = after(s, 100.0, *(Received(Hello(LIFE, f"boot-{node}"), node) for node in range(2)))
    return dataclasses.replace(s, life=life, began=100.0, **fields)


def ended(s: Leader, failure: RanksFailure, *, healthy: bool = True, port: int = 29_511) -> str:
    """Return why the attempt ends after this failure of node 1; empty if another life follows."""
    node = 1
    s, _ = after(s, 101.0, Received(Failed(s.life, failure), node))
    other, own = Ready(s.life, True, None, port), Ready(s.life, healthy, failure, port)
    life, (s, _) = s.life, after(s, 101.0, Received(other, 1 - node), Received(own, node))
    assert s.phase == "Ended" or s.life == life + 1
    return s.ended.reason if s.ended else ""


@pytest.mark.parametrize("code", [2, 71, 75, 78, 79, 80])
def test_failure_that_a_restart_cannot_change_ends_the_attempt(code: int) -> None:
    assert "cannot change" in ended(group_of_two(), dataclasses.replace(FAILURE, code=code))


@pytest.mark.parametrize(
    ("reason", "s", "failure"),
    [
        ("", group_of_two(), FAILURE),
        ("memory limit", group_of_two(), dataclasses.replace(FAILURE, kind="OOMKilled")),
        ("no restart in place is left", group_of_two(life=6, mark=1), FAILURE),
        ("no progress", group_of_two(fruitless=2), FAILURE),
        ("", group_of_two(fruitless=2, mark=1), FAILURE),
        ("same exception", group_of_two(last=Blamed(0, FAILURE)), FAILURE),
        ("", group_of_two(last=Blamed(0, dataclasses.replace(FAILURE, step=29))), FAILURE),
        ("same node", group_of_two(last=Blamed(1, dataclasses.replace(FAILURE, step=29))), FAILURE),
        ("", group_of_two(last=Blamed(1, dataclasses.replace(FAILURE, step=29)), mark=1), FAILURE),
        ("", group_of_two(last=Blamed(1, FAILURE)), RanksFailure(77, "peer", "PeerLost")),
    ],
)
def test_table_of_escalations(reason: str, s: Leader, failure: RanksFailure) -> None:
    found = ended(s, failure)
    assert reason in found if reason else not found


@pytest.mark.parametrize(
    "odd",
    [{"step": 1.5}, {"code": "1"}, {"kind": 5}, {"message": "m" * 999}, {"rank": []}],
    ids=str,
)
def test_failure_of_any_report_reaches_the_leader(odd: dict[str, object]) -> None:
    report = {"code": 3, "cause": "own", "exception": "ValueError"} | odd
    message = Failed(LIFE, RanksFailure.of_report(report))
    assert message.failure.code == (1 if "code" in odd else 3) and message.failure.exception == "ValueError"
    assert from_json(json.loads(json.dumps(to_json(message)))) == message


def test_node_that_is_not_healthy_ends_the_attempt() -> None:
    assert "not healthy" in ended(group_of_two(), FAILURE, healthy=False)
    assert "no port" in ended(group_of_two(), FAILURE, port=0)


@pytest.mark.parametrize("first", [RanksFailure(77, "peer"), RanksFailure(1, "own", "ExitedEarly")])
def test_own_failure_is_blamed_before_a_lost_peer_and_an_early_end_that_arrived_first(first: RanksFailure) -> None:
    s, _ = after(group_of_two(), 101.0, Received(Failed(LIFE, first), 0))
    s, _ = after(s, 101.0, Received(Ready(LIFE, True, first), 0))
    s, _ = after(s, 101.0, Received(Ready(LIFE, True, dataclasses.replace(FAILURE, code=79)), 1))
    assert s.ended is not None
    assert s.ended.blamed is not None and s.ended.blamed.node == 1


@pytest.mark.parametrize(("took", "limit"), [(1.0, 600.0), (400.0, 800.0)])
def test_later_life_without_a_step_ends_when_it_takes_much_longer_than_the_first(took: float, limit: float) -> None:
    s, _ = after(group_of_two(), 100.0 + took, Progressed(1, 0))
    s = dataclasses.replace(s, life=LIFE + 1, began=200.0, has_stepped=False)

    def phase_after(s: Leader, seconds: float) -> str:
        seats = {node: dataclasses.replace(seat, heard=200.0 + seconds) for node, seat in s.seats.items()}
        quiet = dataclasses.replace(s, seats=seats, ticked=200.0 + seconds)
        return after(quiet, 200.0 + seconds, Tick())[0].phase

    assert (phase_after(s, limit - 1), phase_after(s, limit + 1)) == ("Running", "Ended")


def test_launcher_that_was_paused_does_not_take_the_others_for_lost() -> None:
    s, _ = after(group_of_two(), 100.0 + 3 * SILENCE, Tick())
    assert s.phase == "Running"
    s, _ = after(s, 100.5 + 3 * SILENCE, Tick())
    assert s.phase == "Running"


def test_restarted_launcher_is_not_taken_for_the_one_before() -> None:
    s, _ = after(group_of_two(), 101.0, Received(Hello(LIFE, "another boot"), 1))
    assert s.ended is not None and "restarted" in s.ended.reason


def test_message_of_an_older_life_changes_nothing() -> None:
    s = group_of_two(life=LIFE + 1)
    for message in (Failed(LIFE, FAILURE), Ready(LIFE, healthy=True, failure=None), Done(LIFE)):
        after_message, actions = after(s, 100.0, Received(message, 1))
        assert (after_message, actions) == (s, [])
    node = Follower("boot", LIFE + 1, joined=True)
    assert follow(node, Received(Abort(LIFE)), 0.0) == (node, ())


class Steps(NodeProgress):
    """How far the ranks are, as a test says."""

    made: int | None = None

    def mark(self) -> int | None:
        return self.made


def test_steps_of_a_life_that_is_over_are_no_steps_of_the_next_life() -> None:
    steps = Steps(1)
    agreement = Agreement(Ranks(), Peers(Ranks(), None), 3, steps)
    agreement.turn()
    steps.made = 5
    agreement.failed({"code": 1})
    assert agreement.obey() and agreement.must_end
    agreement.ended(healthy=True, failure=None)
    assert not agreement.obey() and agreement.next_life
    agreement.turn()  # it is time to look for the first step
    assert agreement.reports()["lives"][0]["recoveryMilliseconds"] is None
    agreement.begin(2)
    steps.made = 1
    agreement.failed({"code": 1})
    assert agreement.reports()["lives"][0]["recoveryMilliseconds"] >= 0


def test_what_a_node_said_before_its_connection_is_lost_is_said_again() -> None:
    node = Follower("boot", LIFE, phase="Failed", joined=True, lost=1.0, failure=FAILURE)
    _, actions = follow(node, Connected(), 2.0)
    assert actions == (Send(Hello(LIFE, "boot")), Send(Failed(LIFE, FAILURE)))


def test_node_that_was_without_a_connection_hears_the_order_again() -> None:
    s = dataclasses.replace(group_of_two(life=LIFE + 1), port=29_511)
    _, actions = after(s, 101.0, Lost(1), Received(Hello(LIFE, "boot-1"), 1))
    assert actions == [Send(Start(LIFE + 1, 29_511), 1)]


def test_node_that_has_succeeded_waits_for_the_leader_and_may_start_again() -> None:
    node, actions = follow(Follower("boot", LIFE, joined=True), Done(LIFE), 1.0)
    assert actions == (Send(Done(LIFE)),)
    for order in (Release(LIFE), Abort(LIFE)):
        assert follow(node, Received(order), 1.0)[1] == (order,)


@pytest.mark.parametrize(("runs", "phase"), [(True, "Released"), (False, "Ended")])
def test_stop_signal_is_the_end_of_restarts_in_place(*, runs: bool, phase: str) -> None:
    """Ranks that run save a checkpoint together; without ranks there is nothing to wait for."""
    for life in (LIFE, LIFE + 1):  # the second has made no step
        s, _ = after(group_of_two(life=life), 101.0, Received(Stop(life, runs=runs), 1))
        assert s.phase == phase
        assert after(s, 101.0, Received(Failed(life, FAILURE), 0))[1] == [], "no other life"


def test_processes_that_do_not_end_end_the_attempt() -> None:
    s, _ = after(group_of_two(), 101.0, Received(Failed(LIFE, FAILURE), 1))
    s, _ = after(s, 112.0, Tick())
    assert s.ended is not None and "did not end" in s.ended.reason


def reason_of(actions: Sequence[Action]) -> str:
    (action,) = actions
    assert isinstance(action, Release)
    return action.reason


def test_node_that_has_not_joined_ends_by_itself_and_says_why() -> None:
    alone = Follower("boot", LIFE)
    s, actions = follow(alone, Failed(LIFE, FAILURE), 1.0)
    assert s.phase == "Released"
    assert "node 0 was not reached" in reason_of(actions)
    assert not reason_of(follow(follow(alone, Stop(LIFE), 1.0)[0], Failed(LIFE, FAILURE), 1.0)[1])


def test_node_that_succeeds_before_the_leader_answers_is_not_missed() -> None:
    """Its ranks ended some milliseconds after it had connected: the leader ended the ranks of all other nodes."""
    s, said = follow(Follower("boot", LIFE), Connected(), 1.0)
    s, actions = follow(s, Done(LIFE), 1.0)
    *done, last = actions
    assert s.phase == "Released" and last == Release(LIFE)
    messages = [action.message for action in (*said, *done) if isinstance(action, Send)]
    leader = Leader(2, 5, ticked=1.0)
    leader, _ = after(leader, 1.0, Received(Hello(LIFE, "zero"), 0), *(Received(message, 1) for message in messages))
    leader, _ = after(leader, 1.0, Lost(1))
    leader, _ = after(leader, 5.0, Tick())
    assert leader.phase == "Released"


def test_failure_before_all_launchers_take_part_ends_the_attempt_and_names_the_absent() -> None:
    s, _ = after(Leader(3, 5), 1.0, *(Received(Hello(LIFE, str(node)), node) for node in (0, 1)))
    s, actions = after(s, 1.0, Received(Failed(LIFE, FAILURE), 1))
    assert s.phase == "Released"
    first, second = actions
    assert isinstance(first, Send) and isinstance(first.message, Release) and second == Send(first.message, 1)
    assert first.message.reason.startswith("the launcher of node 2 is not connected yet, ")
    assert reason_of(follow(Follower("boot", LIFE), Received(first.message), 1.0)[1]) == first.message.reason


@pytest.mark.parametrize("text", ["many", "-1", "2.5", "9999999999"])
def test_grant_that_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"DDPJOB_INPLACE_RESTARTS={text} is not a whole number"):
        granted({"DDPJOB_INPLACE_RESTARTS": text})
    assert (granted({}), granted({"DDPJOB_INPLACE_RESTARTS": "7"})) == (0, 7)


MESSAGES: list[Message] = [
    Hello(LIFE, "boot"), Failed(LIFE, FAILURE), Ready(LIFE, healthy=True, failure=None),
    Ready(LIFE, healthy=False, failure=FAILURE, port=29_511), Stop(LIFE, runs=True), Start(LIFE, 29_511),
    End(LIFE, "why", None), End(LIFE, "why", Blamed(1, FAILURE)), Release(LIFE, "why"),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
def test_message_survives_json(message: Message) -> None:
    assert from_json(json.loads(json.dumps(to_json(message)))) == message
