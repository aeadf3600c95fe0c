"""Every fault that a kind cluster can produce, with real pods: restarts, root cause, advice, and what was lost.

The jobs of this module run at the same time (tests.e2e.trials). docs/reference/failures.md has the table that they are
checked against.
"""

from __future__ import annotations

import pytest

from ddpjob.api.objects import Json, condition
from tests.e2e import nodes
from tests.e2e.installation import Installation
from tests.e2e.namespace import local_volume
from tests.e2e.trials import (
    NOT_IN_PLACE,
    STEPS,
    WITH_RESTARTS_IN_PLACE,
    Act,
    Outcome,
    Trial,
    Trials,
    Wait,
    assert_recovered,
    assert_resumed_from_the_newest_checkpoint,
)
from tests.kind.cluster import Cluster

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

ROOM = "/var/lib/ddpjob-full"
"""A small file system on every worker that stays."""


# What is done to the jobs.


def launcher_killed(trial: Trial) -> Outcome:
    """Kill process 1 of node 0's container: rank 0, its launcher and its report are gone at once.

    No launcher leads restarts in place then.
    """
    trial.apply(env=WITH_RESTARTS_IN_PLACE)
    trial.until_trained()
    nodes.kill_first_process(trial.pods()[0])
    return trial.until_finished()


def rank_killed(trial: Trial) -> Outcome:
    trial.apply()
    trial.until_trained()
    trial.kill_rank(1)
    return trial.until_finished()


def rank_out_of_memory(trial: Trial) -> Outcome:
    resources = {"requests": {"memory": "256Mi"}, "limits": {"memory": "1Gi"}}
    trial.apply("--chaos", "oom:1:25", resources=resources)
    done = trial.until_finished()
    assert "chaos: oom" in trial.kubectl("logs", done.failure["pod"]), "the log of the failed pod is kept"
    return done


def rank_stopped(trial: Trial) -> Outcome:
    """Stop a rank with SIGSTOP, so that only the launcher of its node can report it."""
    trial.apply("--chaos", "stop:1:25", "--hang-timeout", "20")
    return trial.until_finished()


def volume_full(trial: Trial) -> Outcome:
    """Give the checkpoints a real file system that is too small for one."""
    for node in nodes.staying(trial.cluster):
        nodes.run_on(node, f"mkdir -p {ROOM} && mount -t tmpfs -o size=600k,mode=0777 ddpjob-full {ROOM}")
    kind = f"{trial.kubectl.namespace}-full"
    try:
        trial.kubectl.apply(*local_volume(kind, "full", ROOM, "1Mi"))
        trial.apply("--step-delay", "0", numNodes=1, checkpoint={"claimName": "full"}, restartPolicy={"maxRestarts": 0})
        return trial.until_finished()
    finally:
        trial.kubectl("delete", "persistentvolume", kind, "--ignore-not-found", "--wait=false")
        for node in nodes.staying(trial.cluster):
            nodes.run_on(node, f"umount --lazy {ROOM}")


def refused_by_kubelet(trial: Trial) -> Outcome:
    """Let pods that are too large for their Kubernetes node reach its kubelet without the scheduler, twice."""
    trial.apply(
        numNodes=1,
        resources={"requests": {"cpu": "4000"}},
        restartPolicy={"maxTotalRestarts": 1},
        template={"spec": {"nodeName": trial.cluster.workers[0]}},
    )
    return trial.until_finished()


def hook_broken(trial: Trial) -> Outcome:
    """After the training has begun, no container of the job starts on a node that the scheduler prefers."""
    node = trial.cluster.workers[0]
    preferred = [{"weight": 100, "preference": nodes.terms(node)}]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    env = [*WITH_RESTARTS_IN_PLACE, *NOT_IN_PLACE, *nodes.BROKEN_HOOK]
    trial.apply(template={"spec": {"affinity": affinity}}, env=env)
    trial.until_trained()
    assert node in {pod["spec"]["nodeName"] for pod in trial.pods().values()}
    with nodes.broken_hook(node):
        trial.kill_rank(1)
        return trial.until_finished()


