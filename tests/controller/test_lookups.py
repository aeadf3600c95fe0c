"""Objects of the cluster that plans ask for: read once a minute, with an error in place of what cannot be read."""

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.cluster.base import NotFound
from ddpjob.controller.lookups import LOOKUP_SECONDS, Lookups

FLAVOR = (names.FLAVORS, "spot")
MISSING = (names.WORKLOAD_PRIORITIES, "urgent")


class OneFlavor:
    """A cluster that has one flavor."""

    async def get(self, resource: names.Resource, namespace: str, name: str) -> Json:
        assert namespace == "", "these kinds have no namespace"
        if (resource, name) != FLAVOR:
            raise NotFound(f"{name} not found", code=404)
        return {"spec": {"nodeLabels": {}}}


async def test_what_was_read_is_used_for_a_minute_and_what_is_missing_is_named() -> None:
    now, cluster = 0.0, OneFlavor()
    lookups = Lookups(cluster, lambda: now)  # type: ignore[arg-type]
    await lookups.read([FLAVOR])
    assert not lookups.have_failed
    await lookups.read([MISSING])
    assert lookups.have_failed
    assert lookups.found() == {FLAVOR: {"spec": {"nodeLabels": {}}}, MISSING: "urgent not found"}
    now = LOOKUP_SECONDS - 1
    assert len(lookups.found()) == 2
    now = LOOKUP_SECONDS + 1
    assert lookups.found() == {}, "also what nothing asks for any more"
