"""The in-memory cluster and the real API server, with its controllers, give the same answers to the same requests."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ddpjob.cluster import kubernetes
from tests.cluster.contract.comparison import Comparison
from tests.cluster.contract.requests import Request, sequences
from tests.cluster.contract.worlds import both_worlds, contract_plane

pytestmark = pytest.mark.apiserver

SEQUENCES = 500

Compare = Callable[[Sequence[Request]], None]


@pytest.fixture(scope="module")
def compare() -> Iterator[Compare]:
    """Runs one sequence in both worlds."""
    with pytest.MonkeyPatch.context() as patch, contract_plane() as plane, asyncio.Runner() as runner:
        patch.setattr(kubernetes, "RETRY_DELAYS", ())  # a 500 is an answer like any other here
        worlds = both_worlds(plane)
        memory, real = runner.run(worlds.__aenter__())
        comparison = Comparison(memory, real)
        yield lambda sequence: runner.run(comparison.run(sequence))
        runner.run(worlds.__aexit__(None, None, None))
        total = sum(comparison.outcomes.values())
        print(f"\n{total} requests to each world, {comparison.collections} waits for the collectors")


@settings(
    max_examples=SEQUENCES,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(sequence=sequences())
def test_both_worlds_answer_random_requests_alike(compare: Compare, sequence: list[Request]) -> None:
    compare(sequence)
