"""The clock of status times: that of the API server, whatever happens to the local one."""

import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.api import names
from ddpjob.clock import SteadyClock
from ddpjob_operator.cluster.clock import SLEW, ServerClock
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.controller.main import Operator
from ddpjob_operator.controller.settings import ControllerSettings
from tests.worlds.client import list_all
from tests.worlds.kubeconfig import write_kubeconfig
from tests.worlds.loopback import serving

START = 1_800_000_000.0
HOUR = 3600.0


class Times:
    """A monotonic clock, a local wall clock and a server's clock; ``pass_by`` advances all."""

    def __init__(self) -> None:
        self.monotonic = 50.0
        self.wall = START - 5.0
        self.server = START + 0.3

    def pass_by(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds
        self.server += seconds

    def clock(self) -> ServerClock:
        return ServerClock(monotonic=lambda: self.monotonic, wall=lambda: self.wall)

    def request(self, clock: ServerClock, there: float = 0.01, back: float = 0.01) -> None:
        sent = self.monotonic
        self.pass_by(there)
        date = formatdate(self.server, usegmt=True)
        self.pass_by(back)
        clock.observe(date, sent, self.monotonic)


def error(times: Times, clock: ServerClock) -> float:
    return clock.now().timestamp() - times.server


def test_time_before_the_first_response_is_the_local_one() -> None:
    times = Times()
    clock = times.clock()
    times.pass_by(7.0)
    assert clock.now().timestamp() == pytest.approx(times.wall)
    assert clock.now().tzinfo is UTC


@pytest.mark.parametrize("local", [-5.0, 4.9])
def test_first_response_that_the_local_clock_confirms_sets_the_time_to_a_second(local: float) -> None:
    times = Times()
    times.wall = times.server + local
    clock = times.clock()
    times.request(clock)
    assert abs(error(times, clock)) < 0.6


@pytest.mark.parametrize("ahead", [2 * HOUR, -2 * HOUR])
def test_one_response_of_a_server_with_a_wrong_clock_sets_nothing(ahead: float) -> None:
    """One of several API servers behind an address: its time is taken only if the next response has it, too."""
    times = Times()
    clock = times.clock()
    for _ in range(3):
        times.server += ahead
        times.request(clock)
        times.server -= ahead
        assert abs(error(times, clock)) < 6.0, "the local time, before there is another"
        for _ in range(5):
            times.pass_by(1.0)
            times.request(clock)
            assert abs(error(times, clock)) < 1.1
        times.pass_by(600.0)
        assert abs(error(times, clock)) < 1.1


def test_two_responses_that_agree_set_the_time_against_a_wrong_local_clock() -> None:
    times = Times()
    times.wall += 2 * HOUR
    clock = times.clock()
    times.request(clock)
    assert abs(error(times, clock)) > HOUR
    times.pass_by(0.5)
    times.request(clock)
    assert abs(error(times, clock)) < 1.1


@pytest.mark.parametrize("delay", [0.0, 0.05, 2.0])
def test_many_responses_with_jitter_set_it_closer(delay: float) -> None:
    times, chance = Times(), random.Random(3)
    clock = times.clock()
    for _ in range(300):
        times.request(clock, chance.uniform(0.001, 0.001 + delay), chance.uniform(0.001, 0.001 + delay))
        times.pass_by(chance.uniform(0, 3))
    assert abs(error(times, clock)) < max(0.1, delay / 8)


@pytest.mark.parametrize("step", [HOUR, -HOUR, 0.7])
def test_step_of_the_local_clock_has_no_effect(step: float) -> None:
    times = Times()
    server, steady = times.clock(), SteadyClock(monotonic=lambda: times.monotonic, wall=lambda: times.wall)
    times.request(server)
    before = server.now(), steady.now()
    times.wall += step
    times.pass_by(1.0)
    times.request(server)
    assert 0.9 <= (server.now() - before[0]).total_seconds() <= 1.2
    assert (steady.now() - before[1]).total_seconds() == pytest.approx(1.02)


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_step_of_the_server_clock_is_approached_slowly(step: float) -> None:
    times = Times()
    clock = times.clock()
    times.request(clock)
    began, real = clock.now().timestamp(), times.monotonic
    times.server += step
    times.request(clock)
    for _ in range(30):
        times.pass_by(60.0)
        times.request(clock)
        clock.now()
    measured, passed = clock.now().timestamp() - began, times.monotonic - real
    assert measured == pytest.approx(passed * (1 + SLEW * (1 if step > 0 else -1)), rel=0.001)
    times.pass_by(HOUR / SLEW)
    times.request(clock)
    assert abs(error(times, clock)) < 0.6


def test_two_servers_with_different_clocks_do_not_disturb_it() -> None:
    times = Times()
    clock = times.clock()
    for number in range(200):
        times.server += 3.0 if number % 2 else -3.0
        times.request(clock)
        times.pass_by(1.0)
        assert abs(error(times, clock)) < 4.0


@pytest.mark.parametrize("date", [None, "", "yesterday", "Mon, 99 Foo 2026 25:00:00 GMT"])
def test_header_that_is_no_date_is_ignored(date: str | None) -> None:
    times = Times()
    clock = times.clock()
    clock.observe(date, 50.0, 50.1)
    assert clock.now().timestamp() == pytest.approx(times.wall)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5), st.floats(-HOUR, HOUR)), max_size=30))
def test_time_never_goes_backwards_and_never_jumps(events: list[tuple[float, float, float]]) -> None:
    times = Times()
    clock = times.clock()
    times.request(clock)
    last, at = clock.now().timestamp(), times.monotonic
    for pause, delay, step in events:
        times.server += step
        times.request(clock, delay, delay)
        times.pass_by(pause)
        now = clock.now().timestamp()
        passed = times.monotonic - at
        assert (1 - SLEW) * passed - 1e-5 <= now - last <= (1 + SLEW) * passed + 1e-5
        last, at = now, times.monotonic


@pytest.fixture
async def server_of_another_year() -> AsyncIterator[str]:
    """Return the URL of an HTTP server whose Date is in 2031 and whose answer is an empty list."""

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.json_response({"items": [], "metadata": {}}, headers={"Date": "Thu, 06 Mar 2031 10:00:00 GMT"})

    async with serving(answer) as url:
        yield url


async def test_operator_has_the_time_of_its_api_server(
    server_of_another_year: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    path = write_kubeconfig(tmp_path / "config", server_of_another_year, {"token": "secret"})
    connection = await Connection.open(str(path))
    operator = Operator(ControllerSettings(), connection)
    for _ in range(2):  # the first response contradicts the local clock
        await list_all(operator.cluster, names.PODS)
    assert abs((operator.controller.now() - datetime(2031, 3, 6, 10, tzinfo=UTC)).total_seconds()) < 10
    await operator.controller.poller.close()
    await operator.cluster.close()
