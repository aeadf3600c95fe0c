"""Termination messages of pods in the status: valid for the schema, with their end and the name of the pod."""

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpjob.api import names
from ddpjob.api.text import shorten
from ddpjob.engine.actions import Problem
from tests.builders import DELETING, NOW, World, a_job, a_running_world, a_started_world, ended

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
TEXTS = ("message", "exception", "kind", "hint", "next", "where", "cause")
FIELDS = [*TEXTS, "signal", "rank", "step", "code", "progress", "checkpoint", "root"]


@given(st.dictionaries(st.sampled_from(FIELDS), junk), st.sampled_from([0, 1, 77, 137, 255]))
def test_any_report_gives_a_valid_status(report: dict[str, Any], code: int) -> None:
    world = a_running_world(a_job(numNodes=1))
    world.show(0, ended(code, message=json.dumps(report)))
    json.dumps(world.status, ensure_ascii=False).encode()


def failure_of(report: dict[str, Any], code: int = 1) -> World:
    world = a_running_world(a_job(numNodes=1))
    world.show(0, ended(code, message=json.dumps(report)))
    return world


SCHEMA_2 = {
    "schema": 2,
    "kind": "ConfigMismatch",
    "exception": "ConfigError",
    "message": "lr is 0.1, the checkpoint has 0.2",
    "hint": "the flags changed between two attempts",
    "next": "restore lr, or start with another checkpoint directory",
}


def test_schema_2_report_gives_the_failure_its_kind_hint_and_next() -> None:
    world = failure_of(SCHEMA_2, 78)
    failure = world.status["failures"][0]
    assert failure["reason"] == "ConfigMismatch"
    assert failure["hint"] == SCHEMA_2["hint"] and failure["next"] == SCHEMA_2["next"]
    assert failure["message"].endswith("ConfigError: lr is 0.1, the checkpoint has 0.2")
    message = world.condition("Restarting")["message"]
    assert message.endswith(
        "the checkpoint has 0.2; next: the program says: restore lr, or start with another checkpoint directory"
    )


def test_schema_1_report_names_the_failure_after_its_exception() -> None:
    failure = failure_of({"schema": 1, "exception": "torch.cuda.CudaError", "message": "invalid device"})
    assert failure.status["failures"][0]["reason"] == "TorchCudaCudaError"
    assert failure.status["failures"][0]["next"] == "kubectl logs mnist-0a1b2-1-0 -n default", "that of the table"


@pytest.mark.parametrize("wrong", [None, 5, True, "", "  ", [], {}, ["text"], {"text": "text"}])
def test_kind_hint_and_next_that_are_not_text_are_ignored(wrong: object) -> None:
    world = failure_of(SCHEMA_2 | {"kind": wrong, "hint": wrong, "next": wrong})
    failure = world.status["failures"][0]
    assert failure["reason"] == "ConfigError"
    assert failure["hint"] == "the program ended with an error", "that of the table"


def test_kind_hint_and_next_that_are_too_long_are_shortened() -> None:
    long = {"hint": "h" * 3000 + "end", "next": "n" * 3000 + "end", "where": "w" * 3000 + ".py:7"}
    world = failure_of(SCHEMA_2 | {"kind": "K" * 3000} | long)
    failure = world.status["failures"][0]
    assert len(failure["where"]) == 1024 and failure["where"].endswith("w.py:7")
    assert failure["reason"] == "K" * 128
    assert len(failure["hint"]) == len(failure["next"]) == 1024
    assert failure["hint"].endswith("end") and failure["next"].endswith("end")


def test_truncated_report_is_quoted_as_text() -> None:
    world = a_running_world(a_job(numNodes=1))
    world.show(0, ended(78, message=json.dumps(SCHEMA_2)[:-20]))
    failure = world.status["failures"][0]
    assert failure["reason"] == "Error"
    assert "ended with exit code 78" in failure["message"] and "ConfigMismatch" in failure["message"]
    assert failure["logTail"] == json.dumps(SCHEMA_2)[:-20]


