"""The pages of a LIST are bounded: in the number of jobs, and in bytes."""

import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ddpjob.api import names
from ddpjob_operator.cluster import kubernetes
from ddpjob_operator.cluster.kubernetes import JOBS_PAGE_SIZE, MAX_PAGE_BYTES, KubernetesCluster, decode
from tests.worlds.client import operators_client
from tests.worlds.memory import MemoryCluster
from tests.worlds.memory.http import MemoryHttp

CLAIM = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
NUMBER = 40


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[KubernetesCluster]:
    """Return a client of a server with 40 jobs and 40 claims of 1 KB."""
    memory = MemoryCluster()
    job = {"apiVersion": names.API_VERSION, "kind": "DDPJob", "spec": {"image": "i"}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": CLAIM}
    for number in range(NUMBER):
        meta = {"name": f"item-{number}", "annotations": {"a": "x" * 1000}}
        memory.server.create(names.DDPJOBS, "default", job | {"metadata": meta})
        memory.server.create(names.CLAIMS, "default", claim | {"metadata": meta})
    async with MemoryHttp(memory) as http, operators_client(http.kubeconfig(tmp_path)) as client:
        yield client


async def sizes(client: KubernetesCluster, resource: names.Resource) -> list[int]:
    return [len(page.items) async for page in client.pages(resource, "default")]


async def test_page_has_few_jobs(client: KubernetesCluster) -> None:
    assert await sizes(client, names.DDPJOBS) == [JOBS_PAGE_SIZE, JOBS_PAGE_SIZE, NUMBER - 2 * JOBS_PAGE_SIZE]


async def test_page_of_too_many_bytes_is_read_again_in_smaller_pages(
    client: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await sizes(client, names.CLAIMS) == [NUMBER]
    monkeypatch.setattr(kubernetes, "MAX_PAGE_BYTES", 20_000)
    found = await sizes(client, names.CLAIMS)
    assert sum(found) == NUMBER and max(found) < 20


def test_largest_page_of_decoded_objects_fits_into_the_operators_memory() -> None:
    """A tenant may fill a page with pods of 1.4 MB of small values; jobs are read without the values of their specs."""
    pod = b'{"spec":{"tolerations":[' + b",".join([b'{"operator":"Exists"}'] * 60_000) + b"]}}"
    page = b'{"items":[' + b",".join([pod] * (MAX_PAGE_BYTES // len(pod))) + b"]}"
    tracemalloc.start()
    try:
        decoded = decode(page)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decoded["items"] and size < 128 * 2**20
