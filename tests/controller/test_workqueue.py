"""The work queue, in an event loop with simulated time."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.api.names import Key
from ddpjob_operator.controller.workqueue import MAX_DELAY, WorkQueue
from tests.controller.faketime import run

A, B = Key("default", "a"), Key("default", "b")
Scenario = Callable[[WorkQueue], Awaitable[None]]


def now() -> float:
    return asyncio.get_running_loop().time()


class Recorder:
    """A processor that takes ``seconds`` per key and records when each started."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.began: list[tuple[Key, float]] = []
        self.running: set[Key] = set()
        self.most_at_once = 0

    async def __call__(self, key: Key) -> None:
        assert key not in self.running, "one key ran twice at the same time"
        self.began.append((key, now()))
        self.running.add(key)
        self.most_at_once = max(self.most_at_once, len(self.running))
        await asyncio.sleep(self.seconds)
        self.running.discard(key)


def play(recorder: Callable[[Key], Coroutine[Any, Any, None]], scenario: Scenario, workers: int = 2) -> None:
    """Run ``scenario`` with a running queue, then wait a minute until the queue is empty."""

    async def both() -> None:
        queue = WorkQueue(workers)
        stop = asyncio.Event()
        working = asyncio.create_task(queue.run(recorder, stop))
        await scenario(queue)
        await asyncio.sleep(60)
        assert queue.depth == 0
        stop.set()
        await working

    run(both())


@pytest.mark.parametrize(
    ("seconds", "calls", "expected"),
    [
        (1.0, [(0, "add", ())] * 100, [0.0]),
        (1.0, [(0, "add", ()), (0.5, "add", ()), (0, "add", ())], [0.0, 1.0]),
        (0.0, [(0, "add_after", (10,)), (0, "add_after", (2,)), (0, "add_after", (5,))], [2.0]),
        (0.0, [(0, "add_after", (10,)), (0, "add", ())], [0.0]),
        (0.01, [(0.01, "add_soon", ())] * 100, [0.01, 0.26, 0.51, 0.76, 1.01]),
        (0.0, [(0, "add_soon", ()), (0.1, "add_soon", ()), (0, "add", ()), (1, "add_soon", ())], [0.0, 0.1, 1.1]),
    ],
    ids=["many times", "while it runs", "shortest delay", "run cancels a delay", "paced", "paced change in a run"],
)
def test_key_runs_once_for_all_that_was_added_before(
    seconds: float, calls: list[tuple[float, str, tuple[float, ...]]], expected: list[float]
) -> None:
    recorder = Recorder(seconds)

    async def scenario(queue: WorkQueue) -> None:
        for pause, method, arguments in calls:
            if pause:
                await asyncio.sleep(pause)
            getattr(queue, method)(A, *arguments)

    play(recorder, scenario)
    assert [round(when, 2) for _, when in recorder.began] == expected


def test_number_of_workers_limits_concurrent_keys() -> None:
    recorder = Recorder()

    async def scenario(queue: WorkQueue) -> None:
        for number in range(9):
            queue.add(Key("default", str(number)))

    play(recorder, scenario, workers=3)
    assert recorder.most_at_once == 3
    assert [when for _, when in recorder.began] == [0.0] * 3 + [1.0] * 3 + [2.0] * 3


def test_failures_back_off_exponentially_up_to_half_a_minute() -> None:
    delays: list[float] = []

    async def fails(key: Key) -> None:
        if len(delays) < 15:
            delays.append(queues[0].retry(key))

    queues: list[WorkQueue] = []

    async def scenario(queue: WorkQueue) -> None:
        queues.append(queue)
        queue.add(A)
        await asyncio.sleep(600)

    play(fails, scenario)
    assert len(delays) == 15
    for number, delay in enumerate(delays):
        full = min(0.05 * 2**number, MAX_DELAY)
        assert full / 2 <= delay <= full


def test_success_resets_the_backoff_and_the_server_may_ask_for_a_longer_one() -> None:
    async def scenario(queue: WorkQueue) -> None:
        for _ in range(10):
            queue.retry(A)
        queue.forget(A)
        assert queue.retry(A) <= 0.05
        assert queue.retry(A, at_least=7.0) == 7.0
        assert queue.retry(B, at_least=3600.0) == MAX_DELAY

    play(Recorder(), scenario)


