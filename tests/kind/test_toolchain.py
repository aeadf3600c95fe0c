"""Unit tests of the pinned programs' cache: keys, lookups and expiry."""

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kind import toolchain
from tests.kind.cache import forget_unused, scratch_folder
from tests.kind.toolchain import MODULES, Module, ToolchainError, binary, module_key

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """A Go module that a test may change."""
    monkeypatch.setattr(toolchain, "_GO_MODULES", tmp_path)
    folder = tmp_path / "thing"
    folder.mkdir()
    (folder / "go.mod").write_text("module example.invalid/thing\n")
    (folder / "go.sum").write_text("one h1:x=\n")
    return Module("thing", {"thing": "example.invalid/thing"})


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


def test_key_is_stable_and_changes_with_each_input(module: Module) -> None:
    base = module_key(module, "go1.25")
    assert module_key(module, "go1.25") == base
    assert module_key(module, "go1.26") != base
    assert module_key(replace(module, variables={"main.version": "2"}), "go1.25") != base
    (module.path / "go.sum").write_text("one h1:y=\n")
    assert module_key(module, "go1.25") != base


def test_missing_go_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"Go is not installed.*install Go 1.25 or newer"):
        binary("pause")


def test_looking_up_a_program_never_builds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "go").write_text("#!/bin/sh\necho $@ >> $0.log; echo go1.99\n")
    (tmp_path / "go").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("DDPJOB_CACHE", str(tmp_path / "cache"))
    toolchain._go_version.cache_clear()
    try:
        with pytest.raises(ToolchainError, match=r"pause is not built.*python -m tests.kind prepare pause"):
            binary("pause")
    finally:
        toolchain._go_version.cache_clear()
    assert {line.split()[0] for line in (tmp_path / "go.log").read_text().splitlines()} == {"env"}


def test_cache_entries_unused_for_two_weeks_are_deleted(tmp_path: Path) -> None:
    for name in ("used", "unused"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    long_ago = time.time() - 15 * 24 * 3600
    os.utime(tmp_path / "unused", (long_ago, long_ago))
    forget_unused(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["used"]


def test_scratch_folders_of_dead_processes_are_deleted_and_others_kept(
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
