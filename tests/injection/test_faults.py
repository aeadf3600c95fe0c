"""Operators as processes, killed and disturbed at their writes to a real API server: the job ends in the same way."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.injection.campaign import Campaign, Case
from tests.injection.cluster import open_cluster
from tests.injection.faults import ANSWERS, CRASHES, WATCHES
from tests.injection.stories import STORIES
from tests.simulator.faults import At
from tests.soak import ALL
from tests.worlds.control_plane import ControlPlane

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(10_800 if ALL else 1_800)]
SAMPLED_STORIES = ("success", "rank-failure", "drain")
SAMPLE = 24
"""One write of so many gets a fault of each kind; another one for each kind."""
KILLED = 1 if ALL else 6
"""One write of so many is interrupted by a kill; the simulator kills at each."""


def on(plane: ControlPlane, test: Callable[[Campaign], Awaitable[None]]) -> None:
    """Carry out ``test``, and report what differs."""

    async def whole() -> None:
        async with open_cluster(plane) as cluster:
            campaign = Campaign(cluster)
            await test(campaign)
            campaign.report()

    asyncio.run(whole())


def test_kill_at_any_write_changes_nothing_about_the_job(collecting_plane: ControlPlane) -> None:
    """Before or after a sample of the writes; `make soak` kills before and after each."""

    async def test(campaign: Campaign) -> None:
        await asyncio.gather(*map(campaign.expected, STORIES))
        await campaign.compare([case async for case in crashes(campaign)])
        assert campaign.missed <= max(1, campaign.runs / 10)

    on(collecting_plane, test)


async def crashes(campaign: Campaign) -> AsyncIterator[Case]:
    """Yield a crash at every sixth write, in turn before and after it.

    Where the same write comes before it and after it in several stories, it is carried out in one of them only.
    """
    done: set[tuple[str, ...]] = set()
    for place, story in enumerate(STORIES):
        writes = (await campaign.expected(story)).writes
        for number in range(place % KILLED, len(writes), KILLED):
            for kind in CRASHES if ALL else CRASHES[(place + number) // KILLED % 2 :][:1]:
                around = (kind, *writes[max(0, number - 1) : number + 2])
                if ALL or around not in done:
                    done.add(around)
                    yield Case(story, At(kind, number + 1))


def test_any_fault_at_a_write_changes_nothing_about_the_job(collecting_plane: ControlPlane) -> None:
    """A sample; all in `make soak`."""

    async def test(campaign: Campaign) -> None:
        stories = list(STORIES) if ALL else SAMPLED_STORIES
        every = 1 if ALL else SAMPLE
        undisturbed = await asyncio.gather(*map(campaign.expected, stories))
        await campaign.compare(
            [
                Case(story, At(kind, number + 1))
                for story, run in zip(stories, undisturbed, strict=True)
                for place, kind in enumerate(ANSWERS + WATCHES)
                for number in range(len(run.writes))
                if (number + place) % every == 0
            ]
        )
        assert campaign.missed <= max(1, campaign.runs / 10)

    on(collecting_plane, test)
