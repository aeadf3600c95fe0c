"""Pods, containers and jobs that tests of local mode run."""

from __future__ import annotations

import re
from typing import Any

from ddpjob.api.objects import Json

POD = "mnist-0a1b2-1-0"
OF_A_CLUSTER_ALONE = re.compile(
    r"kube|\bpods?\b|cluster|\bimage|operator|scheduler|evict|namespace|NetworkPolic|\bDNS\b|podSecurity|on node ",
    re.IGNORECASE,
)
"""Words that advice about a job of this machine does not contain."""

UNTIL_SIGTERM = (
    "trap 'echo stopped; exit 75' TERM; echo up; until [ -e $DDPJOB_CHECKPOINT_DIR/go ]; do sleep 0.01; done"
)
"""Runs until a file `go` appears on the claim; exits with 75 on SIGTERM."""


def a_container(name: str = "trainer", script: str | None = None, **more: Any) -> Json:
    """Return a container that runs ``script`` with sh."""
    command = {} if script is None else {"command": ["sh", "-c", script]}
    return {"name": name, "image": "trainer:1", **command, **more}


def a_pod(*containers: Json, name: str = POD, labels: dict[str, str] | None = None, **spec: Any) -> Json:
    """Return a pod of node 0, named as by the engine."""
    given = {"ddpjob.dev/node-rank": "0"} | (labels or {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": given, "annotations": {"note": 'a "b"'}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 30,
            "hostname": name,
            "subdomain": "mnist-0a1b2",
            "containers": list(containers) or [a_container(script="true")],
        }
        | spec,
    }


def a_local_job(script: str, name: str = "tiny", *, checkpoint: bool = False, **spec: Any) -> Json:
    """Return a DDPJob of two nodes that run ``script`` with sh; ``checkpoint`` adds a claimTemplate."""
    claim = {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}}
    return {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {"image": "trainer:1", "command": ["sh", "-c", script], "numNodes": 2}
        | ({"checkpoint": {"claimTemplate": claim}} if checkpoint else {})
        | spec,
    }


def a_secret(**values: str) -> Json:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": values}


def a_config_map(**values: str) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": values}
