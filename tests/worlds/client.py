"""The operator's client of an API server, opened and closed by a block, and a LIST as one page."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ddpjob.api.names import Resource
from ddpjob_operator.cluster.base import Cluster, Page
from ddpjob_operator.cluster.connection import Connection
from ddpjob_operator.cluster.kubernetes import KubernetesCluster


async def list_all(cluster: Cluster, resource: Resource, *place: str | None, **selectors: Any) -> Page:
    """Return the objects of all pages; forget the earlier pages if the LIST begins again."""
    whole = Page((), "")
    async for page in cluster.pages(resource, *place, **selectors):
        whole = page if page.is_first else Page((*whole.items, *page.items), whole.resource_version)
    return whole


@asynccontextmanager
async def operators_client(kubeconfig: Path, **options: Any) -> AsyncIterator[KubernetesCluster]:
    """Return the operator's client of the API server in a kubeconfig."""
    connection = await Connection.open(str(kubeconfig))
    client = KubernetesCluster(connection, **options)
    try:
        yield client
    finally:
        await client.close()
