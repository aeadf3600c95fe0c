"""Make the pictures of a training in which a rank is killed: ``make pictures``.

The training is that of manifests/examples/mnist-cpu.yaml with more epochs, in local mode: two nodes of two ranks, which
are restarted in place. It needs MNIST, Chromium and a few minutes.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from tests.kind.packages import require

ROOT = Path(__file__).resolve().parents[2]
CURVES = ROOT / "docs" / "reference" / "curves.svg"
PAGE = ROOT / "docs" / "reference" / "job-report.png"
_ARGUMENTS = 'args=[train, --epochs, "4", --checkpoint-every, "50", --chaos, "kill:3:390"]'
_COLOURS = 128  # in the picture; with all of them it would have twice the size
TIMEOUT = 120  # seconds; only a hang takes that long
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def training(data: Path) -> list[object]:
    """Return the command that trains."""
    example = ROOT / "manifests" / "examples" / "mnist-cpu.yaml"
    return ["ddpjob", "run", example, "--set", _ARGUMENTS, "--", "--data-dir", data]


def draw() -> None:
    """Write all pictures of the training."""
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "mnist-cpu.html"
        _run("ddpjob", "plot", "mnist-cpu", "-f", CURVES)
        _run("ddpjob", "report", "mnist-cpu", "-f", page)
        _photograph(page, PAGE, until="footer")


def _run(program: object, *arguments: object) -> None:
    command = [Path(sys.executable).with_name(str(program)), *map(str, arguments)]
    subprocess.run(command, check=True, timeout=1800)


def _photograph(page: Path, picture: Path, *, until: str) -> None:
    """Write the part of the page above the element."""
    height = round(_evaluate(page, f"document.querySelector('{until}').getBoundingClientRect().top"))
    _chromium(page, f"--screenshot={picture}", height=height)
    Image.open(picture).convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(f"wrote {picture}; look at it", file=sys.stderr)


def _chromium(page: Path, *options: str, height: int = 800) -> str:
    """Load the page in a window of that height, in pixels, and return what the browser prints."""
    path = shutil.which("chromium")
    assert path is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        window = (f"--user-data-dir={profile}", f"--window-size=1100,{height}")
        command = [path, *_OPTIONS, *window, *options, page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    return done.stdout


def _evaluate(page: Path, expression: str) -> Any:
    """Return the value of a JavaScript expression in a copy of the page without its policy, which refuses scripts."""
    script = f"<script>document.documentElement.dataset.found = JSON.stringify({expression})</script>"
    text = _POLICY.sub("", page.read_text())
    assert text != page.read_text(), "the page has a policy"
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"
        copy.write_text(text + script)
        found = re.search(r'data-found="([^"]*)"', _chromium(copy, "--dump-dom"))
    assert found is not None
    return json.loads(html.unescape(found[1]))


def data_dir() -> Path:
    """Return the directory of the MNIST files that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.ddptrain.pictures")
    parser.add_argument("--data-dir", type=Path, required=True, help="directory of the MNIST files")
    given: Path = parser.parse_args().data_dir
    return given.resolve()


def main() -> None:
    """Train, and make the pictures."""
    data = data_dir()
    require("chromium")
    with tempfile.TemporaryDirectory() as state:
        os.environ["DDPJOB_STATE_DIR"] = state
        _run(*training(data))
        draw()


if __name__ == "__main__":
    main()
