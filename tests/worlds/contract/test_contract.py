"""The in-memory cluster and a real API server with its controllers give the same responses to random requests."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from tests.soak import ALL
from tests.worlds.contract.bodies import BODIES, PATCHES, SOUND, job
from tests.worlds.contract.comparison import Comparison
from tests.worlds.contract.conftest import Targets
from tests.worlds.contract.requests import Request, sequences

pytestmark = pytest.mark.apiserver

SEQUENCES = 500 if ALL else 120

# Without these, the comparison would be one of errors.
EXPECTED = {
    *((verb, "DDPJob", "ok") for verb in ("create", "get", "list", "delete", "patch", "patch_status")),
    *((verb, "Pod", "ok") for verb in ("create", "get", "list", "delete", "patch", "patch_status")),
    *(("create", kind, "ok") for kind in ("Service", "NetworkPolicy", "PersistentVolumeClaim", "Event")),
    *((verb, "DDPJob", "Invalid") for verb in ("create", "patch", "patch_status")),
    *((verb, "Pod", "Invalid") for verb in ("create", "patch", "patch_status")),
    ("create", "DDPJob", "AlreadyExists"),
    ("patch_status", "DDPJob", "Conflict"),
    ("delete", "Pod", "NotFound"),
}

# A conflict is so rare that some runs of the random sequences have none.
CONFLICT = [
    Request("create", "DDPJob", {"body": job() | {"metadata": {"name": "a"}}}),
    Request("patch_status", "DDPJob", {"name": "a", "body": {"status": {"state": "Pending"}}}),
    Request(
        "patch_status",
        "DDPJob",
        {
            "name": "a",
            "body": {
                "metadata": {"resourceVersion": {"$version": ["DDPJob", "a"], "first": True}},
                "status": {"state": "Running"},
            },
        },
    ),
]

# Few random requests are for this kind, although it has rules of its own.
POLICIES = [
    *(
        Request("create", "NetworkPolicy", {"body": body | {"metadata": {"name": f"p{number}"}}})
        for number, body in enumerate([*SOUND["NetworkPolicy"], *BODIES["NetworkPolicy"]])
    ),
    *(Request("patch", "NetworkPolicy", {"name": "p0", "body": body}) for body in PATCHES["NetworkPolicy"]),
]


# The random requests have no such metadata, because each of these patches is a new version on a real API server.
METADATA_IN_STATUS = [
    CONFLICT[0],
    *(
        Request("patch_status", "DDPJob", {"name": "a", "body": {"metadata": meta, "status": {"attempt": attempt}}})
        for attempt, meta in enumerate(
            (
                {"labels": {"a": "b"}},
                {"labels": {"a b": "c"}},
                {"annotations": {"note": "y"}, "finalizers": ["example.com/hold"]},
                {"labels": None, "ownerReferences": None},
                {"deletionGracePeriodSeconds": 7},
            ),
            start=1,
        )
    ),
]


@pytest.fixture(scope="module")
def comparison(targets: Targets) -> Iterator[Comparison]:
    comparison = Comparison(targets.memory, targets.real)
    yield comparison
    total = sum(comparison.outcomes.values())
    print(f"\n{total} requests to each cluster, {comparison.collections} waits for the controllers")


# kube-apiserver checks no CEL rule of an object without a name; the models check all rules.
NAME_AND_RULE = [
    Request(
        "create",
        "DDPJob",
        {
            "body": {
                "apiVersion": "ddpjob.dev/v1alpha1",
                "kind": "DDPJob",
                "metadata": {"name": None},
                "spec": {"image": "trainer:1", "nprocPerNode": 0},
            }
        },
    )
]


@settings(
    max_examples=SEQUENCES,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(sequence=sequences())
@example(sequence=CONFLICT)
@example(sequence=POLICIES)
@example(sequence=NAME_AND_RULE)
@example(sequence=METADATA_IN_STATUS)
def test_both_clusters_give_the_same_responses_to_random_requests(
    targets: Targets, comparison: Comparison, sequence: list[Request]
) -> None:
    targets.run(comparison.run(sequence))


@pytest.mark.soak
def test_the_random_requests_got_every_kind_of_response(comparison: Comparison) -> None:
    if comparison.equal < SEQUENCES:
        pytest.skip("only means something after all random requests")
    missing = EXPECTED - comparison.outcomes.keys()
    assert not missing, f"never got {sorted(missing)}"
