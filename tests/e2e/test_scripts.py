"""Plain scripts that fail on a kind cluster: what the status says, from reports and from the logs that kubelets send.

The other faults are in ``python -m tests.e2e.scripts`` (`make soak`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from tests.e2e.scripts import Finding, Launcher, acts
from tests.e2e.trials import Trials

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600, func_only=True)]

# The exception under torchrun is outside of what the kubelet puts into the status, so a log is read.
CASES: tuple[tuple[Launcher, str], ...] = (("torchrun", "exception"),)
TRIALS = Trials(acts(CASES), 2, has_claim=False)


@pytest.mark.parametrize("name", TRIALS.acts)
def test_status_names_node_rank_and_cause(trials: Mapping[str, Future[Any]], name: str) -> None:
    found: Finding = trials[name].result()
    assert found.differences == []


def test_operator_reads_the_part_of_a_log_that_the_status_of_the_pod_lacks(trials: Mapping[str, Future[Any]]) -> None:
    found: Finding = trials["torchrun_exception"].result()
    assert "sample 17" not in found.failure["logTail"] and "sample 17" in found.failure["message"]
