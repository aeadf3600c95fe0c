"""The pinned binaries: what decides their place in the cache, and that the cache holds under two processes at once."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kind import toolchain
from tests.kind.cache import digest, forget_unused, scratch_folder
from tests.kind.toolchain import BINARIES, MODULES, Module, ToolchainError, binary, module_key

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """A Go module of its own, to change at will."""
    monkeypatch.setattr(toolchain, "_GO_MODULES", tmp_path)
    folder = tmp_path / "thing"
    folder.mkdir()
    (folder / "go.mod").write_text("module example.invalid/thing\n")
    (folder / "go.sum").write_text("one h1:x=\n")
    return Module("thing", {"thing": "example.invalid/thing"})


def test_every_folder_of_go_modules_is_known_and_pinned() -> None:
    folders = {path.name for path in (REPOSITORY / "tests/kind/go").iterdir()}
    assert folders == {known.folder for known in MODULES}
    for known in MODULES:
        if "require" in (known.path / "go.mod").read_text():
            assert (known.path / "go.sum").stat().st_size > 0, known.folder


def test_kubernetes_and_all_its_parts_are_pinned_to_the_stamped_version() -> None:
    lines = (REPOSITORY / "tests/kind/go/kubernetes/go.mod").read_text().splitlines()
    assert f"require k8s.io/kubernetes {toolchain.KUBERNETES_VERSION}" in lines
    parts = [line.split() for line in lines if line.startswith("\tk8s.io/") and " => " in line]
    assert len(parts) > 25
    assert {words[-1] for words in parts} == {toolchain.KUBERNETES_VERSION.replace("v1", "v0")}
    assert all(words[0] == words[2] for words in parts)


def test_digest_tells_apart_lists_that_only_differ_in_where_a_part_ends() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("ab", "c") == digest("ab", "c")


def test_digest_sees_that_a_script_became_executable(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o644)
    before = digest(files=[script])
    script.chmod(0o755)
    assert digest(files=[script]) != before


def test_key_is_stable_and_changes_with_each_input(module: Module) -> None:
    base = module_key(module, "go1.25")
    assert module_key(module, "go1.25") == base
    assert module_key(module, "go1.26") != base
    assert module_key(replace(module, variables={"main.version": "2"}), "go1.25") != base
    (module.path / "go.sum").write_text("one h1:y=\n")
    assert module_key(module, "go1.25") != base


def test_unknown_binary_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ToolchainError, match=r"no binary is called 'kubctl'; there are: kube-apiserver, .*kubectl"):
        binary("kubctl")


def test_without_go_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"Go is not installed.*Install Go 1.25 or newer"):
        binary("pause")


def test_every_program_has_one_name_only() -> None:
    assert len(BINARIES) == len(set(BINARIES))


needs_go = pytest.mark.skipif(
    os.environ.get("CI") != "true" and subprocess.run(["sh", "-c", "command -v go"], check=False).returncode != 0,
    reason="Go is not installed (https://go.dev/doc/install)",
)


@needs_go
def test_two_processes_at_once_build_a_binary_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.kind", "binary", "pause"]
    environment = {**os.environ, "DDPJOB_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    (path,) = {stdout.strip() for stdout, _ in outputs}
    assert Path(path).is_relative_to(tmp_path)
    assert os.access(path, os.X_OK)
    assert sum("▸ building pause" in stderr for _, stderr in outputs) == 1
    assert [entry.name for entry in Path(path).parent.iterdir()] == ["pause"]


@needs_go
def test_pause_waits_until_it_is_told_to_end() -> None:
    process = subprocess.Popen([binary("pause")])
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()


@needs_go
def test_runc_reduced_takes_out_one_capability_and_nothing_else(tmp_path: Path) -> None:
    capabilities = {"bounding": ["CAP_CHOWN", "CAP_SYS_RESOURCE", "CAP_KILL"], "effective": ["CAP_SYS_RESOURCE"]}
    config: dict[str, Any] = {
        "process": {"capabilities": capabilities, "args": ["<sh>"]},
        "linux": {"resources": {"memory": {"limit": 9223372036854771712}}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Whether runc itself is there, and what it says to this, does not matter: the file is changed before.
    subprocess.run(
        [binary("runc-reduced"), "--version", "--bundle", tmp_path], capture_output=True, timeout=30, check=False
    )
    changed = json.loads((tmp_path / "config.json").read_text())
    assert changed["process"].pop("capabilities") == {"bounding": ["CAP_CHOWN", "CAP_KILL"], "effective": []}
    config["process"].pop("capabilities")
    assert changed == config


def test_cache_forgets_what_was_not_used_for_two_weeks(tmp_path: Path) -> None:
    for name in ("used", "unused"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    long_ago = time.time() - 15 * 24 * 3600
    os.utime(tmp_path / "unused", (long_ago, long_ago))
    forget_unused(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["used"]


def test_work_in_progress_of_killed_processes_goes_away_and_that_of_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDPJOB_CACHE", str(tmp_path))
    with subprocess.Popen(["true"]) as ended:
        pass
    dead, alive = (tmp_path / "scratch" / f"{number}-x" for number in (ended.pid, os.getppid()))
    for folder in (dead, alive):
        folder.mkdir(parents=True)
    with scratch_folder() as own:
        assert sorted((tmp_path / "scratch").iterdir()) == sorted([alive, own])
    assert list((tmp_path / "scratch").iterdir()) == [alive]
