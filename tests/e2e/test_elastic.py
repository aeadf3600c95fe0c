"""A node of a job with minNodes is lost: the job goes on with two nodes, and with three when the node is back."""

from __future__ import annotations

import pytest

from ddpjob.api.objects import Json
from ddptrain.training.checkpointer import digest_of_weights
from tests.ddptrain.runs import final_weights
from tests.e2e import nodes
from tests.e2e.jobs import strictly_apart
from tests.e2e.trials import Trial, small_job

pytestmark = [pytest.mark.kind, pytest.mark.soak, pytest.mark.timeout(3000, func_only=True)]

BITWISE = ("--sync", "bitwise", "--checkpoint-every", "5")
# 90 steps last longer than the ten minutes after which a job looks for room.
SLOW = ("--step-delay", "10")
OTHER = "undisturbed"


def world_of(job: Json, attempt: int) -> int | None:
    """Return the number of nodes of an attempt whose pods all run; None if it is not that attempt's turn."""
    status = job.get("status", {})
    current = status.get("currentAttempt", {})
    runs = current.get("number", 0) >= attempt and "allRunningTime" in current and current["phase"] == "Running"
    return int(status["world"]["numNodes"]) if runs else None


def test_job_loses_a_node_goes_on_with_two_and_grows_again(trial: Trial) -> None:
    tolerations = [{"key": nodes.LEAVING_TAINT, "operator": "Exists"}]
    trial.apply(
        *BITWISE, *SLOW, numNodes=3, minNodes=2, scheduling={"partialGangSeconds": 30},
        template={"spec": {"affinity": strictly_apart(trial.name), "tolerations": tolerations}},
    )  # fmt: skip
    assert trial.until("three nodes", lambda job: world_of(job, 1)) == 3
    trial.until("a checkpoint", lambda job: job["status"].get("checkpoint", {}).get("step", 0) >= 5)
    leaving = nodes.leaving(trial.cluster)
    nodes.stop(leaving)
    try:
        smaller = trial.until("two nodes", lambda job: job if world_of(job, 2) == 2 else None, 600)
    finally:
        nodes.start(trial.cluster, leaving)
    running = next(one for one in smaller["status"]["conditions"] if one["type"] == "Running")
    assert running["reason"] == "RunningSmaller"
    number = smaller["status"]["attempt"]
    larger = trial.until("three nodes again", lambda job: job if world_of(job, number + 1) else None, 1500)
    assert world_of(larger, number + 1) == 3
    done = trial.until_finished(900)
    assert (done.status["state"], done.status["attempt"], done.restarts[1]) == ("Succeeded", number + 1, 0)
    assert {failure["reason"] for failure in done.status["failures"]} == {"NodeLost"}

    other = trial.folder.with_name(OTHER)
    other.mkdir()
    other.chmod(0o777)
    trial.kubectl.apply(small_job(OTHER, *BITWISE, "--step-delay", "0"))
    trial.namespace.until_finished(OTHER)
    assert digest_of_weights(final_weights(trial.folder)) == digest_of_weights(final_weights(other))
