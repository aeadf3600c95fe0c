"""Make the pictures of a training in which a rank is killed, docs/*.png and docs/curves.svg: ``make pictures``.

The training is that of manifests/examples/mnist-cpu.yaml with more epochs, in local mode: two nodes of two ranks, which
are restarted in place. It needs MNIST, Chromium and a few minutes.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.kind.packages import require
from tests.trainer.browser.chromium import Browser, browser

ROOT = Path(__file__).resolve().parents[3]
CURVES = ROOT / "docs" / "curves.svg"
PAGE, PAGE_OF_JOB = ROOT / "docs" / "report.png", ROOT / "docs" / "job-report.png"
_ARGUMENTS = 'args=[train, --epochs, "4", --checkpoint-every, "50", --chaos, "kill:3:390"]'
_COLOURS = 128  # in the picture; with all of them it would have twice the size


def train(state: Path, data: Path) -> None:
    """Train below ``state``."""
    example = ROOT / "manifests" / "examples" / "mnist-cpu.yaml"
    _run("ddpjob", "run", example, "--state-dir", state, "--data-dir", data, "--set", _ARGUMENTS)


def draw(state: Path, data: Path) -> None:
    """Write all pictures of the training below ``state``."""
    directory = state / "volumes" / "default" / "mnist-cpu-checkpoints"
    with tempfile.TemporaryDirectory() as scratch, browser() as chromium:
        page, page_of_job = Path(scratch) / "report.html", Path(scratch) / "mnist-cpu.html"
        _run("ddpjob", "plot", "mnist-cpu", "--state-dir", state, "-o", CURVES)
        _run("ddpjob", "report", "mnist-cpu", "--state-dir", state, "-o", page_of_job)
        _run("ddptrain", "report", directory, "--data-dir", data, "--out", page)
        _photograph(chromium, page_of_job, PAGE_OF_JOB, until="footer")
        _photograph(chromium, page, PAGE, until="#settings")


def _run(program: str, *arguments: object) -> None:
    command = [Path(sys.executable).with_name(program), *map(str, arguments)]
    subprocess.run(command, check=True, timeout=1800)


def _photograph(chromium: Browser, page: Path, picture: Path, *, until: str) -> None:
    """Write the part of the page above the element."""
    chromium.open(page)
    height = round(chromium.evaluate(f"document.querySelector('{until}').getBoundingClientRect().top"))
    whole = Image.open(io.BytesIO(chromium.screenshot(height=height)))
    whole.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(f"wrote {picture}; look at it", file=sys.stderr)


def main() -> None:
    """Train, and make the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.trainer.browser.pictures")
    parser.add_argument("--data-dir", type=Path, required=True, help="directory of the MNIST files")
    data = parser.parse_args().data_dir.resolve()
    require("chromium")
    with tempfile.TemporaryDirectory() as state:
        train(Path(state), data)
        draw(Path(state), data)


if __name__ == "__main__":
    main()
