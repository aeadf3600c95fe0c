"""A status that the CRD of another release refuses: readiness and an event report it, and nothing is done."""

import asyncio

import pytest

from ddpjob.api import names
from ddpjob.api.names import Key
from ddpjob_operator.cluster.base import Invalid
from ddpjob_operator.controller.recorder import refused_fields
from tests.controller.bench import Bench, on_bench

JOB = Key("default", "mnist")

# As a kube-apiserver 1.34 answers: a merge patch with an unknown field, and one with a value outside an enum.
UNKNOWN_FIELD = (
    'DDPJob.ddpjob.dev "" is invalid: patch: Invalid value: "{\\"env\\":\\"unknown field \\\\\\"x\\\\\\"\\"}": '
    'strict decoding error: unknown field "status.currentAttempt", unknown field "status.nodes.lost"'
)
ENUM = 'DDPJob.ddpjob.dev "mnist" is invalid: status.state: Unsupported value: "Ending": supported values: "Pending"'


def unknown_field() -> Invalid:
    return Invalid(UNKNOWN_FIELD, code=422, details={"causes": [{"field": "patch", "message": "…"}]})


def refuse(bench: Bench) -> None:
    """Refuse every status of a job from now on."""
    bench.refuse(unknown_field(), "patch_status")


@on_bench
async def test_refused_status_is_reported_until_it_is_written(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    refuse(bench)
    bench.submit()
    bench.submit("deleted")
    await asyncio.sleep(10)
    assert not bench.pods(1)
    bench.server.delete(names.DDPJOBS, "default", "deleted")
    await asyncio.sleep(1)
    ready, why = bench.controllers[0].writes()
    assert not ready and "1 more" not in why
    for part in ("ddpjobs.ddpjob.dev", "status.currentAttempt, status.nodes.lost", "default/mnist", "crd.yaml"):
        assert part in why
    events = [event for event in bench.cluster.store.all(names.EVENTS) if event["reason"] == "StatusRefused"]
    assert {(event["type"], event["involvedObject"]["name"]) for event in events} == {
        ("Warning", "mnist"),
        ("Warning", "deleted"),
    }
    assert "status.currentAttempt" in events[0]["message"] and "crd.yaml" in events[0]["message"]
    assert "the schema refuses status.currentAttempt" in caplog.text
    assert "env" not in caplog.text, "the object, with the user's variables, is not logged"
    bench.refuse(None)
    await asyncio.sleep(30)
    assert bench.status()["attempt"] == 1 and len(bench.pods(1)) == 2
    assert bench.controllers[0].writes() == (True, "ok")


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (unknown_field(), ["status.currentAttempt", "status.nodes.lost"]),
        (Invalid(ENUM, code=422, details={"causes": [{"field": "status.state"}]}), ["status.state"]),
        (Invalid('strict decoding error: unknown field "status.foo"', code=400), ["status.foo"]),
        (Invalid("Request entity too large: limit is 3145728", code=413), []),
        (
            Invalid(
                "metadata.resourceVersion: …", code=422, details={"causes": [{"field": "metadata.resourceVersion"}]}
            ),
            [],
        ),
    ],
    ids=["unknown fields of a patch", "enum", "unknown field", "too large", "metadata"],
)
def test_refused_fields_come_from_the_answer_of_the_api_server(error: Invalid, fields: list[str]) -> None:
    assert refused_fields(error) == fields
