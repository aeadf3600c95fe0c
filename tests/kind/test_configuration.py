"""Unit tests of the engine's and the cluster's configuration, and of running commands."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.kind import cluster_config, dockerd, images, node_store, packages
from tests.kind.command import CommandError, run

# What kubeadm 1.34 writes.
COREFILE = """\
.:53 {
    errors
    health {
       lameduck 5s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
       pods insecure
       fallthrough in-addr.arpa ip6.arpa
       ttl 30
    }
    prometheus :9153
    forward . /etc/resolv.conf {
       max_concurrent 1000
    }
    cache 30 {
       disable success cluster.local
       disable denial cluster.local
    }
    loop
    reload
    loadbalance
}
"""


def test_corefile_loses_forward_and_loop_and_nothing_else() -> None:
    forwarding = "forward . /etc/resolv.conf {\n       max_concurrent 1000\n    }\n"
    expected = COREFILE.replace(f"    {forwarding}", "")
    assert cluster_config.without_forwarding(COREFILE) == expected.replace("    loop\n", "")


def test_a_copied_store_shares_files_and_has_its_own_databases(tmp_path: Path) -> None:
    (tmp_path / "store" / "snapshots").mkdir(parents=True)
    for name in ("snapshots/library", "meta.db"):
        (tmp_path / "store" / name).write_text(name)
    node_store.copy(tmp_path / "store", tmp_path / "node")
    assert (tmp_path / "node" / "snapshots" / "library").samefile(tmp_path / "store" / "snapshots" / "library")
    assert not (tmp_path / "node" / "meta.db").samefile(tmp_path / "store" / "meta.db")
    assert (tmp_path / "node" / "meta.db").read_text() == "meta.db"


@pytest.mark.parametrize(
    ("bounding", "lacking"),
    [("000001ffffffffff", False), ("000001fffeffffff", True), ("0000000001000000", False), ("0", True)],
)
def test_missing_capability_is_read_from_the_bounding_set(bounding: str, lacking: bool) -> None:
    status = f"Name:\tx\nCapPrm:\t{'f' * 16}\nCapBnd:\t{bounding}\nCapAmb:\t0\n"
    assert dockerd.lacks_sys_resource(status) is lacking


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


def test_command_that_times_out_is_killed_and_its_output_shown() -> None:
    begin = time.monotonic()
    with pytest.raises(CommandError, match=r"timed out after 0.3 s: sh[^\n]*\nhalf"):
        run(["sh", "-c", "echo half; exec sleep 600"], timeout=0.3)
    assert time.monotonic() - begin < 30


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
