"""One pair of worlds for all contract tests, and the event loop that its watches live on."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from ddpjob.cluster import kubernetes
from tests.cluster.contract.worlds import ContractPlane, MemoryWorld, RealWorld, both_worlds, contract_plane
from tests.prepared import program

T = TypeVar("T")


@dataclass(frozen=True)
class Worlds:
    """Both worlds. ``run`` runs a coroutine on their loop."""

    memory: MemoryWorld
    real: RealWorld
    plane: ContractPlane
    runner: asyncio.Runner

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)


@pytest.fixture(scope="package")
def worlds() -> Iterator[Worlds]:
    for name in ("etcd", "kube-apiserver", "kube-controller-manager"):
        program(name)
    with pytest.MonkeyPatch.context() as patch, contract_plane() as plane, asyncio.Runner() as runner:
        patch.setattr(kubernetes, "RETRY_DELAYS", ())  # a 500 is an answer like any other here
        context = both_worlds(plane)
        memory, real = runner.run(context.__aenter__())
        yield Worlds(memory, real, plane, runner)
        runner.run(context.__aexit__(None, None, None))
