"""Plain scripts on a kind cluster: they end, and the status says how they failed, from reports and from logs.

The other faults are in ``python -m tests.e2e.scripts`` (`make soak`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.kubectl import condition_of
from tests.e2e.scripts import Finding, Launcher, acts, objects
from tests.e2e.trials import Trial, Trials
from tests.soak import ALL

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600, func_only=True)]

# The exception under torchrun is outside of what the kubelet puts into the status, so a log is read.
CASES: tuple[tuple[Launcher, str], ...] = (("torchrun", "exception"),)
ENDS = Path(__file__).with_name("ends.py")


def ended(trial: Trial) -> dict[str, Any]:
    """Run an ordinary script to its end, where it may restart in place, and return the status."""
    script, job = objects(trial.name, "ddprun", "exit")
    script["data"] = {"train.py": ENDS.read_text()}
    del job["spec"]["restartPolicy"]
    trial.kubectl.apply(script, job)
    job = trial.until("the end", lambda job: job if condition_of(job, "Finished").get("status") == "True" else None)
    return dict(job["status"])


FAILING = acts(CASES)
ENDING = {f"ends_{number}": ended for number in range(20 if ALL else 1)}
TRIALS = Trials(FAILING | ENDING, 2, has_claim=False)


@pytest.mark.parametrize("name", ENDING)
def test_ordinary_script_ends_in_its_first_life(trials: Mapping[str, Future[Any]], name: str) -> None:
    status = trials[name].result()
    assert (status["state"], status["attempt"], status.get("restarts", 0)) == ("Succeeded", 1, 0), status


@pytest.mark.parametrize("name", FAILING)
def test_status_names_node_rank_and_cause(trials: Mapping[str, Future[Any]], name: str) -> None:
    found: Finding = trials[name].result()
    assert found.differences == []


def test_operator_reads_the_part_of_a_log_that_the_status_of_the_pod_lacks(trials: Mapping[str, Future[Any]]) -> None:
    found: Finding = trials["torchrun_exception"].result()
    assert "sample 17" not in found.failure["logTail"] and "sample 17" in found.failure["message"]
