"""``ddpjob why`` on a real cluster: what a kubelet, the scheduler and a quota say of a job, and what it makes of it.

why.yaml has the jobs and their labels, as those of ``tests/situations``; `make soak` applies all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddpjob import Client
from ddpjob.api import names
from ddpjob.api.objects import Json
from tests.client.accuracy import Judged, judge, table
from tests.e2e.jobs import shell_job
from tests.e2e.kubectl import until
from tests.e2e.trials import Trial, Trials, Wait
from tests.soak import ALL

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]

_LISTED: Json = yaml.safe_load(Path(__file__).with_name("why.yaml").read_text())
CASES: Mapping[str, Json] = {case["name"]: case for case in _LISTED["cases"] if ALL or case.get("sample")}
SHARED = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Mi"}}}


def is_right(found: Judged) -> bool:
    return found.stage and found.next and found.culprit is not False


def answers(trial: Trial) -> Mapping[str, tuple[Judged, float]]:
    """Apply the job of each case. Return the first right answer of each, or the last, and the seconds that it took."""
    space = trial.kubectl.namespace
    quota = {"kind": "ResourceQuota", "metadata": {"name": "no-gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": 0}}}
    conflict = names.claim_name("claim-conflict")
    claims = [
        {"kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": SHARED | spec}
        for name, spec in (
            ("unbound", {"storageClassName": "none"}),
            (conflict, {"accessModes": ["ReadWriteOnce"]}),
        )
    ]
    secret = {"kind": "Secret", "metadata": {"name": "there"}, "stringData": {"key": "value"}}
    trial.kubectl.apply(*({"apiVersion": "v1", **given} for given in (quota, *claims, secret)))
    with admission(trial, [unanswered_webhook(space), *refusing_policy(space)]):
        for name, case in CASES.items():  # one by one: for each command there is a minute
            trial.kubectl.apply(shell_job(name, "sleep 600", **case["spec"]))
        return until_right(trial, {name: case["label"] for name, case in CASES.items()}, seconds=300)


def until_right(trial: Trial, labels: Mapping[str, Json], seconds: float) -> Mapping[str, tuple[Judged, float]]:
    """Ask about each job until the answer is that of its label, and return the last answers and their seconds."""
    found: dict[str, tuple[Judged, float]] = {}
    with Client.cluster(kubeconfig=trial.cluster.kubeconfig, namespace=trial.kubectl.namespace) as client:

        def all_right() -> bool:
            for name, label in labels.items():
                if name not in found or not is_right(found[name][0]):
                    begin = time.monotonic()
                    answer = client.explain(name)
                    found[name] = judge({"name": name, "label": label}, answer), time.monotonic() - begin
            return all(is_right(each) for each, _ in found.values())

        with suppress(AssertionError):  # the tests show which job has another answer
            until("each answer is right", all_right, seconds=seconds)
    return found


@contextmanager
def admission(trial: Trial, objects: list[Json]) -> Iterator[None]:
    """Let objects of the whole cluster, which are named as the namespace, refuse the pods of some jobs."""
    trial.kubectl.apply(*({"apiVersion": "admissionregistration.k8s.io/v1", **made} for made in objects))
    try:
        yield
    finally:
        for made in reversed(objects):
            trial.kubectl("delete", made["kind"], made["metadata"]["name"], "--ignore-not-found")


def unanswered_webhook(space: str) -> Json:
    """Return a webhook without a server that is asked for each pod of the job ``webhook``."""
    webhook = {
        "name": "pods.e2e.ddpjob.dev",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "clientConfig": {"service": {"name": "no-such-service", "namespace": space}},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space}},
        "objectSelector": {"matchLabels": {names.LABEL_JOB_NAME: "webhook"}},
        "rules": [_creates_of_pods()],
    }
    return {"kind": "ValidatingWebhookConfiguration", "metadata": {"name": space}, "webhooks": [webhook]}


def refusing_policy(space: str) -> list[Json]:
    """Return a policy of the cluster that refuses the pods of the job ``policy``."""
    mine = {"matchLabels": {names.LABEL_JOB_NAME: "policy"}}
    spec = {
        "matchConstraints": {"objectSelector": mine, "resourceRules": [_creates_of_pods()]},
        "validations": [{"expression": "false", "message": "pods need a cost center"}],
    }
    within = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space}}}
    binding = {"policyName": space, "validationActions": ["Deny"], "matchResources": within}
    kinds = (("ValidatingAdmissionPolicy", spec), ("ValidatingAdmissionPolicyBinding", binding))
    return [{"kind": kind, "metadata": {"name": space}, "spec": given} for kind, given in kinds]


def _creates_of_pods() -> Json:
    return {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}


TRIALS = Trials.of(1, answers)


@pytest.mark.parametrize("name", CASES)
def test_answer_has_stage_culprit_and_advice_of_its_label(outcome: Wait, name: str, record_property: Any) -> None:
    judged, seconds = outcome(answers)[name]
    record_property("seconds", seconds)
    found = judged.found
    assert is_right(judged), str(judged)
    assert found.operator == ("Unknown" if found.state in ("Failed", "Succeeded") else "Alive")
    assert not found.is_abnormal or (found.hint and found.next)
    assert not found.unread


@pytest.mark.soak
def test_figures_of_the_real_cluster_and_no_answer_is_confidently_wrong(outcome: Wait, record_property: Any) -> None:
    found = [judged for judged, _ in outcome(answers).values()]
    figures = table({"real cluster": found})
    record_property("figures", figures)
    print(figures)
    assert len(found) >= 40
    assert not [str(each) for each in found if each.is_confidently_wrong]