def test_many_jobs_of_one_namespace_delay_another_by_one_turn() -> None:
    recorder = Recorder(seconds=1.0)
    good = Key("quiet", "good")

    async def scenario(queue: WorkQueue) -> None:
        for number in range(1000):
            queue.add(Key("busy", str(number)))
        queue.add(good)
        await asyncio.sleep(1000)

    play(recorder, scenario, workers=1)
    assert dict(recorder.began)[good] <= 1.0


def test_keys_that_are_processed_at_once_leave_each_pass_of_the_loop_to_others() -> None:
    """Seen: eight plans of large jobs ran between any two requests of another tenant's job."""
    began: list[Key] = []

    async def at_once(key: Key) -> None:
        began.append(key)

    async def scenario(queue: WorkQueue) -> None:
        for number in range(100):
            queue.add(Key("busy", str(number)))
        for passes in range(1, 10):
            await asyncio.sleep(0)
            assert len(began) <= passes
        queue.add(Key("quiet", "a"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert Key("quiet", "a") in began

    play(at_once, scenario, workers=8)
    assert len(began) == 101


def test_slow_keys_of_one_namespace_hold_no_worker_of_another() -> None:
    recorder = Recorder(seconds=1000.0)

    async def scenario(queue: WorkQueue) -> None:
        for number in range(20):
            queue.add(Key("busy", str(number)))
        await asyncio.sleep(1)
        recorder.seconds = 1.0
        queue.add(Key("quiet", "a"))
        queue.add(Key("quiet", "b"))
        queue.add(Key("other", "c"))
        await asyncio.sleep(5000)

    play(recorder, scenario, workers=8)
    starts = {key.name: when for key, when in recorder.began if key.namespace != "busy"}
    assert starts == {"a": 1.0, "b": 2.0, "c": 1.0}
    assert sum(when == 0.0 for _, when in recorder.began) == 8
    assert len(recorder.began) == 23


def test_nothing_is_kept_of_a_key_that_is_done() -> None:
    queues: list[WorkQueue] = []
    failed: set[Key] = set()

    async def fails_once(key: Key) -> None:
        if key not in failed:
            failed.add(key)
            raise RuntimeError("boom")
        queues[0].forget(key)

    async def scenario(queue: WorkQueue) -> None:
        queues.append(queue)
        for number in range(500):
            queue.add_soon(Key(str(number % 20), str(number)))
            queue.add_after(Key(str(number % 20), str(number)), 1.0)

    play(fails_once, scenario)
    assert len(failed) == 500
    sizes = {name: len(value) for name, value in vars(queues[0]).items() if hasattr(value, "__len__")}
    assert not any(sizes.values()), sizes


@pytest.mark.parametrize(("seconds", "ended"), [(5.0, 5.0), (500.0, 11.0)], ids=["ends", "exceeds the grace period"])
def test_stop_waits_for_running_keys_and_drops_waiting_ones(seconds: float, ended: float) -> None:
    recorder = Recorder(seconds)

    async def scenario() -> None:
        queue = WorkQueue(workers=1)
        stop = asyncio.Event()
        working = asyncio.create_task(queue.run(recorder, stop, grace=10.0))
        queue.add(A)
        queue.add(B)
        await asyncio.sleep(1)
        stop.set()
        await working
        assert now() == ended

    run(scenario())
    assert [key for key, _ in recorder.began] == [A]


def test_nothing_starts_after_a_cancellation() -> None:
    recorder = Recorder()

    async def scenario() -> None:
        queue = WorkQueue()
        working = asyncio.create_task(queue.run(recorder, asyncio.Event()))
        queue.add_after(A, 10)
        await asyncio.sleep(1)
        working.cancel()
        await asyncio.sleep(60)

    run(scenario())
    assert recorder.began == []


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.sampled_from("abc"), st.sampled_from(["add", "after", "retry"])), max_size=40
    )
)
def test_key_always_runs_after_its_last_add(requests: list[tuple[float, str, str]]) -> None:
    recorder = Recorder(seconds=0.7)
    last: dict[Key, float] = {}

    async def scenario(queue: WorkQueue) -> None:
        for pause, name, how in requests:
            await asyncio.sleep(pause)
            key = Key("default", name)
            last[key] = now()
            match how:
                case "add":
                    queue.add(key)
                case "after":
                    queue.add_after(key, 1.0)
                case _:
                    queue.retry(key)

    play(recorder, scenario)
    for key, asked in last.items():
        assert max(when for began, when in recorder.began if began == key) >= asked
