"""Large jobs are read without the values of their specs, whatever a tenant writes into them."""

import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.api.spec import MAX_BYTES
from ddpjob_operator.cluster import job_json
from ddpjob_operator.cluster.job_json import LARGE_BYTES, read_job, read_list
from tests.worlds.loopback import serving

FORGED = {"metadata": {"name": "forged", "namespace": "other", "uid": "0"}, "status": {"state": "Forged"}, "spec": {}}


def a_job(junk: Any, **more: Any) -> Json:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.DDPJOBS.kind,
        "metadata": {"name": "mnist", "namespace": "team", "uid": "u1", "resourceVersion": "7", "generation": 2},
        "spec": {"image": "i", "template": {"spec": {"x": junk}}},
        "status": {"state": "Running", "conditions": [{"type": "Running", "status": "True"}]},
    } | more


def encoded(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


HUGE = a_job([{}] * 450_000)
MEDIUM = a_job([FORGED] * 1_000)


def test_spec_above_the_limit_is_left_out_and_its_size_kept() -> None:
    size = len(encoded(HUGE["spec"]))
    assert size > 5 * MAX_BYTES
    assert read_job(encoded(HUGE)) == HUGE | {"spec": size}


def test_spec_below_the_limit_stays_text_and_cannot_forge_another_field() -> None:
    body = encoded(MEDIUM)
    assert LARGE_BYTES < len(body) < MAX_BYTES
    found = read_job(body)
    assert found is not None and found | {"spec": {}} == MEDIUM | {"spec": {}}
    assert json.loads(found["spec"]) == MEDIUM["spec"]


def test_list_has_exactly_the_jobs_of_the_server_with_the_metadata_that_is_used() -> None:
    meta = HUGE["metadata"] | {"annotations": {"a": "x" * 200_000}, "managedFields": [{"f:spec": {}}]}
    meta |= {"labels": {"a": "x" * 63, names.LABEL_QUEUE: "research"}}
    page = {"items": [HUGE | {"metadata": meta}, MEDIUM], "metadata": {"resourceVersion": "9", "continue": "token"}}
    found = read_list(encoded(page))
    assert found is not None and found["metadata"] == page["metadata"]
    queued = HUGE["metadata"] | {"labels": {names.LABEL_QUEUE: "research"}}
    assert [job["metadata"] for job in found["items"]] == [queued, MEDIUM["metadata"]]
    assert [type(job["spec"]) for job in found["items"]] == [int, str]


@pytest.mark.parametrize("body", [encoded(a_job([])), b"[" * LARGE_BYTES * 2, encoded(["x"] * LARGE_BYTES)])
def test_small_responses_and_what_is_no_job_are_left_to_the_caller(body: bytes) -> None:
    assert read_job(body) is None and read_list(body) is None


def test_reading_the_largest_job_takes_little_memory() -> None:
    body = encoded(HUGE)
    tracemalloc.start()
    try:
        read_job(body)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()


JOBS = {"ADDED": HUGE, "MODIFIED": a_job([]), "DELETED": MEDIUM}
EVENTS = [{"type": kind, "object": job} for kind, job in JOBS.items()]


@pytest.fixture(params=[700, 65_536, 10_000_000], ids=lambda size: f"chunks of {size}")
async def session(request: pytest.FixtureRequest) -> AsyncIterator[aiohttp.ClientSession]:
    """Return a session with the middleware; its server sends events in chunks, or a list."""

    async def answer(asked: web.BaseRequest) -> web.StreamResponse:
        if asked.path == "/list":
            return web.Response(body=encoded({"metadata": {}, "items": [HUGE]}))
        response = web.StreamResponse()
        await response.prepare(asked)
        text = b"".join(encoded(event) + b"\n" for event in EVENTS)
        for start in range(0, len(text), request.param):
            await response.write(text[start : start + request.param])
        return response

    async with serving(answer) as url, aiohttp.ClientSession(url, middlewares=(job_json.middleware,)) as session:
        yield session


async def test_reader_of_a_session_gets_each_event_once_and_without_large_specs(session: aiohttp.ClientSession) -> None:
    async with session.get("/watch") as response:
        text = b"".join([chunk async for chunk in response.content.iter_chunked(2**20)])
    events = [json.loads(line) for line in text.splitlines()]
    assert [event["type"] for event in events] == ["ADDED", "MODIFIED", "DELETED"]
    assert [type(event["object"]["spec"]) for event in events] == [int, dict, str]


async def test_reader_of_a_session_gets_lists_without_large_specs(session: aiohttp.ClientSession) -> None:
    async with session.get("/list") as response:
        (job,) = (await response.json(content_type=None))["items"]
    assert isinstance(job["spec"], int) and job["status"] == HUGE["status"]
