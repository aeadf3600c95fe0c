"""Faults of a training with real pods: restarts, root cause, advice, and what was lost.

The jobs of this module run at the same time (tests.e2e.trials). docs/reference/failures.md has the table that they are
checked against.
"""

from __future__ import annotations

import pytest

from ddpjob.api.objects import Json
from tests.e2e import nodes
from tests.e2e.installation import Installation
from tests.e2e.trials import (
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

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

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


# Those that mostly wait come first, then those that take longest.
TRIALS = Trials.of(
    5,
    rank_killed,
    soak=(rank_stopped, launcher_killed, rank_out_of_memory),
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


def test_operator_needed_no_right_that_it_lacks(operator: Installation, trials_ended: None) -> None:
    assert operator.refused_requests() == []
