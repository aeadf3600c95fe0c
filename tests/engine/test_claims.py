"""Which existing claims a job may use for its claimTemplate, and what the job says about it."""

from ddpjob.api import names
from ddpjob.api.objects import Json
from ddpjob.engine.claims import adoption, is_claim_of
from tests.builders import a_job


def claim(*, label: str | None = None, created: str = "2026-01-01T00:00:00Z") -> Json:
    labels = {} if label is None else {names.LABEL_JOB_NAME: label}
    return {"metadata": {"name": "mnist-checkpoints", "labels": labels, "creationTimestamp": created}}


def test_only_a_claim_with_the_label_of_the_job_is_used() -> None:
    assert is_claim_of(claim(label="mnist"), "mnist")
    assert not is_claim_of(claim(label="other"), "mnist") and not is_claim_of(claim(), "mnist")
    assert not is_claim_of({"metadata": {"name": "mnist-checkpoints"}}, "mnist")


def test_adoption_is_told_unless_the_job_created_the_claim() -> None:
    job = a_job()
    job["metadata"]["creationTimestamp"] = "2026-02-01T00:00:00Z"
    earlier = adoption(claim(label="mnist"), job)
    assert earlier is not None and earlier.message.endswith("of an earlier job of this name")
    assert adoption(claim(label="mnist", created="2026-02-01T00:00:01Z"), job) is None
