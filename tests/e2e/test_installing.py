"""Follow the pages about the installation, apply the plain manifests, uninstall and install again."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import PROGRESS_SECONDS
from tests.e2e.installation import ROOT, Installation
from tests.e2e.jobs import EXAMPLE
from tests.e2e.namespace import JobNamespace
from tests.install.test_docs import blocks
from tests.kind.command import run
from tests.kind.images import OPERATOR_TAG
from tests.kind.toolchain import binary

pytestmark = [pytest.mark.kind, pytest.mark.timeout(900, func_only=True)]
ELSEWHERE = re.compile(r"docker |kind load |make ")
"""Blocks that build and load images, which the cluster of the tests has under the same names, or make a cluster."""


@pytest.fixture
def checkout(tmp_path: Path, namespace: JobNamespace) -> Path:
    """Return a folder with what the pages use of a checkout, and a kubeconfig for the namespace of the test.

    The job is shorter: one epoch on the digits that the image contains.
    """
    for folder in ("charts", "manifests"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    job = tmp_path / EXAMPLE.relative_to(ROOT)
    job.write_text(re.sub(r"(?m)^  args: .*$", '  args: [train, --data, digits, --epochs, "1"]', job.read_text()))
    config = tmp_path / "kubeconfig"
    shutil.copy(namespace.kubectl.kubeconfig, config)
    head: list[str | Path] = [binary("kubectl"), "--kubeconfig", config, "config", "set-context", "--current"]
    run([*head, "--namespace", namespace.kubectl.namespace], timeout=60)
    return tmp_path


def test_install_and_quickstart_pages_work_word_for_word(
    checkout: Path, operator: Installation, trials_ended: None
) -> None:
    """Seen: the commands of the page loaded an image that the chart did not use."""
    folders = [binary("kubectl").parent, binary("helm").parent, Path(sys.executable).parent]
    environment = {
        "PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]]),
        "KUBECONFIG": str(checkout / "kubeconfig"),
        "DDPJOB_STATE_DIR": str(checkout / "local"),
    }
    pages = [ROOT / "docs" / "start" / name for name in ("install.md", "quickstart.md")]
    followed = [block for page in pages for block in blocks(page, "bash") if not ELSEWHERE.match(block)]
    operator.uninstall()
    try:
        printed = [
            run(["bash", "-euxo", "pipefail", "-c", block], cwd=checkout, env=environment, timeout=300).stdout
            for block in followed
        ]
    finally:
        operator.install(OPERATOR_TAG, progress_seconds=PROGRESS_SECONDS)
        operator.wait_until_ready()
    text = "".join(printed)
    assert "ok: operator is ready: ok" in text and "copied ddprun " in text, "both pods of helm test"
    assert "Succeeded  accuracy 0." in text
    copied = {path.name for path in (checkout / "mnist-cpu").rglob("*")}
    assert {"run-000001.jsonl", "step-000000045.pt"} <= copied
