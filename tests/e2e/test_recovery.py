"""The operator is killed, or a job is deleted and applied again: the training goes on."""

from __future__ import annotations

import time

import pytest

from ddpjob.api.objects import Json
from ddprun.reporting.metrics import read_rows
from tests.e2e.installation import Installation
from tests.e2e.kubectl import until
from tests.e2e.namespace import CLAIM
from tests.e2e.trials import (
    CHECKPOINT_EVERY,
    WITH_RESTARTS_IN_PLACE,
    Outcome,
    Trial,
    assert_recovered,
    small_job,
)

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

QUIET_SECONDS = 5.0


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


def is_quiet(operator: Installation) -> bool:
    """Whether nothing happens for a while. Before, events of jobs of other tests may still be sent."""
    before = operator.activity()
    time.sleep(QUIET_SECONDS)
    return operator.activity() == before


@pytest.mark.soak
def test_deleted_job_leaves_only_its_claim_and_the_next_job_resumes(
    trial: Trial, operator: Installation, undisturbed: Outcome
) -> None:
    trial.apply()
    trial.until_trained()

    trial.kubectl("delete", "ddp", trial.name, "--timeout=60s", timeout=90)
    until("no pod and no service is left", lambda: not trial.kubectl.objects("pods,services"), seconds=60)
    assert trial.kubectl.object("persistentvolumeclaim", CLAIM)["status"]["phase"] == "Bound"
    until("nothing happens any more", lambda: is_quiet(operator), seconds=60)

    trial.kubectl.apply(small_job(trial.name, "--step-delay", "0"))
    done = trial.until_finished()
    assert done.status["state"] == "Succeeded"
    resumed = done.status["checkpoint"]["resumedFromStep"]
    assert resumed >= CHECKPOINT_EVERY
    events = trial.namespace.events(trial.name)
    said = [event["message"] for event in events if event["reason"] == "ResumedFromCheckpoint"]
    assert any(f"after step {resumed}" in message for message in said), said
    assert_recovered(done, undisturbed)
