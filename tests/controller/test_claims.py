"""An existing claim with the name of the job's own is adopted with an event."""

import asyncio
from typing import Any

import pytest

from ddpjob.api import names
from tests.api.specs import CLAIM
from tests.controller.bench import Bench, on_bench

CLAIM_NAME = "mnist-checkpoints"


def claim(bench: Bench, *, label: str = "", **spec: Any) -> None:
    meta = {"name": CLAIM_NAME, "labels": {names.LABEL_JOB_NAME: label} if label else {}}
    body = {"apiVersion": "v1", "kind": names.CLAIMS.kind, "metadata": meta, "spec": CLAIM["spec"] | spec}
    bench.server.create(names.CLAIMS, "default", body)


async def submit(bench: Bench) -> None:
    bench.submit(checkpoint={"claimTemplate": CLAIM})
    await asyncio.sleep(1)


@pytest.mark.parametrize(
    ("label", "events"),
    [("mnist", ["uses the claim mnist-checkpoints of an earlier job of this name"]), (None, [])],
    ids=["has the label", "its own"],
)
@on_bench
async def test_adopted_claim_is_named_in_an_event(bench: Bench, label: str | None, events: list[str]) -> None:
    if label is not None:
        claim(bench, label=label, resources={"requests": {"storage": "1Mi"}})
    await asyncio.sleep(1.1)  # creation times have whole seconds
    await submit(bench)
    assert len(bench.pods(1)) == 2
    found = [event["message"] for event in bench.cluster.store.all(names.EVENTS) if event["reason"] == "ClaimAdopted"]
    assert found == events


@pytest.mark.parametrize("label", ["", "other"])
@on_bench
async def test_claim_that_no_job_of_this_name_created_is_a_conflict(bench: Bench, label: str) -> None:
    claim(bench, label=label)
    await submit(bench)
    assert bench.pods(1) == []
    [stalled] = [each for each in bench.status()["conditions"] if each["type"] == "Stalled"]
    assert stalled["reason"] == "NameConflict" and "name it in checkpoint.claimName" in stalled["message"]
