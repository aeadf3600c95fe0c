"""Fixtures: one in-memory and one real cluster for all contract tests, and the event loop of their watches."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from ddpjob_operator.cluster import kubernetes
from tests.worlds.contract.targets import ContractPlane, MemoryTarget, RealTarget, both_targets, contract_plane

T = TypeVar("T")


@dataclass(frozen=True)
class Targets:
    """Both clusters. ``run`` runs a coroutine on their loop."""

    memory: MemoryTarget
    real: RealTarget
    plane: ContractPlane
    runner: asyncio.Runner

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)


@pytest.fixture(scope="package")
def targets() -> Iterator[Targets]:
    with pytest.MonkeyPatch.context() as patch, contract_plane() as plane, asyncio.Runner() as runner:
        patch.setattr(kubernetes, "RETRY_DELAYS", ())  # a 500 is compared like any other response
        context = both_targets(plane)
        memory, real = runner.run(context.__aenter__())
        yield Targets(memory, real, plane, runner)
        runner.run(context.__aexit__(None, None, None))
