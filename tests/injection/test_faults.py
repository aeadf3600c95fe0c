"""Operators as processes, killed and disturbed at their writes to a real API server: the job ends in the same way."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.controlplane import ControlPlane
from tests.injection.campaign import Campaign, Case
from tests.injection.cluster import open_cluster
from tests.injection.stories import STORIES

pytestmark = pytest.mark.apiserver


def on(plane: ControlPlane, test: Callable[[Campaign], Awaitable[None]]) -> None:
    """Carry out ``test``, then check that nothing more is written and that nothing is left of deleted jobs."""

    async def whole() -> None:
        async with open_cluster(plane) as cluster:
            campaign = Campaign(cluster)
            await test(campaign)
            await campaign.check_rest()
            await campaign.check_collection()
            campaign.report()

    asyncio.run(whole())


def test_two_operators_at_once_change_nothing_about_the_job(collecting_plane: ControlPlane) -> None:
    async def test(campaign: Campaign) -> None:
        await campaign.compare([Case(story, operators=2) for story in STORIES for _ in range(3)])

    on(collecting_plane, test)
