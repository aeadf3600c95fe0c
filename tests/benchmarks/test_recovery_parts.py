"""The parts of a recovery add up to its duration, whatever the order in which the watch events arrive."""

from __future__ import annotations

from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.benchmarks.recovery_parts import Recovery, Seen, recovery

KILLED = 100.0
RUNS = {"status": {"containerStatuses": [{"state": {"running": {}}}]}}
ENDED = {"status": {"containerStatuses": [{"state": {"terminated": {}}}]}}


def pod(time: float, attempt: int, node_rank: int, node: str = "", **more: Any) -> Seen:
    labels = {names.LABEL_ATTEMPT: str(attempt), names.LABEL_NODE_RANK: str(node_rank)}
    obj: Json = {"metadata": {"name": f"{attempt}-{node_rank}", "labels": labels}, "spec": {"nodeName": node}, **more}
    return Seen(time, obj)


def job(time: float, attempt: int) -> Seen:
    return Seen(time, {"metadata": {"name": "job"}, "status": {"attempt": attempt}})


def measured(*ends: Seen) -> Recovery:
    """Return the parts of a recovery whose second attempt takes the same time after each of these ends."""
    later = [
        job(103.0, 2),
        *(pod(103.0 + n, 2, n) for n in (0, 1)),
        *(pod(104.5 + n, 2, n, "worker") for n in (0, 1)),
        *(pod(106.0 + n, 2, n, "worker", **RUNS) for n in (0, 1)),
    ]
    return recovery([pod(90.0, 1, 1, **RUNS), job(95.0, 1), *ends, *later], KILLED, claimed=110.0, stepped=112.0)


def test_parts_add_up_to_the_time_from_the_kill_to_the_step() -> None:
    found = measured(pod(101.0, 1, 1, **ENDED), pod(101.5, 1, 0, **ENDED))
    assert list(found.parts.values()) == [1.0, 0.0, 2.0, 1.0, 1.5, 1.5, 3.0, 2.0]
    assert found.total == 12.0
    assert (found.operator, found.deletion) == (3.0, 0.0)


def test_wait_for_the_cause_is_not_the_operators_share() -> None:
    found = measured(pod(101.0, 1, 0, **ENDED), pod(102.5, 1, 1, **ENDED))
    assert (found.parts["detection"], found.parts["settling"], found.parts["ending"]) == (1.0, 1.5, 0.5)
    assert found.operator == 1.5


def test_peer_that_ends_after_the_verdict_counts_as_deletion() -> None:
    found = measured(pod(101.0, 1, 1, **ENDED), pod(103.25, 1, 0, **ENDED))
    assert found.deletion == 0.25


def test_missing_pod_of_the_second_attempt_is_an_error() -> None:
    with pytest.raises(AssertionError, match="2-0"):
        recovery([pod(101.0, 1, 1, **ENDED), job(102.0, 2), pod(103.0, 2, 0)], KILLED, claimed=110.0, stepped=112.0)
