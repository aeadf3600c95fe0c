"""The verdicts of ``ddpjob doctor`` on what was found."""

from __future__ import annotations

import pytest

from ddpjob.api.objects import Json
from ddpjob.client import checkup
from ddpjob.client.checkup import Check


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (checkup.torch("2.13.0+cpu", "", 0, 0), "ok"),
        (checkup.torch("2.9.1", "", 0, 0), "warning"),
        (checkup.torch(None, "", 0, 0), "warning"),
        (checkup.torch("2.13.0", "", 2, 2), "ok"),
        (checkup.torch("2.13.0+cpu", "", 0, 2), "warning"),
        (checkup.torch("2.13.0", "ImportError: libcudart.so.12", 0, 1), "error"),
        (checkup.check_torch(0), "ok"),
    ],
)
def test_verdicts_on_torch(check: Check, status: str) -> None:
    assert (check.part, check.status) == ("machine", status), check
    assert status == "ok" or (check.hint and check.next)


def deployment(ready: int = 1, *, namespaces: str = "", version: str = "1.0") -> Json:
    env = [{"name": "DDPJOB_OPERATOR_NAMESPACES", "value": namespaces}]
    return {
        "metadata": {"name": "op", "namespace": "ops", "labels": {"app.kubernetes.io/version": version}},
        "spec": {"replicas": 1, "template": {"spec": {"containers": [{"name": "operator", "env": env}]}}},
        "status": {"readyReplicas": ready} if ready else {},
    }


def operator(*deployments: Json) -> Check:
    return checkup.operator(deployments, "team", "1.0")


def server(skew: float | None = 1.0, error: str = "") -> Check:
    return checkup.server({"major": "1", "minor": "34+", "gitVersion": "v1.34.0"}, skew, error)


@pytest.mark.parametrize(
    ("check", "status", "text"),
    [
        (operator(deployment()), "ok", "ops/op: 1 of 1"),
        (operator(), "error", "no operator"),
        (operator(deployment(namespaces="a,b")), "error", "1 serve other namespaces"),
        (operator(deployment(namespaces="a,b"), deployment(namespaces="c,team")), "ok", "ops/op"),
        (operator(deployment(0)), "error", "0 of 1"),
        (operator(deployment(0), deployment()), "ok", "1 of 1"),
        (operator(deployment(version="0.9")), "warning", "0.9"),
        (server(), "ok", "v1.34.0"),
        (server(skew=-3600), "warning", "3600 s behind"),
        (server(error="connection refused"), "error", "connection refused"),
    ],
)
def test_verdicts_on_the_cluster(check: Check, status: str, text: str) -> None:
    assert (check.part, check.status) == ("cluster", status), check
    assert text in check.summary
    assert status in ("ok", "unknown") or check.next, check
