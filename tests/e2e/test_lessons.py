"""Lessons as DDPJobs on a real cluster: two files of manifests/examples/lessons. tests/cli runs another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.installation import ROOT, Installation
from tests.e2e.namespace import JobNamespace, job_namespace
from tests.kind.cluster import Cluster

pytestmark = [pytest.mark.soak, pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

# What node 0 prints, with single spaces.
SAID = {
    "collectives": "rank 3: [3, 3] -> [0, 0]",
    "fsdp": "saved in 4 files, loaded, and one more step: still equal",
}


def file_of(lesson: str) -> Path:
    return ROOT / "manifests" / "examples" / "lessons" / f"{lesson}.yaml"


@pytest.fixture(scope="module")
def applied(cluster: Cluster, operator: Installation) -> Iterator[JobNamespace]:
    """Provide a namespace in which the lessons run, all at the same time."""
    with job_namespace(cluster, "lessons") as made:
        made.kubectl.apply(*(yaml.safe_load(file_of(lesson).read_text()) for lesson in SAID))
        yield made


@pytest.mark.parametrize("lesson", SAID)
def test_lesson_succeeds_as_a_job(applied: JobNamespace, lesson: str) -> None:
    status = applied.until_finished(f"lesson-{lesson}")
    selector = f"ddpjob.dev/job-name=lesson-{lesson},ddpjob.dev/node-rank=0"
    said = applied.kubectl("logs", "--selector", selector, "--tail=-1")
    assert (status["state"], status["restarts"]) == ("Succeeded", 0), said
    assert SAID[lesson] in re.sub(" +", " ", said), said
