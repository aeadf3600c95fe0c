"""The plugin for krew: `python -m tests.install.krew DIR` writes its archive, and ``make generate`` its manifest.

The archive has the same bytes wherever it is made, so that the manifest can hold its digest. A release publishes the
package, puts the archive at the address in the manifest (``Homepage`` in pyproject.toml), and proposes the manifest to
krew's index.
"""

import hashlib
import io
import sys
import tomllib
import zipfile
from pathlib import Path

import yaml

from ddpjob.version import __version__
from tests.install.chart import ROOT, Object

MANIFEST = ROOT / "manifests" / "krew" / "ddpjob.yaml"
SCRIPT = ROOT / "manifests" / "krew" / "kubectl-ddpjob"
ARCHIVE = f"kubectl-ddpjob-{__version__}.zip"
HOMEPAGE = tomllib.loads((ROOT / "operator" / "ddpjob" / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
RELEASES = f"{HOMEPAGE}/releases"
HEAD = "# Generated from tests/install/krew.py by `make generate`; do not edit.\n"


def archive() -> bytes:
    """Return the archive: the script and the license."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as files:
        for path, mode in ((SCRIPT, 0o755), (ROOT / "LICENSE", 0o644)):
            entry = zipfile.ZipInfo(path.name)  # of 1980
            entry.create_system, entry.external_attr = 3, mode << 16
            files.writestr(entry, path.read_bytes())
    return written.getvalue()


def manifest() -> Object:
    """Return the manifest, of the kind that krew's index holds."""
    platform = {
        "selector": {"matchExpressions": [{"key": "os", "operator": "In", "values": ["darwin", "linux"]}]},
        "uri": f"{RELEASES}/v{__version__}/{ARCHIVE}",
        "sha256": hashlib.sha256(archive()).hexdigest(),
        "bin": SCRIPT.name,
    }
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "ddpjob"},
        "spec": {
            "version": f"v{__version__}",
            "homepage": HOMEPAGE,
            "shortDescription": "Run and follow PyTorch DDP jobs",
            "description": "Lists, follows, explains and changes DDPJobs: multi-node PyTorch trainings on Kubernetes.\n"
            "The cluster needs the DDPJob operator.\n",
            "caveats": "It runs a Python package with uv or pipx, of which one must be installed.\n",
            "platforms": [platform],
        },
    }


def text() -> str:
    """Return the manifest as YAML."""
    return HEAD + yaml.safe_dump(manifest(), sort_keys=False, width=120)


if __name__ == "__main__":
    (Path(sys.argv[1]) / ARCHIVE).write_bytes(archive())