@pytest.mark.parametrize(
    "message", ['{"a":' + "[" * 2000, '{"message": "caf\\ud83d", "exception": "\\ud83d"}', "\udce9"]
)
def test_malformed_message_does_not_block_its_job(message: str) -> None:
    world = a_running_world(a_job(numNodes=1))
    world.show(0, ended(1, message=message))
    assert world.status["attempt"] == 2
    json.dumps(world.status, ensure_ascii=False).encode()


def test_long_log_keeps_its_end_and_the_name_of_its_pod() -> None:
    world = a_running_world(a_job(restartPolicy={"maxRestarts": 0}))
    world.show(1, ended(1, message="x" * 3000 + "\nValueError: the cause"))
    world.forward(4)
    made = world.reconcile()
    message = world.status["failures"][0]["message"]
    assert "node_rank 1 (mnist-0a1b2-1-1)" in message and message.endswith("ValueError: the cause")
    assert "ValueError: the cause" in made.events[0].message
    assert world.status["failures"][0]["logTail"].endswith("x\nValueError: the cause")
    assert len(world.status["failures"][0]["logTail"]) == 2048


def test_repeatedly_failing_pull_causes_one_event() -> None:
    world = a_started_world(a_job())
    reasons = []
    for reason in ("ErrImagePull", "ImagePullBackOff") * 3:
        state = {"waiting": {"reason": reason, "message": "not found"}}
        world.pod(0)["status"] = {"phase": "Pending", "containerStatuses": [{"name": "trainer", "state": state}]}
        reasons += [note.reason for note in world.reconcile().events]
    assert reasons == ["ImagePullBackOff"]


@pytest.mark.parametrize("late", [-660, -300, -1, 0, 5])
def test_exit_0_within_clock_skew_of_a_deletion_is_no_success(late: int) -> None:
    """The clock of the Kubernetes node may be minutes slow."""
    world = a_running_world(a_job(numNodes=1))
    pod = world.set_pod(0, ended(0, at=NOW + timedelta(seconds=late)))
    pod["metadata"] |= DELETING
    world.settle()
    assert (world.status["state"] == "Succeeded") == (late < -600)


def test_success_that_was_seen_before_the_deletion_stays_one() -> None:
    world = a_running_world(a_job())
    pod = world.set_pod(0, ended(0))
    world.settle()
    pod["metadata"] |= DELETING
    world.show(1, ended(0))
    assert world.status["state"] == "Succeeded"


@given(st.text(), st.integers(20, 50))
def test_shortened_text_fits_and_keeps_both_ends(text: str, limit: int) -> None:
    short = shorten(text, limit)
    assert len(short) <= limit
    assert short[:3] == text[:3] and short[-3:] == text[-3:]


@pytest.mark.parametrize(("code", "after"), [(0, "False"), (139, "True")])
def test_refused_end_of_a_pod_of_a_finished_job_is_shown_until_it_succeeds(code: int, after: str) -> None:
    world = a_running_world(a_job(successPolicy="NodeZero", restartPolicy={"maxRestarts": 0}))
    world.set_pod(0, ended(code))
    world.reconcile(crash_after=1)
    if code:
        world.forward(200)
        world.reconcile(crash_after=1)
    finished = world.status["state"]
    assert finished in ("Succeeded", "Failed")
    message = "Pod mnist-0a1b2-1-1 cannot be deleted: forbidden"
    world.problems = (Problem("DeleteRefused", names.PODS, "mnist-0a1b2-1-1", message),)
    made = world.reconcile(crash_after=1)
    assert [(note.type, note.reason, note.message) for note in made.events] == [("Warning", "DeleteRefused", message)]
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"], stalled["message"]) == ("True", "DeleteRefused", message)
    assert made.deletes and not world.reconcile(crash_after=1).events
    world.problems = ()
    world.settle()
    assert world.condition("Stalled")["status"] == after and world.status["state"] == finished
    assert "mnist-0a1b2-1-1" not in world.pods
