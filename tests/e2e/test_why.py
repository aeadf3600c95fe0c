"""``ddpjob why`` on a real cluster: what a kubelet, the scheduler and a quota say of a job, and what it makes of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest

from ddpjob import Client
from ddpjob.api.objects import Json
from tests.e2e import nodes
from tests.e2e.jobs import shell_job
from tests.e2e.kubectl import until
from tests.e2e.trials import Trial, Trials, Wait

pytestmark = [pytest.mark.kind, pytest.mark.timeout(600, func_only=True)]

GPU = "nvidia.com/gpu"
ONCE = {"restartPolicy": {"maxRestarts": 0}}
RETRY = {"restartPolicy": {"backoff": {"initialSeconds": 300, "maxSeconds": 300}}}
RAISE = ["python3", "-c", "def load(n):\n    raise ValueError(f'sample {n} has 3 channels')\nload(17)"]
# The runtime notices a killed process a moment later, which the container must outlive.
FILL = ["sh", "-c", "python3 -c 'x = bytearray(10**9)'; code=$?; sleep 2; exit $code"]


# Name of the job, fields of its spec, and fields of the verdict.
CASES: tuple[tuple[str, Json, Json], ...] = (
    (
        "affinity",
        {"template": {"spec": {"nodeSelector": {"no-such": "label"}}}},
        {"stage": "Placement", "reason": "Affinity", "nodeRank": 0},
    ),
    ("resource", {"resources": {"requests": {"cpu": "4000"}}}, {"stage": "Placement", "reason": "Resource"}),
    ("quota", {"resources": {"limits": {GPU: 1}}}, {"stage": "Quota", "reason": "QuotaExceeded"}),
    ("unbound-claim", {"checkpoint": {"mountPath": "/c", "claimName": "unbound"}}, {"stage": "Volume"}),
    ("no-claim", {"checkpoint": {"mountPath": "/c", "claimName": "no-such-claim"}}, {"stage": "Volume"}),
    ("image", {"image": "localhost:1/no/such:image"}, {"stage": "Image", "nodeRank": 0}),
    ("image-name", {"image": "Not/A/Valid/Name"}, {"stage": "Image", "reason": "InvalidImageName"}),
    ("secret", {"envFrom": [{"secretRef": {"name": "no-such-secret"}}]}, {"stage": "Configuration"}),
    ("command", {"command": ["no-such-program"], **ONCE}, {"stage": "Configuration", "reason": "StartError"}),
    (
        "exception",
        {"command": RAISE, **ONCE},
        {"stage": "Crash", "reason": "ValueError", "exception": "ValueError", "nodeRank": 0},
    ),
    ("exit", {"command": ["sh", "-c", "exit 3"], **ONCE}, {"stage": "Crash", "exitCode": 3, "nodeRank": 0}),
    (
        "memory",
        {"command": FILL, "resources": {"limits": {"memory": "64Mi"}}, **ONCE},
        {"stage": "Crash", "reason": "OOMKilled"},
    ),
    ("retry", {"command": ["sh", "-c", "exit 3"], **RETRY}, {"stage": "WaitingForRetry", "exitCode": 3}),
    ("suspended", {"suspend": True}, {"stage": "Suspended", "isAbnormal": False}),
    ("succeeded", {"command": ["true"]}, {"stage": "Succeeded", "isAbnormal": False}),
)


def verdicts(trial: Trial) -> Mapping[str, tuple[Json, float]]:
    """Apply a job for each case. Return the first verdict with the expected fields, or the last, and its seconds."""
    quota = {"kind": "ResourceQuota", "metadata": {"name": "no-gpus"}, "spec": {"hard": {f"requests.{GPU}": 0}}}
    wanted = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Mi"}}}
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "unbound"}}
    trial.kubectl.apply(
        {"apiVersion": "v1", **quota}, {"apiVersion": "v1", **claim, "spec": wanted | {"storageClassName": "none"}}
    )
    trial.kubectl.apply(*(shell_job(name, "sleep 600", **spec) for name, spec, _ in CASES))
    found: dict[str, tuple[Json, float]] = {}
    with Client.cluster(kubeconfig=trial.cluster.kubeconfig, namespace=trial.kubectl.namespace) as client:

        def all_fit() -> bool:
            for name, _, fields in CASES:
                if name not in found or not fits(found[name][0], fields):
                    begin = time.monotonic()
                    verdict = client.explain(name).wire()
                    found[name] = (verdict, time.monotonic() - begin)
            return all(fits(found[name][0], fields) for name, _, fields in CASES)

        with suppress(AssertionError):  # the tests show which job has another verdict
            until("each job has its verdict", all_fit, seconds=150)
    return found


def fits(verdict: Json, fields: Json) -> bool:
    return fields.items() <= verdict.items()


TRIALS = Trials({"verdicts": verdicts}, 1, has_claim=False)


@pytest.mark.parametrize(("name", "fields"), [(name, fields) for name, _, fields in CASES], ids=[c[0] for c in CASES])
def test_verdict_names_stage_and_cause(outcome: Wait, name: str, fields: Json, record_property: Any) -> None:
    verdict, seconds = outcome(verdicts)[name]
    record_property("seconds", seconds)
    assert {key: verdict.get(key) for key in fields} == fields, verdict["sentence"]
    assert verdict["operator"] == ("Unknown" if verdict["state"] in ("Failed", "Succeeded") else "Alive")
    assert not verdict["isAbnormal"] or (verdict["hint"] and verdict["next"])
    assert verdict["unread"] == []


def test_taint_of_all_nodes_is_named(trial: Trial) -> None:
    """A selector would leave another reason in the scheduler's message, so all nodes have the taint."""
    workers = nodes.staying(trial.cluster)
    trial.kubectl("taint", "node", *workers, "ddpjob-e2e/why=true:NoSchedule")
    try:
        trial.kubectl.apply(shell_job(trial.name, "sleep 600"))
        with Client.cluster(kubeconfig=trial.cluster.kubeconfig, namespace=trial.kubectl.namespace) as client:
            fields = {"stage": "Placement", "reason": "Taint", "nodeRank": 0}
            until("the verdict", lambda: fits(client.explain(trial.name).wire(), fields), seconds=60)
    finally:
        trial.kubectl("taint", "node", *workers, "ddpjob-e2e/why-")
