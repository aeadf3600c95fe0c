"""Fixtures: a control plane with its controllers, and the comparison of the in-memory cluster with it."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from ddpjob_operator.cluster import kubernetes
from tests.worlds.contract.comparison import Comparison, comparing
from tests.worlds.control_plane import ControlPlane

T = TypeVar("T")


class ContractPlane(ControlPlane):
    """A control plane whose controllers know DDPJobs from the start, and protect claims."""

    controllers = (*ControlPlane.controllers, "persistentvolumeclaim-protection-controller")

    def _start_controllers(self) -> None:
        self.apply_crd()  # a running collector looks for new kinds only every 30 s
        super()._start_controllers()


@dataclass(frozen=True)
class Contract:
    """Both clusters. ``run`` runs a coroutine on the loop of their watches."""

    plane: ContractPlane
    comparison: Comparison
    runner: asyncio.Runner

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)


@pytest.fixture(scope="package")
def contract() -> Iterator[Contract]:
    with (
        pytest.MonkeyPatch.context() as patch,
        ContractPlane(controller_manager=True) as plane,
        asyncio.Runner() as runner,
    ):
        patch.setattr(kubernetes, "RETRY_DELAYS", ())  # a 500 is compared like any other response
        context = comparing(plane)
        comparison = runner.run(context.__aenter__())
        yield Contract(plane, comparison, runner)
        runner.run(context.__aexit__(None, None, None))
