"""A Kubernetes node is drained, shuts down, or stops without notice: the training continues, no restart counts."""

from __future__ import annotations

import pytest

from ddpjob.engine.failures import TABLE
from tests.e2e import nodes
from tests.e2e.installation import Installation
from tests.e2e.trials import (
    CHECKPOINT_EVERY,
    Outcome,
    Trial,
    assert_no_step_was_lost,
    assert_recovered,
)

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600, func_only=True)]


def test_drained_node_costs_no_step_and_no_restart(trial: Trial, operator: Installation, undisturbed: Outcome) -> None:
    trial.apply()
    trial.until_trained()
    drained = trial.pods()[1]["spec"]["nodeName"]
    chosen = f"--pod-selector=ddpjob.dev/job-name={trial.name}"
    try:
        trial.kubectl(
            "drain", drained, "--ignore-daemonsets", "--delete-emptydir-data", chosen, "--timeout=60s", timeout=90
        )
        done = trial.until_finished()
    finally:
        trial.kubectl("uncordon", drained)
    assert (done.status["state"], done.status["attempt"], done.restarts) == ("Succeeded", 2, (1, 0))
    failure = done.failure
    assert (failure["attempt"], failure["reason"], failure["nodeRank"]) == (1, "Drained", 1)
    assert (failure["nodeName"], failure["counted"]) == (drained, False)
    (row,) = (row for row in TABLE if row.reason == "Drained")
    assert (failure["hint"], failure["next"]) == (row.hint, row.next)
    assert_no_step_was_lost(done, undisturbed)
    assert {pod["spec"]["nodeName"] for pod in trial.pods().values()} == set(trial.cluster.workers) - {drained}
    assert operator.refused_requests() == []


def test_node_that_shuts_down_costs_no_step_and_no_restart(
    trial: Trial, operator: Installation, undisturbed: Outcome
) -> None:
    """Kubelet writes the reason into the pods of its node, and then stops their containers."""
    (leaving,) = set(trial.cluster.workers) - {operator.pods()[0]["spec"]["nodeName"]}
    if not nodes.has_logind(leaving):
        pytest.skip(f"kubelet on {leaving} does not learn of a shutdown: logind does not run there")
    nodes.move_dns_away(trial.kubectl, leaving)
    trial.apply()
    trial.until_trained()
    assert {pod["spec"]["nodeName"] for pod in trial.pods().values()} == set(trial.cluster.workers)
    nodes.announce_shutdown(leaving)
    try:
        done = trial.until_finished()
    finally:
        nodes.cancel_shutdown(trial.cluster, leaving)
    assert (done.status["state"], done.restarts[1]) == ("Succeeded", 0)
    (row,) = (row for row in TABLE if row.reason == "NodeShutdown")
    # A pod of the second attempt may reach the node before the scheduler knows of its state; kubelet refuses it.
    failures = done.status["failures"]
    assert 1 <= len(failures) <= 2
    assert done.restarts[0] == done.status["attempt"] - 1 == len(failures)
    for failure in failures:
        assert (failure["reason"], failure["nodeName"], failure["counted"]) == ("NodeShutdown", leaving, False)
        assert (failure["hint"], failure["next"]) == (row.hint, row.next)
    assert_no_step_was_lost(done, undisturbed)


def test_stopped_node_is_found_lost_and_the_restart_does_not_count(
    trial: Trial, operator: Installation, undisturbed: Outcome
) -> None:
    """The peers report a lost connection at once, the control plane notices the node's silence a minute later."""
    (stopped,) = set(trial.cluster.workers) - {operator.pods()[0]["spec"]["nodeName"]}
    nodes.move_dns_away(trial.kubectl, stopped)
    trial.apply()
    trial.until_trained()
    assert {pod["spec"]["nodeName"] for pod in trial.pods().values()} == set(trial.cluster.workers)
    nodes.stop(stopped)
    try:
        trial.until("NodeLost", lambda job: [f for f in job["status"].get("failures", ()) if f["reason"] == "NodeLost"])
        done = trial.until_finished()
    finally:
        nodes.start(trial.cluster, stopped)
    assert_lost(done, stopped)
    assert_recovered(done, undisturbed)


def assert_lost(done: Outcome, stopped: str) -> None:
    assert (done.status["state"], done.restarts[1]) == ("Succeeded", 0)
    # A second attempt may have begun on the stopped node before the control plane noticed.
    failures = done.status["failures"]
    assert {(f["reason"], f["nodeName"], f["counted"]) for f in failures} == {("NodeLost", stopped, False)}
    assert done.restarts[0] == done.status["attempt"] - 1 == len(failures) <= 2
    (row,) = (row for row in TABLE if row.reason == "NodeLost")
    for failure in failures:
        assert (failure["hint"], failure["next"]) == (row.hint, row.next.format(node=stopped))
    resumed = done.status["checkpoint"]["resumedFromStep"]
    last = done.steps_of_run(1)[-1]
    # The node may stop while rank 0 saves the checkpoint of its last step.
    assert resumed in {step // CHECKPOINT_EVERY * CHECKPOINT_EVERY for step in (last - 1, last)}
