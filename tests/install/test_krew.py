"""The plugin for krew: its manifest, and the script that it installs."""

from __future__ import annotations

import io
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from ddpjob.version import __version__
from tests.install import krew

# The fields that krew knows, in its v1alpha2.
FIELDS = {"apiVersion", "kind", "metadata", "spec"}
SPEC = {"version", "homepage", "shortDescription", "description", "caveats", "platforms"}
PLATFORM = {"selector", "uri", "sha256", "bin", "files"}


def test_the_manifest_fits_the_archive_and_the_package() -> None:
    manifest = yaml.safe_load(krew.text())
    spec = manifest["spec"]
    assert manifest.keys() == FIELDS
    assert spec.keys() <= SPEC
    assert (manifest["apiVersion"], manifest["kind"]) == ("krew.googlecontainertools.github.com/v1alpha2", "Plugin")
    assert manifest["metadata"]["name"] == krew.MANIFEST.stem
    assert spec["version"] == f"v{__version__}"
    assert len(spec["shortDescription"]) <= 50
    for platform in spec["platforms"]:
        assert platform.keys() <= PLATFORM
        assert platform["uri"].startswith("https://") and platform["uri"].endswith(f"v{__version__}/{krew.ARCHIVE}")
        assert re.fullmatch(r"[0-9a-f]{64}", platform["sha256"])
        with zipfile.ZipFile(io.BytesIO(krew.archive())) as archive:
            assert {"LICENSE", platform["bin"]} == set(archive.namelist())
            assert archive.getinfo(platform["bin"]).external_attr >> 16 == 0o755


@pytest.mark.parametrize(("tool", "first"), [("uvx", "--quiet --from"), ("pipx", "run --quiet --spec")])
def test_the_script_runs_the_package_of_its_version(tmp_path: Path, tool: str, first: str) -> None:
    runner = tmp_path / tool
    runner.write_text('#!/bin/sh\necho "$@"\n')
    runner.chmod(0o755)
    done = subprocess.run(
        [krew.SCRIPT, "get", "a b"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"{first} ddpjob[plot]=={__version__} kubectl-ddpjob get a b\n"


def test_the_script_says_what_it_needs(tmp_path: Path) -> None:
    done = subprocess.run(
        [krew.SCRIPT, "get"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: ", "hint:  ", "next:  "]
