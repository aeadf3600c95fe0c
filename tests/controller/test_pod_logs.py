"""The exception of a plain script under torchrun, from the ends of its pods' logs."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.state import MAX_LOGS
from ddpjob.progress.poller import ProgressPoller
from ddpjob_operator.cluster.base import ClusterError, Forbidden, NotFound, TooManyRequests, Unavailable
from ddpjob_operator.controller.controller import Controller
from ddpjob_operator.controller.metrics import Metrics
from ddpjob_operator.controller.pod_logs import AT_ONCE, LINES, MAX_BYTES, SECONDS, SLOW_SECONDS, PodLogs
from tests.builders import SETTINGS, ended, running
from tests.controller.controllers import serve
from tests.controller.faketime import run
from tests.engine.test_plain_scripts import BLOCK, PEER_LOST, VALUE_ERROR, log
from tests.worlds.memory.faulty import Call, Fault, FaultyCluster

JOB = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "metadata": {"name": "mnist"}}
POD = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": names.TRAINER_CONTAINER, "image": "i"}]}}
SPEC = {"image": "i", "numNodes": 2, "nprocPerNode": 2, "restartPolicy": {"maxRestarts": 0}}


class Bench:
    """A cluster with a controller and a job of two nodes that both end with 1 in the same second.

    error: what the next requests for a log raise. slow: how long they take. asked: the times of these requests.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.slow = 0.0
        self.asked: list[tuple[float, str]] = []
        self.cluster = FaultyCluster(self._fault)
        loop = asyncio.get_running_loop()
        self.controller = Controller(
            self.cluster,
            replace(SETTINGS, reads_logs=True),
            lambda on_news: ProgressPoller(10.0, on_news),
            metrics=Metrics(),
            clock=loop.time,
        )

    def _fault(self, call: Call) -> Fault | None:
        if not call.name.endswith("/log"):
            return None
        assert self.status()["currentAttempt"]["phase"] == "Ending", "recorded before it is read"
        self.asked.append((asyncio.get_running_loop().time(), call.name))
        return Fault(before=self.error, slow_seconds=self.slow) if self.error is not None or self.slow else None

    def status(self) -> Json:
        return dict(self.cluster.server.get(names.DDPJOBS, "default", "mnist").get("status") or {})

    async def fail(self, *logs: str) -> float:
        """Let both nodes fail, with these logs, and return the time until the job has failed."""
        server = self.cluster.server
        server.create(names.DDPJOBS, "default", JOB | {"spec": SPEC})
        await asyncio.sleep(1)
        pods = [pod["metadata"]["name"] for pod in server.list(names.PODS, "default").items]
        for pod, text in zip(pods, logs, strict=True):
            server.bind("default", pod, "worker")
            server.patch_status(names.PODS, "default", pod, {"status": running()})
            server.logs["default", pod, names.TRAINER_CONTAINER] = text
        await asyncio.sleep(1)
        for node_rank, pod in enumerate(pods):
            part = BLOCK.format(rank=2 * node_rank, code=1)
            server.patch_status(names.PODS, "default", pod, {"status": ended(1, message=part)})
        begin = asyncio.get_running_loop().time()
        async with asyncio.timeout(30):
            while self.status()["state"] != "Failed":  # noqa: ASYNC110 - simulated time
                await asyncio.sleep(0.02)
        return asyncio.get_running_loop().time() - begin


async def observed(bench: Bench, *logs: str) -> tuple[Json, float]:
    serving = asyncio.create_task(serve(bench.controller, bench.cluster.watch))
    try:
        seconds = await bench.fail(*logs)
    finally:
        serving.cancel()
        await asyncio.wait({serving})
    (failure,) = bench.status()["failures"]
    return failure, seconds


def outcome(*logs: str, error: Exception | None = None, slow: float = 0.0) -> tuple[Json, float, Bench]:
    async def story() -> tuple[Json, float, Bench]:
        bench = Bench()
        bench.error, bench.slow = error, slow
        return *(await observed(bench, *logs)), bench

    result: tuple[Json, float, Bench] = run(story())
    return result


def test_exception_outside_of_the_kubelets_part_is_read_from_the_log() -> None:
    failure, seconds, bench = outcome(log(1, PEER_LOST), log(2, VALUE_ERROR))
    assert (failure["nodeRank"], failure["rank"], failure["exception"]) == (1, 2, "ValueError")
    assert failure["message"].endswith(VALUE_ERROR)
    assert seconds < 1 and len(bench.asked) == 2, "each log once"


