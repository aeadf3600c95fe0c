"""The operator is killed: the training goes on."""

from __future__ import annotations

import pytest

from ddpjob.api.objects import Json
from ddprun.reporting.metrics import read_rows
from tests.e2e.installation import Installation
from tests.e2e.kubectl import until
from tests.e2e.trials import (
    WITH_RESTARTS_IN_PLACE,
    Trial,
)

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]


def uids(pods: dict[int, Json]) -> dict[int, str]:
    return {node_rank: pod["metadata"]["uid"] for node_rank, pod in pods.items()}


def starts(trial: Trial) -> list[Json]:
    return [row for row in read_rows(trial.folder) if row["event"] == "start"]


def test_without_the_operator_pods_run_on_and_ranks_restart_in_place(trial: Trial, operator: Installation) -> None:
    trial.apply("--step-delay", "0.5", env=WITH_RESTARTS_IN_PLACE)
    trial.until_trained()
    before = uids(trial.pods())

    with operator.killed():
        trial.kill_rank(1)
        until("the next life", lambda: len(starts(trial)) == 2, seconds=60)

    seen = trial.namespace.status(trial.name)["progress"]["step"]
    status = trial.namespace.until_step(trial.name, seen + 10)
    assert status["state"] == "Running", "the training must outlive the operator's absence: give it more steps"
    assert uids(trial.pods()) == before
    done = trial.until_finished()
    assert (done.status["state"], done.status["attempt"], done.restarts) == ("Succeeded", 1, (1, 0))
    assert done.status["restartsInPlace"] == 1
    assert uids(trial.pods()) == before
    assert len(starts(trial)) == 2, "one run for each life"
