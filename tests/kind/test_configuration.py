"""What the test cluster must not do to the machine, and that its programs are pinned."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.kind import dockerd, images, packages, toolchain
from tests.kind.command import CommandError
from tests.kind.toolchain import MODULES, binary

REPOSITORY = Path(__file__).resolve().parents[2]


def test_our_engine_shares_no_path_and_no_namespace_with_an_installed_docker() -> None:
    config = dockerd.configuration(runc_reduced=None)
    for key in ("hosts", "data-root", "exec-root", "pidfile", "containerd-namespace", "containerd-plugins-namespace"):
        assert "ddpjob" in str(config[key]), key
    assert "default-runtime" not in config
    reduced = dockerd.configuration(runc_reduced=Path("/x/runc-reduced"))
    assert reduced["default-runtime"] == "reduced"


def test_stop_does_not_kill_another_program_with_the_recorded_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            (tmp_path / "docker.pid").write_text(str(stranger.pid))
            monkeypatch.setattr(dockerd, "_PID_FILE", tmp_path / "docker.pid")
            assert dockerd.stop() is False
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_packages_are_not_installed_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match=r"Not installed: dockerd, ip.*python -m tests.kind docker --install"):
        packages.require("dockerd", "ip")


@pytest.mark.parametrize(
    ("image", "code", "other"),
    [
        (images.OPERATOR, "operator/ddpjob_operator/controller/main.py", "trainer_app/"),
        (images.TRAINER, "trainer_app/ddptrain/cli.py", "operator/"),
    ],
    ids=["operator", "trainer"],
)
def test_an_image_is_made_of_its_own_distributions(image: images.Image, code: str, other: str) -> None:
    names = {str(file.relative_to(images._REPOSITORY)) for file in images._sources(image)}
    assert {code, image.dockerfile, "images/pip-install.sh", "requirements/build.txt"} <= names
    assert not [name for name in names if name.startswith((other, "tests/")) or "__pycache__" in name]


def test_every_go_module_is_listed_and_pinned() -> None:
    folders = {path.name for path in (REPOSITORY / "tests/kind/go").iterdir()}
    assert folders == {known.folder for known in MODULES}
    for known in MODULES:
        if "require" in (known.path / "go.mod").read_text():
            assert (known.path / "go.sum").stat().st_size > 0, known.folder


@pytest.mark.parametrize(
    ("folder", "version"),
    [
        ("kubernetes", toolchain.KUBERNETES_VERSION),
        ("kubernetes-1.36", toolchain.GANGS_VERSION),
        ("coscheduling", toolchain.KUBERNETES_VERSION),
    ],
)
def test_kubernetes_and_its_staging_modules_have_the_stamped_version(folder: str, version: str) -> None:
    lines = (REPOSITORY / "tests/kind/go" / folder / "go.mod").read_text().splitlines()
    itself = ("require k8s.io/kubernetes", "\tk8s.io/kubernetes => k8s.io/kubernetes")
    assert any(f"{line} {version}" in lines for line in itself)
    parts = [line.split() for line in lines if line.startswith("\tk8s.io/") and " => " in line]
    parts = [words for words in parts if words[0] != "k8s.io/kubernetes"]
    assert len(parts) > 25
    assert {words[-1] for words in parts} == {version.replace("v1", "v0")}
    assert all(words[0] == words[2] for words in parts)


def test_demo_uses_an_installed_program_and_tests_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: the demo compiled kind, kubectl and Helm for ten minutes beside those of the machine."""
    for name in ("kind", "kube-apiserver"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("DDPJOB_INSTALLED", raising=False)
    assert toolchain.installed("kind") is None
    monkeypatch.setenv("DDPJOB_INSTALLED", "helm kind")
    assert toolchain.build("kind") == binary("kind") == tmp_path / "kind"
    assert toolchain.installed("kube-apiserver") is None, "only the tests run it, with a pinned version"
