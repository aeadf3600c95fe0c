"""What a user sees of the preparation of programs, with a stand-in for Go: failures, Ctrl-C, the demo's node image."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import demo
from tests.kind import node_image
from tests.kind.docker import ensure_engine
from tests.processes import eventually

REPOSITORY = Path(__file__).resolve().parents[2]
# `go env` prints a version. `go build` notes its start, waits while the file "hold" exists, and writes a program; it
# fails for the program named in "broken".
FAKE_GO = """\
#!/bin/sh
here=$(dirname "$0")
[ "$1" = env ] && { echo go1.99; exit; }
while [ "$1" != -o ]; do shift; done
touch "$here/builds"
while [ -e "$here/hold" ]; do sleep 0.02; done
[ "$(cat "$here/broken" 2>/dev/null)" = "$(basename "$2")" ] && { echo "proxy: no route to host" >&2; exit 1; }
echo program > "$2"
"""


@pytest.fixture
def go(tmp_path: Path) -> Path:
    """Return a folder with a stand-in for Go. A file "hold" in it stops builds; "builds" is there when one runs."""
    folder = tmp_path / "go"
    folder.mkdir()
    (folder / "go").write_text(FAKE_GO)
    (folder / "go").chmod(0o755)
    return folder


def start_module(go: Path, *arguments: str, path: str | None = None) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "PATH": path or f"{go}:{os.environ['PATH']}",
        "DDPJOB_CACHE": str(go / "cache"),
    }
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_last_line_of_a_failed_preparation_says_which_part_and_why(go: Path) -> None:
    """Seen: `make prepare` ended with "Error 1" alone, and the reason was hundreds of lines above."""
    (go / "broken").write_text("etcd")
    command = ("tests.kind", "prepare", "etcd", "helm")
    _, progress = start_module(go, *command).communicate(timeout=60)
    last = progress.splitlines()[-1]
    assert last.startswith("error: not prepared: etcd: etcd could not be built from ")
    assert last.endswith(" … proxy: no route to host")
    assert "helm" not in last
    _, progress = start_module(go, *command, path=str(go / "nothing")).communicate(timeout=60)
    assert progress.splitlines()[-1].startswith("error: not prepared: etcd, helm: Go is not installed.")


def test_interrupted_demo_exits_with_130_and_no_traceback(go: Path) -> None:
    (go / "hold").touch()
    process = start_module(go, "tests.e2e.demo")
    eventually("the build runs", (go / "builds").exists)
    process.send_signal(signal.SIGINT)
    _, progress = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "==> interrupted. What was created keeps running. " in progress
    assert "Traceback" not in progress
    assert re.search(r"\n  building kubectl: stopped after [\d.]+ s\n", progress)


def test_node_image_of_kind_that_the_engine_has_is_used_by_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the Docker client answers as an engine with three images, without a registry."""
    client = tmp_path / "docker"
    listed = "kindest/node:v1.9.1 kindest/node:<none> kindest/node:v1.34.0"
    client.write_text(
        f'#!/bin/sh\n[ "$1" = images ] && printf "%s\\n" {" ".join(map(repr, listed.split()))} || echo 1\n'
    )
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DDPJOB_NODE_IMAGE", "")  # restored after the test
    for module in ("kind.node_image", "e2e.demo"):
        monkeypatch.setattr(f"tests.{module}.registry_reachable", lambda: False)
    monkeypatch.setenv("DDPJOB_INSTALLED", "kind kubectl helm")
    demo.use_what_is_installed()
    assert node_image.node_programs() == []
    assert node_image.node_image(ensure_engine(install=False)) == "kindest/node:v1.34.0"
    assert os.environ["DDPJOB_INSTALLED"] == "kind kubectl helm"


def test_node_image_that_is_built_for_the_demo_has_the_pinned_kubectl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: its key was sought in the folder of the kubectl of PATH."""
    monkeypatch.setenv("PATH", "/nowhere")  # no engine
    monkeypatch.setenv("DDPJOB_NODE_IMAGE", "")
    monkeypatch.setenv("DDPJOB_INSTALLED", "kind kubectl helm")
    for module in ("kind.node_image", "e2e.demo"):
        monkeypatch.setattr(f"tests.{module}.registry_reachable", lambda: False)
    demo.use_what_is_installed()
    assert "kubectl" in node_image.node_programs()
    assert os.environ["DDPJOB_INSTALLED"] == "kind helm"
