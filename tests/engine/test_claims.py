"""Which existing claims a job may use for its claimTemplate, and what the job says about it."""

from typing import Any

import pytest

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.claims import adoption, claim_conflict, is_claim_of
from ddpjob.engine.desired import Job, desired_claim
from tests.builders import a_job

TEMPLATE: Json = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "10Gi"}}}


def wanted(**spec: Any) -> Json:
    create = desired_claim(Job.of(a_job(checkpoint={"claimTemplate": {"spec": TEMPLATE | spec}})))
    assert create is not None
    return create.body


def claim(
    storage: Any = "10Gi", *, label: str | None = None, created: str = "2026-01-01T00:00:00Z", **spec: Any
) -> Json:
    labels = {} if label is None else {names.LABEL_JOB_NAME: label}
    meta = {"name": "mnist-checkpoints", "labels": labels, "creationTimestamp": created}
    return {"metadata": meta, "spec": TEMPLATE | {"resources": {"requests": {"storage": storage}}} | spec}


@pytest.mark.parametrize("storage", ["10Gi", "10240Mi", "1Ti", 20 * 2**30])
def test_claim_of_the_same_size_or_larger_fits(storage: Any) -> None:
    assert claim_conflict(claim(storage), wanted(), "mnist") is None


@pytest.mark.parametrize(
    ("found", "template", "fault"),
    [
        (claim("9Gi"), {}, "it requests 9Gi of storage, not 10Gi"),
        (claim("10G"), {}, "it requests 10G of storage, not 10Gi"),
        (claim("1e999"), {}, "it requests 1e999 of storage"),
        (claim(resources={}), {}, "it requests 0 of storage"),
        (claim(accessModes=["ReadWriteOnce"]), {}, "it lacks the access mode ReadWriteMany"),
        (claim(accessModes=["ReadWriteOnce"]), {"accessModes": ["ReadWriteOnce", "ReadOnlyMany"]},
         "it lacks the access mode ReadOnlyMany"),
        (claim(storageClassName="slow"), {"storageClassName": "fast"}, "its storageClassName is 'slow', not 'fast'"),
        (claim(storageClassName="slow"), {"storageClassName": ""}, "its storageClassName is 'slow', not ''"),
        (claim(), {"storageClassName": "fast"}, "its storageClassName is None, not 'fast'"),
        (claim(volumeName="a"), {"volumeName": "b"}, "its volumeName is 'a', not 'b'"),
        (claim(volumeMode="Block"), {}, "its volumeMode is Block, not Filesystem"),
    ],
)  # fmt: skip
def test_claim_that_lacks_something_is_a_conflict_that_names_it(found: Json, template: Json, fault: str) -> None:
    conflict = claim_conflict(found, wanted(**template), "mnist")
    assert conflict is not None and fault in conflict
    assert "PersistentVolumeClaim mnist-checkpoints exists" in conflict


def test_what_the_template_leaves_open_may_be_anything() -> None:
    found = claim(accessModes=["ReadWriteOnce", "ReadWriteMany"], storageClassName="any", volumeName="pv-1")
    assert claim_conflict(found, wanted(), "mnist") is None


def test_claim_with_the_label_of_the_job_is_used_whatever_its_size() -> None:
    assert claim_conflict(claim("1Gi", label="mnist"), wanted(), "mnist") is None


def test_claim_with_the_label_of_another_job_is_never_used() -> None:
    conflict = claim_conflict(claim("1Ti", label="other"), wanted(), "mnist")
    assert conflict is not None and "it belongs to the DDPJob other" in conflict


def test_adoption_is_told_unless_the_job_created_the_claim() -> None:
    job = a_job()
    job["metadata"]["creationTimestamp"] = "2026-02-01T00:00:00Z"
    foreign, earlier = adoption(claim(), job), adoption(claim(label="mnist"), job)
    assert foreign is not None and "which the operator did not create: 10Gi, ReadWriteMany" in foreign.message
    assert earlier is not None and earlier.message.endswith("of an earlier job of this name")
    assert adoption(claim(label="mnist", created="2026-02-01T00:00:01Z"), job) is None


def test_cached_claim_of_another_job_is_not_the_jobs_own() -> None:
    assert is_claim_of(claim(label="mnist"), "mnist") and is_claim_of(claim(), "mnist")
    assert not is_claim_of(claim(label="other"), "mnist") and not is_claim_of(None, "mnist")
