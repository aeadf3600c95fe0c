"""A LIST as one page, for tests."""

from ddpjob.api.names import Resource
from ddpjob_operator.cluster.base import Cluster, Page


async def list_all(
    cluster: Cluster, resource: Resource, namespace: str | None = None, label_selector: str | None = None
) -> Page:
    """Return the objects of all pages; forget the earlier pages if the LIST begins again."""
    whole = Page((), "")
    async for page in cluster.pages(resource, namespace, label_selector):
        whole = page if page.is_first else Page((*whole.items, *page.items), whole.resource_version)
    return whole
