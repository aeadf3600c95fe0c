"""Operators as processes, killed and disturbed at their writes to a real API server: the job ends in the same way."""

import asyncio
import os

import pytest

from tests.injection.cluster import Cluster, open_cluster
from tests.injection.faults import CRASHES, KINDS
from tests.injection.runs import Run
from tests.injection.stories import STORIES
from tests.simulator.faults import At
from tests.simulator.oracle import Outcome
from tests.soak import ALL
from tests.worlds.control_plane import ControlPlane

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(10_800 if ALL else 1_800)]
KILLED, SAMPLE = (1, 1) if ALL else (12, 24)
"""One write of so many gets each kind of kill, or each other kind of fault. The simulator has each at each write."""
CONCURRENT_RUNS = 6 * (os.cpu_count() or 1)
SETTLE_SECONDS = 60.0  # a request that the proxy holds may be carried out after the story ended
BY_CREATES = ("attempt", "messages", "made")
"""Parts of the outcome that change after a refused create: the attempt is abandoned, and the next has a new number."""


@pytest.mark.parametrize("story", STORIES)
def test_fault_at_any_write_changes_nothing_about_the_job(collecting_plane: ControlPlane, story: str) -> None:
    """A sample of the writes; `make soak` has all."""

    async def test() -> list[bool | BaseException]:
        async with open_cluster(collecting_plane) as cluster:
            async with Run(cluster, await cluster.new_namespace()) as run:
                await STORIES[story](run)
                await run.quiet()
                expected, faults = run.outcome(), faults_of(len(run.writes))
            free = asyncio.Semaphore(CONCURRENT_RUNS)

            async def takes_place(fault: At) -> bool:
                """Try twice, because the number of status patches varies by some."""
                async with free:
                    return await hits(cluster, story, fault, expected) or await hits(cluster, story, fault, expected)

            return await asyncio.gather(*map(takes_place, faults), return_exceptions=True)

    results = asyncio.run(test())
    failures = [str(result) for result in results if isinstance(result, BaseException)]
    assert not failures, f"{len(failures)} of {len(results)} runs, the first ones:\n" + "\n".join(failures[:10])
    assert results.count(False) <= max(1, len(results) / 10), "few faults took place"


def faults_of(writes: int) -> list[At]:
    """Return each kind of fault at a sample of the writes, at other ones for each kind."""
    every = {kind: KILLED if kind in CRASHES else SAMPLE for kind in KINDS}
    return [
        At(kind, number + 1)
        for place, kind in enumerate(KINDS)
        for number in range(writes)
        if (number + 5 * place) % every[kind] == 0
    ]


async def hits(cluster: Cluster, story: str, fault: At, expected: Outcome) -> bool:
    """Carry out the story with the fault, and compare how it ends. Return whether the fault's write took place."""
    async with Run(cluster, await cluster.new_namespace(), fault) as run:
        await STORIES[story](run)
        ignored = BY_CREATES if is_create_refused(run) else ()

        def differences() -> dict[str, object]:
            got = run.outcome()
            return {
                key: (expected[key], got[key]) for key in expected if key not in ignored and expected[key] != got[key]
            }

        try:
            await asyncio.wait_for(run.until("the outcome is the same", lambda: not differences()), SETTLE_SECONDS)
        except TimeoutError:
            writes = "\n    ".join(run.writes)
            raise AssertionError(f"{story}, {run}: {differences()}\n    {writes}") from None
        await run.quiet()
        assert not differences(), f"{story}, {run}: {differences()}"
        assert not run.orphans(), f"{story}, {run}: {run.orphans()}"
        return run.injected > 0


def is_create_refused(run: Run) -> bool:
    """Return whether the client gave up a create."""
    return run.fault is not None and run.fault.kind == "errors" and bool(run.injected) and run.struck.startswith("POST")
