"""A Kubernetes node is drained, shuts down, or stops without notice: the training continues, no restart counts.

One whose kubelet is away for a while costs no restart at all.

The jobs run one after the other, beside those of other modules, on a node that only they use and on another one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json, condition, is_true
from ddpjob.engine.failures import TABLE
from tests.e2e import nodes
from tests.e2e.installation import Installation
from tests.e2e.jobs import sleeping_pod
from tests.e2e.kubectl import until
from tests.e2e.trials import (
    PATIENT,
    WITH_RESTARTS_IN_PLACE,
    Outcome,
    Trial,
    Trials,
    Wait,
    assert_no_step_was_lost,
    assert_recovered,
    assert_resumed_from_the_newest_checkpoint,
)
from tests.kind.cluster import Cluster

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

SOON_DELETED = {
    "key": "node.kubernetes.io/unreachable",
    "operator": "Exists",
    "effect": "NoExecute",
    "tolerationSeconds": 5,
}
"""Lets the control plane delete pods of a lost node after 5 s: the least time counts of all that a pod tolerates."""


def apply(trial: Trial, pods: Json, *arguments: str) -> None:
    """Apply the job with node 0 on the Kubernetes node that leaves, and wait until it has a checkpoint.

    Its ranks may restart in place, which must not delay what follows the loss: node 0 leads these restarts.

    pods: a part of their spec. arguments: additional flags of the trainer.
    """
    places = [nodes.leaving(trial.cluster), trial.cluster.workers[0]]
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [nodes.terms(*places)]}
        }
    }
    tolerations = [{"key": nodes.LEAVING_TAINT, "operator": "Exists"}]
    spec = pods | {"affinity": affinity, "tolerations": [*tolerations, *pods.get("tolerations", ())]}
    trial.kubectl.apply(*(_kept_off(trial.name, rank, places[1 - rank]) for rank in (0, 1)))
    trial.apply(*arguments, template={"spec": spec}, env=WITH_RESTARTS_IN_PLACE)
    trial.until_trained()
    assert [trial.pods()[rank]["spec"]["nodeName"] for rank in (0, 1)] == places


def _kept_off(job: str, node_rank: int, place: str) -> Json:
    """Return a pod whose Kubernetes node takes no pod of this rank in the first attempt: all have one template."""
    pod = sleeping_pod(f"{job}-not-{node_rank}")
    labels = {names.LABEL_JOB_NAME: job, names.LABEL_NODE_RANK: str(node_rank), names.LABEL_ATTEMPT: "1"}
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    pod["spec"] |= {
        "nodeName": place,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}},
    }
    return pod


def drained(trial: Trial) -> Outcome:
    apply(trial, PATIENT)
    node = nodes.leaving(trial.cluster)
    chosen = f"--pod-selector=ddpjob.dev/job-name={trial.name}"
    flags = ("--ignore-daemonsets", "--delete-emptydir-data", chosen, "--timeout=180s")
    try:
        with ThreadPoolExecutor(1) as pool:  # it returns when the pods are gone
            drain = pool.submit(trial.kubectl, "drain", node, *flags, timeout=210)
            done = trial.until_finished()
            drain.result()
    finally:
        trial.kubectl("uncordon", node)
    assert {pod["spec"]["nodeName"] for pod in trial.pods().values()} == {trial.cluster.workers[0]}
    return done


def shut_down(trial: Trial) -> Outcome:
    """Kubelet writes the reason into the pods of its node, and then stops their containers."""
    node = nodes.leaving(trial.cluster)
    if not nodes.has_logind(node):
        pytest.skip(f"kubelet on {node} does not learn of a shutdown: logind does not run there")
    apply(trial, {})
    nodes.announce_shutdown(node)
    try:
        return trial.until_finished()
    finally:
        nodes.cancel_shutdown(trial.cluster, node)


def stopped(trial: Trial) -> Outcome:
    """The peers report a lost connection at once, the control plane notices the node's silence half a minute later.

    If the next attempt runs on the other node, it must not end before that: a finished job keeps its failures. The node
    starts when the job trains again without it.
    """
    apply(trial, {"tolerations": [SOON_DELETED]})
    node = nodes.leaving(trial.cluster)
    nodes.stop(node)
    try:
        trial.until("a lost node, and training without it", trains_after_a_lost_node)
    finally:
        nodes.start(trial.cluster, node)
    return trial.until_finished()


def trains_after_a_lost_node(job: Json) -> bool:
    """Return whether each failure is that of a lost node, and an attempt after them has trained a step."""
    status = job["status"]
    failures, current = status.get("failures", ()), status["currentAttempt"]
    is_later = all(failure["attempt"] < current["number"] for failure in failures)
    return is_later and "firstStepTime" in current and {failure["reason"] for failure in failures} == {"NodeLost"}


def kubelet_stopped(trial: Trial) -> tuple[Json, Outcome]:
    """The kubelet of a node is away for a minute: the control plane marks its pods, and their containers run on."""
    apply(trial, {}, "--step-delay", "1.5")
    with nodes.without_kubelet(trial.cluster, nodes.leaving(trial.cluster)):

        def marked() -> Json | None:
            pod = trial.pods()[0]
            return pod if condition(pod.get("status"), "Ready").get("status") == "False" else None

        pod = until("the pod is marked", marked, seconds=60)
    return pod, trial.until_finished()


TRIALS = Trials.of(1, stopped, soak=(kubelet_stopped, drained, shut_down))


@pytest.mark.soak
def test_drained_node_costs_no_step_and_no_restart(
    outcome: Wait, cluster: Cluster, operator: Installation, undisturbed: Outcome
) -> None:
    done: Outcome = outcome(drained)
    assert (done.status["state"], done.status["attempt"], done.restarts) == ("Succeeded", 2, (1, 0))
    failure = done.failure
    assert (failure["attempt"], failure["reason"], failure["nodeRank"]) == (1, "Drained", 0)
    assert (failure["nodeName"], failure["counted"]) == (nodes.leaving(cluster), False)
    (row,) = (row for row in TABLE if row.reason == "Drained")
    assert (failure["hint"], failure["next"]) == (row.hint, row.next)
    assert_no_step_was_lost(done, undisturbed)
    assert operator.refused_requests() == []


@pytest.mark.soak
def test_node_that_shuts_down_costs_no_step_and_no_restart(
    outcome: Wait, cluster: Cluster, undisturbed: Outcome
) -> None:
    done: Outcome = outcome(shut_down)
    assert (done.status["state"], done.restarts[1]) == ("Succeeded", 0)
    (row,) = (row for row in TABLE if row.reason == "NodeShutdown")
    # A pod of the second attempt may reach the node before the scheduler knows of its state; kubelet refuses it.
    failures = done.status["failures"]
    assert 1 <= len(failures) <= 2
    assert done.restarts[0] == done.status["attempt"] - 1 == len(failures)
    for failure in failures:
        where = nodes.leaving(cluster)
        assert (failure["reason"], failure["nodeName"], failure["counted"]) == ("NodeShutdown", where, False)
        assert (failure["hint"], failure["next"]) == (row.hint, row.next)
    assert failures[0]["nodeRank"] == 0
    assert_no_step_was_lost(done, undisturbed)


def test_stopped_node_is_found_lost_and_the_restart_does_not_count(
    outcome: Wait, cluster: Cluster, undisturbed: Outcome
) -> None:
    done: Outcome = outcome(stopped)
    where = nodes.leaving(cluster)
    assert (done.status["state"], done.restarts[1]) == ("Succeeded", 0)
    # A second attempt may have begun on the stopped node before the control plane noticed.
    failures = done.status["failures"]
    assert {(f["reason"], f["nodeName"], f["counted"]) for f in failures} == {("NodeLost", where, False)}
    assert done.restarts[0] == done.status["attempt"] - 1 == len(failures) <= 2
    (row,) = (row for row in TABLE if row.reason == "NodeLost")
    for failure in failures:
        assert (failure["hint"], failure["next"]) == (row.hint, row.next.format(node=where))
    assert failures[0]["nodeRank"] == 0
    assert_resumed_from_the_newest_checkpoint(done)
    assert_recovered(done, undisturbed)


@pytest.mark.soak
def test_kubelet_that_is_away_costs_no_attempt(outcome: Wait, undisturbed: Outcome) -> None:
    marked: Json
    done: Outcome
    marked, done = outcome(kubelet_stopped)
    assert is_true(marked["status"], "ContainersReady")
    assert (done.status["state"], done.status["attempt"], done.restarts) == ("Succeeded", 1, (0, 0))
    assert done.losses == pytest.approx(undisturbed.losses, abs=1e-6)
