"""Objects of the cluster that plans ask for: read once a minute, with an error in place of what cannot be read."""

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.actions import LOOKUP_SECONDS
from ddpjob.engine.observed import Unknown
from ddpjob_operator.cluster.base import ClusterError, Forbidden, NotFound, NotServed, Unavailable
from ddpjob_operator.controller.lookups import KEPT_SECONDS, Lookups

FLAVOR = (names.FLAVORS, "spot")
MISSING = (names.WORKLOAD_PRIORITIES, "urgent")


class OneFlavor:
    """A cluster that has one flavor, or that answers with an error."""

    error: ClusterError | None = None

    async def get(self, resource: names.Resource, namespace: str, name: str) -> Json:
        assert namespace == "", "these kinds have no namespace"
        if self.error is not None:
            raise self.error
        if (resource, name) != FLAVOR:
            raise NotFound(f"{name} not found", code=404)
        return {"spec": {"nodeLabels": {}}}


async def test_what_was_read_is_used_for_a_minute_and_what_is_missing_is_named() -> None:
    now, cluster = 0.0, OneFlavor()
    lookups = Lookups(cluster, lambda: now)  # type: ignore[arg-type]
    await lookups.read([FLAVOR])
    await lookups.read([MISSING])
    assert lookups.found() == {FLAVOR: {"spec": {"nodeLabels": {}}}, MISSING: Unknown("urgent not found")}
    now = LOOKUP_SECONDS - 1
    assert len(lookups.found()) == 2
    now = LOOKUP_SECONDS + 1
    assert lookups.found() == {}, "also what nothing asks for any more"
    assert MISSING not in lookups._found, "a tenant may ask for any number of names"


@pytest.mark.parametrize("error", [Unavailable("etcd", code=500), NotServed("404 page not found", code=404)], ids=str)
async def test_a_failure_of_a_moment_leaves_the_last_value(error: ClusterError) -> None:
    now, cluster = 0.0, OneFlavor()
    lookups = Lookups(cluster, lambda: now)  # type: ignore[arg-type]
    cluster.error = error
    await lookups.read([FLAVOR])
    assert lookups.found() == {FLAVOR: Unknown(str(error), is_final=False)}, "there is no last value yet"
    cluster.error = None
    await lookups.read([FLAVOR])
    cluster.error, now = error, LOOKUP_SECONDS + 1
    assert lookups.found() == {}, "it is read again"
    await lookups.read([FLAVOR])
    assert isinstance(lookups.found()[FLAVOR], dict)
    now += KEPT_SECONDS
    assert lookups.found() == {}
    await lookups.read([FLAVOR])
    assert lookups.found() == {FLAVOR: Unknown(str(error), is_final=False)}, (
        "a value that nothing asked for was dropped"
    )
    for final in (NotFound("spot not found", code=404), Forbidden("no role", code=403)):
        cluster.error = None
        await lookups.read([FLAVOR])
        cluster.error = final
        await lookups.read([FLAVOR])
        assert lookups.found() == {FLAVOR: Unknown(str(final))}, "it is gone, or may not be read"


@pytest.mark.parametrize("name", ["..", "../../../../api/v1/pods", ".", "a/b", "a?b", "a%2fb", "", "High"])
async def test_a_name_that_no_object_can_have_is_part_of_no_request(name: str) -> None:
    """A user writes it. Seen: the operator read all pods of another namespace."""
    cluster = OneFlavor()
    cluster.error = AssertionError("a request was sent")  # type: ignore[assignment]
    lookups = Lookups(cluster)  # type: ignore[arg-type]
    await lookups.read([(names.POD_PRIORITIES, name)])
    assert lookups.found() == {(names.POD_PRIORITIES, name): Unknown("no object can have this name")}
