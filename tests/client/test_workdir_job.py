"""A job with the files of this machine: what its pods get, and the program that unpacks the files."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddpjob import DDPJob
from ddpjob.api import names
from ddpjob.api.objects import Json, element
from ddpjob.client.workdir.mount import at_directory, with_files
from ddpjob.errors import InvalidJobError
from ddpjob.local.admission import admit
from tests.client.test_workdir_files import grow

PACKAGE = {
    "train.py": "from pkg import word\nprint(word.WORD)\n",
    "pkg/word.py": "WORD = 'sent'\n",
    "run.sh": "#!/bin/sh\n",
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = grow(tmp_path / "work", PACKAGE)
    (folder / "run.sh").chmod(0o755)
    (folder / "latest.py").symlink_to("train.py")
    return folder


def job(**spec: Any) -> DDPJob:
    return DDPJob("tiny", **{"image": "torch:1", "command": ["torchrun", "train.py"], **spec})


def pod_of(made: DDPJob) -> Json:
    """Return the pod of node 0 as the operator makes it."""
    pod: Json = next(item for item in admit(made.manifest).created() if item["kind"] == "Pod")
    return pod


def test_the_init_container_unpacks_the_files_into_the_working_directory(work: Path, tmp_path: Path) -> None:
    made = with_files(job(), work)
    (secret,) = made.others
    (data,) = secret["data"].values()
    archive, target = tmp_path / "files.tar.gz", tmp_path / "target"
    archive.write_bytes(base64.b64decode(data))
    target.mkdir()
    (init,) = pod_of(made)["spec"]["initContainers"]
    source = f"{element(init['volumeMounts'], 'readOnly', True)['mountPath']}/{next(iter(secret['data']))}"
    command = [part.replace(source, str(archive)).replace(names.WORKDIR_PATH, str(target)) for part in init["command"]]
    assert command != init["command"]
    subprocess.run([sys.executable, *command[1:]], check=True)
    assert {path.name for path in target.iterdir()} == {"train.py", "pkg", "run.sh", "latest.py"}
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
    done = subprocess.run([sys.executable, "latest.py"], cwd=target, capture_output=True, text=True, check=True)
    assert done.stdout == "sent\n"


def test_pods_get_the_files_before_the_trainer_starts_and_pass_pod_security(work: Path) -> None:
    user = {"runAsUser": 7, "privileged": False}
    template = {
        "spec": {
            "initContainers": [{"name": "prepare", "image": "x"}],
            "containers": [{"name": "trainer", "securityContext": user}],
            "volumes": [{"name": "mine", "emptyDir": {}}],
        }
    }
    made = with_files(job(launcher="Injected", image_pull_policy="Never", template=template), work)
    spec = pod_of(made)["spec"]
    assert [init["name"] for init in spec["initContainers"]] == [names.LAUNCHER, names.WORKDIR, "prepare"]
    init, trainer = spec["initContainers"][1], spec["containers"][0]
    assert (init["image"], init["imagePullPolicy"]) == ("torch:1", "Never")
    assert init["resources"]["limits"] == init["resources"]["requests"]
    context = init["securityContext"]
    assert (context["runAsUser"], context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (
        7,
        False,
        True,
    )
    assert (context["capabilities"], "privileged" in context) == ({"drop": ["ALL"]}, False)
    assert trainer["workingDir"] == "/workdir"
    assert {"name": names.WORKDIR, "mountPath": "/workdir"} in trainer["volumeMounts"]
    assert "ddprun" in " ".join(trainer["command"])
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["mine"] and volumes[names.WORKDIR] == {"name": names.WORKDIR, "emptyDir": {}}
    source = volumes[f"{names.WORKDIR}-archive"]["secret"]["secretName"]
    (secret,) = made.others
    assert (secret["metadata"]["name"], secret["immutable"]) == (source, True)


def test_a_job_that_was_printed_with_files_can_be_submitted_with_others(work: Path) -> None:
    first = with_files(job(), work)
    assert with_files(DDPJob.from_manifest(first.manifest), work).manifest == first.manifest
    (work / "train.py").write_text("changed")
    second = with_files(DDPJob.from_manifest(first.manifest), work)
    (old,), (new,) = first.others, second.others
    assert old["metadata"]["name"] != new["metadata"]["name"]
    assert old["metadata"]["name"] not in second.to_yaml()


def test_the_files_are_in_the_working_directory_that_the_job_sets(work: Path) -> None:
    for given in (
        {"working_dir": "/app/"},
        {"template": {"spec": {"containers": [{"name": "trainer", "workingDir": "/app"}]}}},
    ):
        spec = pod_of(with_files(job(**given), work))["spec"]
        assert spec["containers"][0]["workingDir"] == spec["initContainers"][0]["command"][-1] == "/app"
    mount = {"name": "trainer", "volumeMounts": [{"name": "data", "mountPath": "/workdir/"}]}
    for taken in (
        {"working_dir": "/"},
        {"working_dir": "/data", "data": {"claim_name": "images"}},
        {"working_dir": "/checkpoints", "checkpoint": {"claim_name": "runs"}},
        {"template": {"spec": {"containers": [mount]}}},
    ):
        with pytest.raises(InvalidJobError, match="the files cannot be put into /") as raised:
            with_files(job(**taken), work)
        assert raised.value.hint and raised.value.next_step


def test_a_script_is_named_below_its_directory_and_sent_alone_without_one(work: Path, tmp_path: Path) -> None:
    script = DDPJob.from_script(work / "train.py", "--out", str(work), image="torch:1")
    made = with_files(script, work.parent)
    assert made.spec.command == ["ddprun", "work/train.py", "--out", str(work)]
    assert made.spec.launcher == "Injected"
    alone = with_files(script, None)
    assert (alone.spec.command or [])[1] == "train.py"
    assert len(alone.others) == 1
    assert with_files(job(), None).others == ()

    elsewhere = grow(tmp_path / "elsewhere", {"other.py": ""})
    with pytest.raises(InvalidJobError, match=r"train\.py is not in --workdir"):
        with_files(script, elsewhere)
    (work / ".gitignore").write_text("*.py")
    with pytest.raises(InvalidJobError, match=r"train\.py is not sent with --workdir") as raised:
        with_files(script, work)
    assert raised.value.next_step == "add !train.py to the .gitignore"


def test_on_this_machine_the_directory_takes_the_place_of_the_working_directory(work: Path) -> None:
    trainer = {"name": "trainer", "workingDir": "/app"}
    given = job(working_dir="/app", template={"spec": {"containers": [trainer]}})
    made = at_directory(given, work)
    assert made.directory == work
    assert "/app" not in made.to_yaml()
    assert "/app" in given.to_yaml()
    with pytest.raises(InvalidJobError, match="no such directory"):
        at_directory(given, work / "none")
