"""Where ddptrain's data comes from: a directory of the user's, a download, or the bundled digits, said loudly."""

from pathlib import Path
from typing import Any

import pytest

from ddpjob.cli import prepare
from ddpjob.cli.host_paths import HostPaths
from ddpjob.cli.prepare import digits_if_offline, runs_ddptrain, use_directory
from ddpjob.local.errors import LocalError
from ddpjob.local.state import StateFolder
from tests.cli.program import shell_job, with_volume

Json = dict[str, Any]


def a_job(*args: str, **spec: Any) -> Json:
    job = shell_job("mnist", "", args=list(args), **with_volume(**spec))
    del job["spec"]["command"]
    return job


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
    """The job's arguments after --digits-if-offline. ``fetched``: None where a download works, else why not."""
    asked = []

    def fetch(directory: Path) -> str | None:
        asked.append(directory)
        return fetched

    monkeypatch.setattr(prepare, "_fetch", fetch)
    monkeypatch.setattr(prepare, "_is_whole", lambda directory: (directory / "whole").exists())
    digits_if_offline(HostPaths(job, StateFolder(folder)), fresh=fresh, say=said.append, warn=said.append)
    args: list[str] = job["spec"]["args"]
    return args


def test_where_nothing_can_be_downloaded_the_digits_are_used_and_it_is_said(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = a_job("train", "--epochs", "2", "--data-dir", "/checkpoints/data", "--download")
    args = decide(job, tmp_path, said, monkeypatch, fetched="no route")
    assert args == ["train", "--epochs", "2", "--data", "digits"]
    assert any("NOT MNIST" in line and "no route" in line for line in said)


def test_a_download_is_kept_for_the_next_run(tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    job = a_job("train", "--data-dir=/checkpoints/data", "--download")
    args = decide(job, tmp_path, said, monkeypatch, fetched=None)
    assert args == ["train", "--data-dir", str(tmp_path / "datasets" / "mnist")]
    assert not any("NOT" in line for line in said)


@pytest.mark.parametrize(("fresh", "expected"), [(False, "/checkpoints/data"), (True, "datasets/mnist")])
def test_data_on_the_volume_is_used_unless_it_is_about_to_be_emptied(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, fresh: bool, expected: str
) -> None:
    there = tmp_path / "volumes" / "default" / "mnist-checkpoints" / "data"
    there.mkdir(parents=True)
    (there / "whole").touch()
    job = a_job("train", "--data-dir", "/checkpoints/data", "--download")
    args = decide(job, tmp_path, said, monkeypatch, fetched=None, fresh=fresh)
    assert (prepare.value_of(args, "--data-dir") or "").endswith(expected)


def test_a_job_that_downloads_nothing_stays_as_it_is(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decide(a_job("train", "--data", "digits"), tmp_path, said, monkeypatch, fetched="no") == [
        "train",
        "--data",
        "digits",
    ]
    assert said == []


def test_a_directory_takes_the_place_of_the_jobs_own(tmp_path: Path) -> None:
    job = a_job("train", "--data-dir", "/checkpoints/data", "--download", "--epochs", "2")
    use_directory(HostPaths(job, StateFolder(tmp_path)), str(tmp_path))
    assert job["spec"]["args"] == ["train", "--epochs", "2", "--data-dir", str(tmp_path)]


def test_a_directory_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mnist").mkdir()
    monkeypatch.chdir(tmp_path)
    job = a_job()
    use_directory(HostPaths(job, StateFolder(tmp_path)), "mnist")
    assert job["spec"]["args"] == ["train", "--data-dir", str(tmp_path / "mnist")]


def test_a_directory_that_would_be_taken_for_a_mount_is_refused(tmp_path: Path) -> None:
    job = a_job("train")
    job["spec"]["checkpoint"]["mountPath"] = str(tmp_path)
    with pytest.raises(LocalError, match="where the job mounts a volume"):
        use_directory(HostPaths(job, StateFolder(tmp_path)), str(tmp_path))


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
def test_jobs_that_run_ddptrain_are_known_by_their_command(spec: Json, expected: bool) -> None:
    assert runs_ddptrain({"spec": spec}) is expected


def test_the_directory_of_a_claim_is_the_users_where_one_was_named(tmp_path: Path) -> None:
    job = a_job(data={"claimName": "shared", "mountPath": "/data"})
    paths = HostPaths(job, StateFolder(tmp_path), {"shared": Path("/mine")})
    assert paths.on_host("/data/x") == Path("/mine/x")
    assert paths.on_host("/checkpoints/x") == tmp_path / "volumes" / "default" / "mnist-checkpoints" / "x"
    assert paths.on_host("/elsewhere") == Path("/elsewhere")
    assert paths.claims() == ["mnist-checkpoints", "shared"]