# Those that mostly wait come first, then those that take longest.
TRIALS = Trials.of(
    7,
    hook_broken,
    rank_killed,
    soak=(
        rank_stopped,
        launcher_killed,
        rank_out_of_memory,
        volume_full,
        refused_by_kubelet,
    ),
)


# What the jobs show.


def test_undisturbed_job_has_no_restart_and_learns(undisturbed: Outcome) -> None:
    done = undisturbed
    assert (done.status["state"], done.status["attempt"], done.restarts) == ("Succeeded", 1, (0, 0))
    assert "failures" not in done.status or done.status["failures"] == []
    assert float(done.status["progress"]["accuracy"]) > 0.9
    assert len(done.losses) == STEPS


@pytest.mark.parametrize(
    ("act", "found"),
    [
        pytest.param(
            *(launcher_killed, {"reason": "SIGKILL", "nodeRank": 0, "signal": 9, "exitCode": 137}),
            marks=pytest.mark.soak,
        ),
        (rank_killed, {"reason": "Killed", "nodeRank": 1, "signal": 9, "rank": 1}),
        pytest.param(
            rank_stopped, {"reason": "Hang", "nodeRank": 1, "exitCode": 76, "rank": 1}, marks=pytest.mark.soak
        ),
        pytest.param(
            rank_out_of_memory, {"reason": "OOMKilled", "nodeRank": 1, "exitCode": 137}, marks=pytest.mark.soak
        ),
    ],
)
def test_fault_in_the_training_is_blamed_counted_and_costs_steps_since_the_checkpoint(
    outcome: Wait, undisturbed: Outcome, act: Act, found: Json
) -> None:
    done: Outcome = outcome(act)
    assert (done.status["state"], done.status["attempt"], done.restarts) == ("Succeeded", 2, (1, 1))
    failure = done.failure
    assert (failure["attempt"], failure["action"], failure["counted"]) == (1, "Restart", True)
    assert {key: failure.get(key) for key in found} == found
    assert failure["hint"]
    assert failure["next"]
    assert failure["nodeName"]
    assert_resumed_from_the_newest_checkpoint(done)
    assert_recovered(done, undisturbed)


def test_node_on_which_no_container_starts_costs_no_job(outcome: Wait, cluster: Cluster, undisturbed: Outcome) -> None:
    done: Outcome = outcome(hook_broken)
    assert done.status["state"] == "Succeeded", done.status
    where = {(f["reason"], f["nodeName"]) for f in done.status["failures"][1:]}
    assert where == {("StartError", cluster.workers[0])}
    assert "hook" in done.status["failures"][1]["message"]
    assert_recovered(done, undisturbed)


@pytest.mark.soak
def test_full_volume_fails_the_last_save_with_its_reason(outcome: Wait) -> None:
    done: Outcome = outcome(volume_full)
    assert (done.status["state"], done.status["attempt"], done.restarts) == ("Failed", 1, (0, 0))
    failure = done.failure
    assert (failure["reason"], failure["nodeRank"], failure["exitCode"]) == ("VolumeUnwritable", 0, 73)
    assert failure["hint"]
    assert failure["next"]
    assert condition(done.job.get("status"), "Failed")["reason"] == "VolumeUnwritable"


@pytest.mark.soak
def test_pod_that_the_kubelet_refuses_restarts_without_counting_and_suspects_the_node(outcome: Wait) -> None:
    done: Outcome = outcome(refused_by_kubelet)
    assert (done.status["state"], done.status["attempt"], done.restarts) == ("Failed", 2, (1, 0))
    assert condition(done.job.get("status"), "Failed")["reason"] == "MaxTotalRestartsExceeded"
    for failure in done.status["failures"]:
        assert (failure["reason"], failure["nodeRank"], failure["counted"]) == ("OutOfcpu", 0, False)
        assert failure["nodeSuspected"]


def test_operator_needed_no_right_that_it_lacks(operator: Installation, trials_ended: None) -> None:
    assert operator.refused_requests() == []
