"""The exception of a plain script under torchrun, from the ends of its pods' logs."""

import asyncio
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.state import MAX_LOGS
from ddpjob_operator.cluster.base import Forbidden, NotFound, TooManyRequests, Unavailable
from ddpjob_operator.controller.pod_logs import AT_ONCE, LINES, MAX_BYTES, SECONDS, SLOW_SECONDS, PodLogs
from tests.builders import ended
from tests.controller.bench import Bench, on_bench
from tests.controller.faketime import run
from tests.engine.test_plain_scripts import BLOCK, PEER_LOST, VALUE_ERROR, log
from tests.worlds.memory.faulty import Call, Fault, FaultyCluster

KEY = names.Key("default", "mnist")
POD = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": names.TRAINER_CONTAINER, "image": "i"}]}}
RANK_0, RANK_2 = log(1, PEER_LOST), log(2, VALUE_ERROR)


async def failure(
    bench: Bench, *logs: str, error: Exception | None = None, slow: float = 0.0
) -> tuple[Json, float, list[Call]]:
    """Let both nodes of a job end with 1 in the same second, with these logs.

    error, slow: what requests for a log raise, and how long they take.

    Returns: the recorded failure, the seconds until the job has failed, and the requests for logs.
    """
    asked: list[Call] = []

    def rule(call: Call) -> Fault | None:
        if not call.reads_log:
            return None
        assert bench.status()["currentAttempt"]["phase"] == "Ending", "recorded before it is read"
        asked.append(call)
        return Fault(before=error, slow_seconds=slow)

    await bench.restart(reads_logs=True)
    bench.submit(nprocPerNode=2, restartPolicy={"maxRestarts": 0})
    await asyncio.sleep(1)
    pods = sorted(bench.pods(1), key=lambda pod: str(pod["metadata"]["name"]))
    for pod, text in zip(pods, logs, strict=True):
        bench.server.logs["default", pod["metadata"]["name"], names.TRAINER_CONTAINER] = text
    await bench.run_all()
    bench.rule = rule
    for node_rank, pod in enumerate(pods):
        bench.report(pod, ended(1, message=BLOCK.format(rank=2 * node_rank, code=1)))
    begin = asyncio.get_running_loop().time()
    async with asyncio.timeout(30):
        while bench.status()["state"] != "Failed":  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(0.02)
    (found,) = bench.status()["failures"]
    return found, asyncio.get_running_loop().time() - begin, asked


NOISE = ("x" * 16_000 + "\n") * LINES
assert len(NOISE) > 2 * MAX_BYTES


@pytest.mark.parametrize(
    ("text", "slow", "longest", "number"),
    [(RANK_2, 0.0, 1.0, 2), (RANK_2, SLOW_SECONDS - 1, SLOW_SECONDS, 2), (NOISE + RANK_2, 0.0, 1.0, 3)],
    ids=["each log once", "a busy kubelet", "fewer of long lines"],
)
@on_bench
async def test_exception_outside_of_the_kubelets_part_is_read_from_the_log(
    bench: Bench, text: str, slow: float, longest: float, number: int
) -> None:
    found, seconds, asked = await failure(bench, RANK_0, text, slow=slow)
    assert (found["nodeRank"], found["rank"], found["exception"]) == (1, 2, "ValueError")
    assert found["message"].endswith(VALUE_ERROR)
    assert seconds < longest and len(asked) == number
    bench.controllers[-1].pod_logs.follow(KEY, 2, ())
    assert not bench.controllers[-1].pod_logs.found(KEY), "what it says is dropped with its attempt"


@on_bench
async def test_one_failed_request_is_repeated(bench: Bench) -> None:
    error = Unavailable("get Pod: no answer")
    asyncio.get_running_loop().call_later(4.2, bench.refuse, None)
    found, seconds, _ = await failure(bench, RANK_0, RANK_2, error=error)
    assert found["exception"] == "ValueError" and 1 < seconds < 3


def test_kubelets_that_never_answer_delay_one_verdict_for_long_and_later_ones_less() -> None:
    async def story() -> list[float]:
        begun, times = asyncio.get_running_loop().time, list[float]()
        reader = PodLogs(FaultyCluster(lambda call: Fault(slow_seconds=60)), lambda key: times.append(begun()))
        for attempt in (1, 2):
            start, _ = begun(), reader.follow(KEY, attempt, [("p", str(attempt))])
            await asyncio.sleep(2 * SLOW_SECONDS)
            times[-1] -= start
        return times

    assert run(story()) == pytest.approx([SLOW_SECONDS, SECONDS], abs=0.1)


@pytest.mark.parametrize(
    ("error", "longest", "number"),
    [
        (Unavailable("kubelet"), 4.0, None),
        (Forbidden("pods/log", code=403), 1.0, 2),
        (ZeroDivisionError(), 1.0, 2),
        (TooManyRequests("busy", retry_after=1.0), 4.0, 2 * 3),
    ],
    ids=["unavailable", "forbidden", "unexpected", "not before the server allows it"],
)
@on_bench
async def test_logs_that_cannot_be_read_leave_rank_and_exit_code(
    bench: Bench, error: Exception, longest: float, number: int | None
) -> None:
    found, seconds, asked = await failure(bench, RANK_0, RANK_2, error=error)
    assert found["message"].endswith("rank 0 ended with exit code 1") and "exception" not in found
    assert found["next"].startswith("kubectl logs mnist-")
    assert seconds < longest and number in (None, len(asked))


def test_no_more_logs_than_the_maximum_are_read_when_others_are_asked_for_meanwhile() -> None:
    async def story() -> set[str]:
        asked = set[str]()

        def fault(call: Call) -> Fault:
            asked.add(call.name)
            return Fault(before=NotFound("no log"), slow_seconds=0.5)

        reader = PodLogs(FaultyCluster(fault), lambda key: None)
        for first in (MAX_LOGS, 0):  # the pods that ended first are seen last
            reader.follow(KEY, 1, [(f"p{n}", f"{n}") for n in range(first, first + MAX_LOGS)])
            await asyncio.sleep(0.1)
        await asyncio.sleep(3)
        return asked

    assert len(run(story())) == MAX_LOGS


def test_logs_of_one_namespace_that_cannot_be_read_do_not_delay_those_of_another() -> None:
    async def story() -> dict[Any, Any]:
        cluster = FaultyCluster(
            lambda call: Fault(before=Unavailable("kubelet")) if call.namespace == "other" else None
        )
        cluster.server.create(names.PODS, "default", {"apiVersion": "v1", "kind": "Pod"} | POD)
        cluster.server.bind("default", "p", "worker")
        cluster.server.logs["default", "p", names.TRAINER_CONTAINER] = log(1, VALUE_ERROR)
        reader = PodLogs(cluster, lambda key: None)
        reader.follow(names.Key("other", "j"), 1, [("p", str(number)) for number in range(2 * AT_ONCE)])
        await asyncio.sleep(0.1)
        reader.follow(KEY, 1, [("p", "0")])
        await asyncio.sleep(0.1)
        return dict(reader.found(KEY))

    assert run(story())["0"] is not None
