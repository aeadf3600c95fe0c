"""The example on a real cluster, from `kubectl apply` to a checkpoint that another pod evaluates."""

import json
import re

import pytest

from ddpjob.api.objects import Json, is_true
from ddprun.reporting.metrics import read_rows
from tests.e2e.installation import Installation
from tests.e2e.jobs import evaluation_pod, training
from tests.e2e.reference import ReferenceRun
from tests.metrics import effective_rows

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]


def uids_of(pods: list[Json]) -> list[str]:
    return [pod["metadata"]["uid"] for pod in pods]


def test_pods_on_both_workers_form_one_world_of_four(reference: ReferenceRun) -> None:
    nodes = {pod["spec"]["nodeName"] for pod in reference.pods}
    assert len(reference.pods) == 2
    assert len(nodes) == 2, f"both pods ran on {nodes}"
    assert reference.status["world"]["worldSize"] == 4
    starts = [row for row in read_rows(reference.folder) if row["event"] == "start"]
    assert [start["worldSize"] for start in starts] == [4]


def test_status_and_metrics_of_the_finished_job_have_the_accuracy(reference: ReferenceRun) -> None:
    assert is_true(reference.job["status"], "Finished")
    assert is_true(reference.job["status"], "Succeeded")
    assert reference.status["state"] == "Succeeded"
    assert reference.status["restarts"] == 0
    accuracy = float(reference.status["progress"]["accuracy"])
    assert accuracy >= training().least_accuracy
    evaluations = effective_rows(reference.folder, "eval")
    assert [row["epoch"] for row in evaluations] == [1, 2]
    assert evaluations[-1]["accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_pods_of_a_finished_job_stay_with_their_logs(reference: ReferenceRun) -> None:
    pods = reference.namespace.pods()
    assert sorted(uids_of(pods)) == sorted(uids_of(reference.pods))
    assert not [pod["metadata"]["name"] for pod in pods if "deletionTimestamp" in pod["metadata"]]
    first = next(pod["metadata"]["name"] for pod in pods if pod["metadata"]["name"].endswith("-0"))
    assert "test accuracy" in reference.namespace.kubectl("logs", first)


def test_kubectl_get_shows_the_step_during_training(reference: ReferenceRun) -> None:
    steps = set(re.findall(r"\b(\d+)/\d{2,}\b", "\n".join(reference.table)))
    total = reference.status["progress"]["totalSteps"]
    between = sorted(step for step in map(int, steps) if 0 < step < total)
    assert len(between) >= 3, "\n".join(reference.table)


def test_pod_with_a_read_only_volume_evaluates_to_the_same_accuracy(reference: ReferenceRun) -> None:
    namespace = reference.namespace
    claim = f"{reference.name}-checkpoints"
    namespace.kubectl.apply(evaluation_pod("judge", claim))
    namespace.kubectl.wait_for("jsonpath={.status.phase}=Succeeded", "pod/judge", 120)
    verdict = json.loads(namespace.kubectl("logs", "judge").splitlines()[-1])
    assert verdict["accuracy"] == pytest.approx(float(reference.status["progress"]["accuracy"]), abs=5e-5)
    path = reference.status["checkpoint"]["path"]
    assert verdict["checkpoint"]["step"] == reference.status["checkpoint"]["step"]
    assert (reference.folder / path).is_file()


def test_operator_has_every_right_that_a_whole_job_needs(reference: ReferenceRun, operator: Installation) -> None:
    assert reference.status["state"] == "Succeeded"
    assert operator.refused_requests() == []
