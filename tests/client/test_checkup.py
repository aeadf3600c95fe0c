"""The verdicts of ``ddpjob doctor`` on what was found, and that no check delays another."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ddpjob.api.crd import openapi
from ddpjob.api.objects import Json
from ddpjob.api.times import timestamp
from ddpjob.client.checkup import cluster, machine
from ddpjob.client.checkup.check import Check
from ddpjob.client.checkup.cluster import RIGHTS, Operators
from ddpjob.client.checkup.machine import Folder, Torch, check_machine
from ddpjob.client.checkup.probes import Probe, UnreadableError, run
from tests.builders import NOW

GIB = 2**30


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (machine.torch(Torch("2.13.0+cpu"), 0), "ok"),
        (machine.torch(Torch("2.9.1"), 0), "warning"),
        (machine.torch(Torch(None), 0), "warning"),
        (machine.torch(Torch("2.13.0", devices=2), 2), "ok"),
        (machine.torch(Torch("2.13.0+cpu"), 2), "warning"),
        (machine.torch(Torch("2.13.0", error="ImportError: libcudart.so.12"), 1), "error"),
        (machine.shared_memory(Folder("/dev/shm", free=GIB)), "ok"),
        (machine.shared_memory(Folder("/dev/shm", free=2**20)), "warning"),
        (machine.state_folder(Folder("/state", free=2 * GIB)), "ok"),
        (machine.state_folder(Folder("/state", free=GIB // 2)), "warning"),
        (machine.state_folder(Folder("/state", error="Read-only file system")), "error"),
    ],
)
def test_verdicts_on_this_machine(check: Check, status: str) -> None:
    assert check.status == status, check
    assert check.part == "machine"
    assert status == "ok" or check.hint


def test_this_machine_is_checked_for_real(tmp_path: Path) -> None:
    checks = {check.name: check for check in check_machine(tmp_path / "not" / "yet")}
    assert checks.keys() == {
        *("torch", "shared-memory", "state-folder"),
    }
    for name in ("torch", "state-folder"):
        assert checks[name].status == "ok", checks[name]
    assert not list(tmp_path.iterdir()), "a check leaves nothing behind"


def test_a_state_folder_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = next(check for check in check_machine(tmp_path / "file" / "state") if check.name == "state-folder")
    assert found.status == "error"


def deployment(ready: int = 1, *, namespaces: str = "", version: str = "1.0", namespace: str = "ops") -> Json:
    env = [{"name": "DDPJOB_OPERATOR_NAMESPACES", "value": namespaces}]
    labels = {"app.kubernetes.io/version": version}
    return {
        "metadata": {"name": "op", "namespace": namespace, "labels": labels},
        "spec": {"replicas": 1, "template": {"spec": {"containers": [{"name": "operator", "env": env}]}}},
        "status": {"readyReplicas": ready} if ready else {},
    }


def operator(*deployments: Json, **more: Any) -> Check:
    return cluster.operator(Operators(deployments, **more), "team", NOW, "1.0")


def lease(seconds: float) -> Json:
    return {"spec": {"holderIdentity": "op-1", "renewTime": timestamp(NOW - timedelta(seconds=seconds))}}


CRASHING = {"status": {"containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]}}


@pytest.mark.parametrize(
    ("check", "status", "text"),
    [
        (operator(deployment()), "ok", "ops/op"),
        (operator(), "error", "no operator"),
        (operator(deployment(namespaces="a,b")), "error", "1 serve other namespaces"),
        (operator(deployment(namespaces="a,b"), deployment(namespaces="c,team")), "ok", "ops/op"),
        (operator(deployment(0), pods=[CRASHING]), "error", "CrashLoopBackOff"),
        (operator(deployment(0), deployment()), "ok", "1 of 1"),
        (operator(deployment(version="0.9")), "warning", "0.9"),
        (operator(deployment(), lease=lease(5)), "ok", "1 of 1"),
        (operator(deployment(), lease=lease(300)), "error", "300 s ago"),
    ],
)
def test_verdicts_on_the_operator(check: Check, status: str, text: str) -> None:
    assert check.status == status, check
    assert text in check.summary


def server(minor: str = "34+", skew: float | None = 1.0, error: str = "") -> Check:
    return cluster.server({"major": "1", "minor": minor, "gitVersion": f"v1.{minor}.0"}, skew, error)


def allowed(*refused: str) -> Check:
    return cluster.rights({right: right.text not in refused for right in RIGHTS}, "team")


FIELDS = cluster.fields_of(openapi())
DDPJOBS = [right.text for right in RIGHTS if right.resource == "ddpjobs"]


def storage_class(name: str, provisioner: str) -> Json:
    return {"metadata": {"name": name}, "provisioner": provisioner}


def bound(name: str, mode: str) -> Json:
    return {"spec": {"storageClassName": name, "accessModes": [mode]}, "status": {"phase": "Bound"}}


LOCAL = storage_class("standard", "rancher.io/local-path")
OWN = storage_class("own", "storage.example.com/x")


@pytest.mark.parametrize(
    ("check", "status", "text"),
    [
        (server(), "ok", "v1.34+.0"),
        (server("28"), "error", "v1.28.0"),
        (server(skew=-3600), "warning", "3600 s behind"),
        (server(error="connection refused"), "error", "connection refused"),
        (cluster.crd(True, FIELDS, FIELDS), "ok", "fields of this release"),
        (cluster.crd(False, None, FIELDS), "error", "does not serve"),
        (cluster.crd(True, None, FIELDS), "unknown", "unknown fields"),
        (
            cluster.crd(True, FIELDS - {"status.time.lost"}, FIELDS),
            "warning",
            "lacks 1 fields of this release: status.time.lost",
        ),
        (cluster.crd(True, FIELDS | {"spec.more"}, FIELDS), "warning", "spec.more"),
        (allowed(), "ok", "team"),
        (allowed("create ddpjobs", "patch ddpjobs", "delete ddpjobs"), "warning", "create ddpjobs"),
        (allowed("get pods/log"), "warning", "get pods/log"),
        (allowed(*DDPJOBS), "error", "neither read nor change"),
        (cluster.storage([storage_class("fs", "efs.csi.aws.com"), LOCAL], []), "ok", "fs"),
        (cluster.storage([LOCAL], []), "warning", "rancher.io/local-path"),
        (cluster.storage([LOCAL], [bound("standard", "ReadWriteMany")]), "ok", "standard"),
        (cluster.storage([LOCAL], [bound("standard", "ReadWriteOnce")]), "warning", "local-path"),
        (cluster.storage([OWN, LOCAL], []), "unknown", "storage.example.com/x"),
        (cluster.storage([], []), "warning", "no storage class"),
    ],
)
def test_verdicts_on_the_cluster(check: Check, status: str, text: str) -> None:
    assert check.status == status, check
    assert text in check.summary
    assert check.part == "cluster"
    assert status in ("ok", "unknown") or check.next, check


def test_a_check_that_hangs_or_breaks_is_unknown_and_delays_no_other() -> None:
    never = threading.Event()

    def refused() -> None:
        raise UnreadableError("you may not read this")

    def judged(found: object) -> Check:
        return machine.torch(Torch("2.13.0", devices=int(str(found))), 0)

    probes = [
        Probe("machine", "hangs", "a disk", never.wait, judged, 0.2),
        Probe("machine", "refused", "nodes", refused, judged, next_step="ask"),
        Probe("machine", "odd", "nodes", lambda: "no number", judged),
        Probe("machine", "gpus", "GPUs", lambda: 2, judged, 60.0),
    ]
    try:
        begun = time.monotonic()
        hangs, refusal, odd, good = run(probes)
        assert time.monotonic() - begun < 20, "the limit of the others is 60 s, and one never ends"
    finally:
        never.set()
    assert [check.status for check in (hangs, refusal, odd, good)] == ["unknown", "unknown", "unknown", "ok"]
    assert "no answer after 0.2 s" in hangs.summary
    assert (refusal.summary, refusal.next) == ("nodes could not be read: you may not read this", "ask")
    assert "ValueError" in odd.summary
