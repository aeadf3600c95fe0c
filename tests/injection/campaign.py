"""Many runs at once, each compared with the undisturbed run of its story."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.injection.cluster import Cluster
from tests.injection.runs import Run
from tests.injection.stories import STORIES
from tests.simulator.faults import At
from tests.simulator.oracle import Outcome

CONCURRENT_RUNS = 6 * (os.cpu_count() or 1)
SETTLE_SECONDS = 60.0  # a request that the proxy holds may be carried out after the story ended
BY_CREATES = ("attempt", "messages", "made")
"""Parts of the outcome that change after a refused create: the attempt is abandoned, and the next has a new number."""


class Case(NamedTuple):
    story: str
    fault: At

    def __str__(self) -> str:
        return f"{self.story} {self.fault}"


class Undisturbed(NamedTuple):
    """A run without a fault: how it ended, and its writes."""

    outcome: Outcome
    writes: list[str]


@dataclass
class Campaign:
    """Runs on one cluster. ``failures``: what differs. ``injected``: number of faults by kind.

    missed: faults whose write took place in neither of two runs, because the number of status patches varies by some.
    """

    cluster: Cluster
    failures: list[str] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)
    missed: int = 0
    runs: int = 0
    starts: int = 0
    _expected: dict[str, Undisturbed] = field(default_factory=dict)

    async def expected(self, story: str) -> Undisturbed:
        """Return the undisturbed run, which is carried out if necessary."""
        if story not in self._expected:
            async with Run(self.cluster, await self.cluster.new_namespace()) as run:
                await STORIES[story](run)
                await run.quiet()
                writes = [write.replace(run.namespace, "NAMESPACE") for write in run.writes]
                self._expected[story] = Undisturbed(run.outcome(), writes)
        return self._expected[story]

    async def compare(self, cases: Sequence[Case]) -> None:
        """Carry out runs, some at a time, and compare each with the undisturbed one."""
        await asyncio.gather(*(self.expected(story) for story in {case.story for case in cases}))
        free = asyncio.Semaphore(CONCURRENT_RUNS)

        async def one(case: Case) -> None:
            async with free:
                try:
                    took_place = await self._compare(case) or await self._compare(case)
                    self.missed += not took_place
                except AssertionError as error:
                    self.failures.append(f"{case}: {error}")

        await asyncio.gather(*map(one, cases))

    async def _compare(self, case: Case) -> bool:
        """Carry out one run, and compare it; return False if the fault's write did not take place."""
        self.runs += 1
        expected = self._expected[case.story].outcome
        differences: dict[str, object] = {}
        async with Run(self.cluster, await self.cluster.new_namespace(), case.fault) as run:
            await STORIES[case.story](run)
            left = _is_create_refused(run)

            def is_equal() -> bool:
                nonlocal differences
                got = run.outcome()
                ignored = BY_CREATES if left else ()
                differences = {
                    key: (expected[key], got[key])
                    for key in expected
                    if key not in ignored and expected[key] != got[key]
                }
                return not differences

            try:
                await asyncio.wait_for(run.until("the outcome is the same", is_equal), SETTLE_SECONDS)
            except TimeoutError:
                writes = "\n    ".join(run.writes)
                raise AssertionError(f"{differences}\n  {run}\n    {writes}") from None
            await run.quiet()
            assert is_equal(), differences
            assert not run.orphans(), run.orphans()
            self.starts += run.operator.starts
            self.injected[case.fault.kind] += run.injected
            return run.injected > 0

    def report(self) -> None:
        """Print the figures, and fail if a run differs."""
        print(
            f"\n{self.runs} runs, faults {dict(self.injected)}, {self.missed} without their fault, "
            f"{self.starts} operator starts, {len(self.failures)} differences"
        )
        assert not self.failures, "\n".join(
            [failure.partition(":")[0] for failure in self.failures] + self.failures[:10]
        )


def _is_create_refused(run: Run) -> bool:
    """Whether the client gave up a create."""
    return run.fault is not None and run.fault.kind == "errors" and bool(run.injected) and run.struck.startswith("POST")
