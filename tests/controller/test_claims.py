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
    ("label", "size", "events"),
    [
        ("", "2Gi", ["uses the claim mnist-checkpoints, which the operator did not create: 2Gi, ReadWriteMany"]),
        ("mnist", "1Mi", ["uses the claim mnist-checkpoints of an earlier job of this name"]),
        (None, "", []),
    ],
    ids=["fits", "has the label", "its own"],
)
@on_bench
async def test_adopted_claim_is_named_in_an_event(
    bench: Bench, label: str | None, size: str, events: list[str]
) -> None:
    if label is not None:
        claim(bench, label=label, resources={"requests": {"storage": size}})
    await asyncio.sleep(1.1)  # creation times have whole seconds
    await submit(bench)
    assert len(bench.pods(1)) == 2
    found = [event["message"] for event in bench.cluster.store.all(names.EVENTS) if event["reason"] == "ClaimAdopted"]
    assert found == events