def test_one_failed_request_is_repeated() -> None:
    async def story() -> tuple[Json, float]:
        bench = Bench()
        bench.error = Unavailable("get Pod: no answer")
        asyncio.get_running_loop().call_later(3.2, setattr, bench, "error", None)
        return await observed(bench, log(1, PEER_LOST), log(2, VALUE_ERROR))

    failure, seconds = run(story())
    assert failure["exception"] == "ValueError" and 1 < seconds < 3


def test_log_that_a_busy_kubelet_sends_late_is_waited_for() -> None:
    failure, seconds, bench = outcome(log(1, PEER_LOST), log(2, VALUE_ERROR), slow=SLOW_SECONDS - 1)
    assert failure["exception"] == "ValueError" and len(bench.asked) == 2
    assert seconds < SLOW_SECONDS


def test_kubelets_that_never_answer_delay_one_verdict_for_long_and_later_ones_less() -> None:
    async def story() -> list[float]:
        begun, times = asyncio.get_running_loop().time, list[float]()
        reader = PodLogs(FaultyCluster(lambda call: Fault(slow_seconds=60)), lambda key: times.append(begun()))
        for attempt in (1, 2):
            start, _ = begun(), reader.follow(names.Key("default", "j"), attempt, [("p", str(attempt))])
            await asyncio.sleep(2 * SLOW_SECONDS)
            times[-1] -= start
        reader.close()
        return times

    assert run(story()) == pytest.approx([SLOW_SECONDS, SECONDS], abs=0.1)


@pytest.mark.parametrize(("error", "longest"), [(Unavailable("kubelet"), 4.0), (Forbidden("pods/log", code=403), 1.0)])
def test_logs_that_cannot_be_read_leave_rank_and_exit_code(error: ClusterError, longest: float) -> None:
    failure, seconds, _ = outcome(log(1, PEER_LOST), log(2, VALUE_ERROR), error=error)
    assert failure["message"].endswith("rank 0 ended with exit code 1") and "exception" not in failure
    assert failure["next"].startswith("kubectl logs mnist-")
    assert seconds < longest


def test_request_is_not_repeated_before_the_server_allows_it() -> None:
    _, seconds, bench = outcome(log(1, PEER_LOST), log(2, VALUE_ERROR), error=TooManyRequests("busy", retry_after=1.0))
    assert len(bench.asked) == 2 * 3 and seconds < 4.0


def test_unexpected_error_does_not_delay_the_verdict_for_ever() -> None:
    _, seconds, bench = outcome(log(1, PEER_LOST), log(2, VALUE_ERROR), error=ZeroDivisionError())
    assert seconds < 1.0 and len(bench.asked) == 2


def test_no_more_logs_than_the_maximum_are_read_when_others_are_asked_for_meanwhile() -> None:
    async def story() -> set[str]:
        asked = set[str]()

        def fault(call: Call) -> Fault:
            asked.add(call.name)
            return Fault(before=NotFound("no log"), slow_seconds=0.5)

        reader = PodLogs(FaultyCluster(fault), lambda key: None)
        for first in (MAX_LOGS, 0):  # the pods that ended first are seen last
            reader.follow(names.Key("default", "j"), 1, [(f"p{n}", f"{n}") for n in range(first, first + MAX_LOGS)])
            await asyncio.sleep(0.1)
        await asyncio.sleep(3)
        reader.close()
        return asked

    assert len(run(story())) == MAX_LOGS


def test_end_of_a_log_with_long_lines_is_read() -> None:
    noise = ("x" * 16_000 + "\n") * LINES
    assert len(noise) > 2 * MAX_BYTES
    failure, *_ = outcome(log(1, PEER_LOST), noise + log(2, VALUE_ERROR))
    assert failure["exception"] == "ValueError"


def test_what_a_log_says_is_dropped_with_its_attempt() -> None:
    async def story() -> dict[str, Any]:
        bench = Bench()
        await observed(bench, log(1, PEER_LOST), log(2, VALUE_ERROR))
        key = names.Key("default", "mnist")
        bench.controller.pod_logs.follow(key, 2, ())
        return dict(bench.controller.pod_logs.found(key))

    assert run(story()) == {}


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
        reader.follow(names.Key("default", "j"), 1, [("p", "0")])
        await asyncio.sleep(0.1)
        found = dict(reader.found(names.Key("default", "j")))
        reader.close()
        return found

    assert run(story())["0"] is not None
