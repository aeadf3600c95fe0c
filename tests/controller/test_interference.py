"""The controller in simulated time beside webhooks, proxies and other programs that interfere with its requests."""

import asyncio

from ddpjob.api import names
from ddpjob.cluster.base import TooManyRequests
from tests.cluster.faulty_cluster import Call, Fault
from tests.controller.bench import Bench, on_bench


def test_a_proxy_that_asks_for_a_day_delays_a_job_by_a_minute() -> None:
    async def test(bench: Bench) -> None:
        busy = iter([TooManyRequests("busy", code=429, retry_after=86_400.0)])

        def once(call: Call) -> Fault | None:
            error = next(busy, None) if (call.verb, call.resource) == ("create", names.PODS) else None
            return Fault(before=error) if error is not None else None

        bench.rule = once
        bench.submit()
        await asyncio.sleep(70)
        assert len(bench.pods(1)) == 2

    on_bench(test)
