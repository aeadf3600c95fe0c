"""What the test cluster must not do to the machine, and that its programs are pinned."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.kind import dockerd, packages, toolchain
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


def test_every_go_module_is_listed_and_pinned() -> None:
    folders = {path.name for path in (REPOSITORY / "tests/kind/go").iterdir()}
    assert folders == {known.folder for known in MODULES}
    for known in MODULES:
        if "require" in (known.path / "go.mod").read_text():
            assert (known.path / "go.sum").stat().st_size > 0, known.folder


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
