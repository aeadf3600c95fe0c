"""Incidents: bundles of jobs below ``incidents``, and what the operator has to do about them.

To add one: `ddpjob bundle JOB --hide-names -f tests/client/incidents/NAME.zip`, look into it, and assert on the fields
of its replay, which are those of `ddpjob replay NAME.zip -o json`.
"""

from __future__ import annotations

from pathlib import Path

from ddpjob.client.bundle import Replay, replay

FOLDER = Path(__file__).parent / "incidents"


def incident(name: str, *, after: float = 0.0) -> Replay:
    """Return what the operator does about a recorded job, so many seconds after the recording."""
    return replay(FOLDER / f"{name}.zip", after=after)


def test_a_pod_that_was_deleted_restarts_the_group_without_a_cost() -> None:
    made = incident("lost-pod")
    assert made.status is not None and made.status["currentAttempt"]["ending"]["verdict"] == "PodLost"
    assert made.starts_attempt is None, "the other pod may save first"
    assert made.status["restartsCountedTowardsLimit"] == 0
    (failure,) = made.status["failures"]
    assert (failure["nodeRank"], failure["reason"], failure["counted"]) == (0, "PodLost", False)
    assert [one.name for one in made.deletes] == ["job-1-0a1b2-1-1"]
