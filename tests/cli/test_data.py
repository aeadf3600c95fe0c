"""Where ddptrain finds its data: a directory of the user, a download, or the bundled digits with a warning."""

from pathlib import Path
from typing import Any

import pytest

from ddpjob.api.objects import Json
from ddpjob.cli import prepare
from ddpjob.cli.prepare import digits_if_offline, use_directory
from ddpjob.local import LocalError
from ddpjob.local.admission import AdmittedJob, admit
from ddpjob.local.programs import runs_ddptrain
from ddpjob.local.state import HostPaths, StateFolder
from tests.cli.program import shell_job, with_volume


def a_job(*args: str, **spec: Any) -> Json:
    job = shell_job("mnist", "", args=list(args), **with_volume(**spec))
    del job["spec"]["command"]
    return job


def with_paths(job: Json, folder: Path) -> tuple[AdmittedJob, HostPaths]:
    admitted = admit(job)
    return admitted, HostPaths(admitted.job, StateFolder(folder))


def args_of(admitted: AdmittedJob) -> list[str]:
    """Return the arguments of the trainer's container, which are those of the spec."""
    args: list[str] = admitted.pods[0]["spec"]["containers"][0]["args"]
    assert args == admitted.body["spec"]["args"]
    return args


@pytest.fixture
def said() -> list[str]:
    return []


def decide(
    job: Json,
    folder: Path,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    fetched: str | None,
    fresh: bool = False,
) -> list[str]:
    """Return the job's arguments after --digits-if-offline. fetched: None, or why the download fails."""
    asked = []

    def fetch(directory: Path) -> str | None:
        asked.append(directory)
        return fetched

    monkeypatch.setattr(prepare, "_fetch", fetch)
    monkeypatch.setattr(prepare, "_is_complete", lambda directory: (directory / "whole").exists())
    admitted, paths = with_paths(job, folder)
    changed = digits_if_offline(admitted, paths, fresh=fresh, say=said.append, warn=said.append)
    return args_of(changed)


def test_failed_download_uses_the_digits_and_warns(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job("train", "--epochs", "2", "--data-dir", "/checkpoints/data", "--download")
    args = decide(job, tmp_path, said, monkeypatch, fetched="no route")
    assert args == ["train", "--epochs", "2", "--data", "digits"]
    assert any("NOT MNIST" in line and "no route" in line for line in said)


def test_download_is_kept_for_the_next_run(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job("train", "--data-dir=/checkpoints/data", "--download")
    args = decide(job, tmp_path, said, monkeypatch, fetched=None)
    assert args == ["train", "--data-dir", str(tmp_path / "datasets" / "mnist")]
    assert not any("NOT" in line for line in said)


@pytest.mark.parametrize(("fresh", "expected"), [(False, "/checkpoints/data"), (True, "datasets/mnist")])
def test_data_on_the_volume_is_used_unless_fresh_empties_it(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, fresh: bool, expected: str
) -> None:
    there = tmp_path / "volumes" / "default" / "mnist-checkpoints" / "data"
    there.mkdir(parents=True)
    (there / "whole").touch()
    job = a_job("train", "--data-dir", "/checkpoints/data", "--download")
    args = decide(job, tmp_path, said, monkeypatch, fetched=None, fresh=fresh)
    assert args[args.index("--data-dir") + 1].endswith(expected)


def test_job_without_download_is_unchanged(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide(a_job("train", "--data", "digits"), tmp_path, said, monkeypatch, fetched="no") == [
        "train",
        "--data",
        "digits",
    ]
    assert said == []


def test_data_dir_replaces_the_directory_of_the_job(tmp_path: Path) -> None:
    job = a_job("train", "--data-dir", "/checkpoints/data", "--download", "--epochs", "2")
    assert args_of(use_directory(*with_paths(job, tmp_path), str(tmp_path))) == [
        "train",
        "--epochs",
        "2",
        "--data-dir",
        str(tmp_path),
    ]


def test_data_dir_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnist").mkdir()
    monkeypatch.chdir(tmp_path)
    job = a_job()
    assert args_of(use_directory(*with_paths(job, tmp_path), "mnist")) == [
        "train",
        "--data-dir",
        str(tmp_path / "mnist"),
    ]


def test_data_dir_below_a_mount_path_is_refused(tmp_path: Path) -> None:
    job = a_job("train")
    job["spec"]["checkpoint"]["mountPath"] = str(tmp_path)
    with pytest.raises(LocalError, match="where the job mounts a volume"):
        use_directory(*with_paths(job, tmp_path), str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, True),
        ({"command": ["ddptrain"]}, True),
        ({"command": ["/opt/bin/ddptrain"]}, True),
        ({"command": ["torchrun", "train.py"]}, False),
        ({"template": {"spec": {"containers": [{"name": "trainer", "command": ["sh"]}]}}}, False),
    ],
)
def test_jobs_that_run_ddptrain_are_recognised_by_their_command(spec: Json, expected: bool) -> None:
    job = a_job()
    job["spec"] |= spec
    assert runs_ddptrain(admit(job)) is expected


def test_claim_named_by_volume_option_is_the_users_directory(tmp_path: Path) -> None:
    job = a_job(data={"claimName": "shared", "mountPath": "/data"})
    admitted = admit(job)
    paths = HostPaths(admitted.job, StateFolder(tmp_path), {"shared": Path("/mine")})
    assert paths.on_host("/data/x") == Path("/mine/x")
    assert paths.on_host("/checkpoints/x") == tmp_path / "volumes" / "default" / "mnist-checkpoints" / "x"
    assert paths.on_host("/elsewhere") == Path("/elsewhere")
    assert admitted.claims == ["mnist-checkpoints", "shared"]
