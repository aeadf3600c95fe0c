"""`--dry-run` prints the objects that run."""

import json
from typing import Any

import pytest
import yaml

from ddpjob.api.objects import Json
from tests.cli.program import ROOT, Program, shell_job, with_volume

UID = "00000000-0000-4000-8000-000000000000"


def test_dry_run_prints_all_objects_and_runs_nothing(ddpjob: Program) -> None:
    done = ddpjob("run", ddpjob.write(shell_job("echo", "true", **with_volume())), "--nodes", "2", "--dry-run")
    kinds = [document["kind"] for document in yaml.safe_load_all(done.out)]
    assert sorted(kinds) == ["DDPJob", "PersistentVolumeClaim", "Pod", "Pod", "Service"]
    assert not ddpjob.state.exists()
    as_json = ddpjob("run", str(ddpjob.folder / "echo.yaml"), "--nodes", "2", "--dry-run", "-o", "json")
    assert json.loads(as_json.out)["items"] == list(yaml.safe_load_all(done.out))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("mnist-cpu", "yaml"),
        ("torchrun-script", "json"),
        pytest.param("mnist-gpu", "yaml", marks=pytest.mark.soak),
    ],
)
def test_dry_run_output_is_valid_input_with_the_same_result(ddpjob: Program, name: str, form: str) -> None:
    first = ddpjob("run", str(ROOT / "manifests" / "examples" / f"{name}.yaml"), "--dry-run", "-o", form)
    again = ddpjob("run", "-", "--dry-run", "-o", form, stdin=first.out)
    assert first.code == again.code == 0, again
    assert again.out == first.out


def test_pods_that_run_are_those_of_the_dry_run(ddpjob: Program) -> None:
    file = ddpjob.write(shell_job("echo", "true", **with_volume(numNodes=2)))
    printed = [o for o in yaml.safe_load_all(ddpjob("run", file, "--dry-run").out) if o["kind"] == "Pod"]
    assert ddpjob("run", file).code == 0
    job = ddpjob.job("echo")
    dumped = json.loads((ddpjob.state / "jobs" / "default" / "echo" / "cluster.json").read_text())
    ran = [obj for plural, obj in dumped["objects"] if plural == "pods"]
    assert len(ran) == len(printed) == 2
    for one, other in zip(printed, ran, strict=True):
        env = other["spec"]["containers"][0]["env"]
        token = next(variable for variable in env if variable["name"] == "DDPJOB_TOKEN")
        env.remove(token)  # drawn for each attempt, and never printed
        assert missing(plain(one, UID), plain(other, job["metadata"]["uid"])) == []


def plain(pod: Json, uid: str) -> Json:
    """Return the pod with its uid replaced by a constant."""
    text: Json = json.loads(json.dumps(pod).replace(uid, "UID").replace(f"echo-{uid[:5]}", "echo-UID"))
    return text


def missing(printed: Any, ran: Any, path: str = "") -> list[str]:
    """Return the paths of printed values that differ in what ran; an API server and a kubelet may only add values."""
    if isinstance(printed, dict) and isinstance(ran, dict):
        return [p for key, value in printed.items() for p in missing(value, ran.get(key), f"{path}.{key}")]
    if isinstance(printed, list) and isinstance(ran, list) and len(printed) == len(ran):
        return [p for n, value in enumerate(printed) for p in missing(value, ran[n], f"{path}[{n}]")]
    return [] if printed == ran else [f"{path}: {printed!r}, not {ran!r}"]


def test_secrets_are_not_printed(ddpjob: Program) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"KEY": "hunter2"}}
    job = shell_job("echo", "true", envFrom=[{"secretRef": {"name": "s"}}])
    done = ddpjob("run", ddpjob.write(job, secret), "--dry-run")
    assert done.code == 0
    assert "hunter2" not in done.out + done.err
    assert "Secrets are left out" in done.err
