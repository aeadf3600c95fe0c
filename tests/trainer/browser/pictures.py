"""Make docs/curves.svg and docs/report.png from a training in which a rank is killed: ``make pictures``.

The training is that of manifests/examples/mnist-cpu.yaml with more epochs, in local mode: two nodes of two ranks, and
the operator restarts the group. It needs MNIST, Chromium and a few minutes.
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
from tests.trainer.browser.chromium import browser

ROOT = Path(__file__).resolve().parents[3]
CURVES, PAGE = ROOT / "docs" / "curves.svg", ROOT / "docs" / "report.png"
_ARGUMENTS = 'args=[train, --epochs, "4", --checkpoint-every, "50", --chaos, "kill:3:390"]'
_COLOURS = 128  # in the picture; with all of them it would have twice the size


def train(state: Path, data: Path) -> Path:
    """Train below ``state`` and return the checkpoint directory."""
    example = ROOT / "manifests" / "examples" / "mnist-cpu.yaml"
    command = ["run", example, "--state-dir", state, "--data-dir", data, "--set", _ARGUMENTS]
    subprocess.run([Path(sys.executable).with_name("ddpjob"), *command], check=True, timeout=1800)
    return state / "volumes" / "default" / "mnist-cpu-checkpoints"


def draw(directory: Path, data: Path) -> None:
    """Write both pictures of the training in ``directory``."""
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "report.html"
        command = ["report", directory, "--data-dir", data, "--out", page, "--svg", CURVES]
        subprocess.run([Path(sys.executable).with_name("ddptrain"), *command], check=True, timeout=600)
        with browser() as chromium:
            chromium.open(page)
            height = round(chromium.evaluate("document.querySelector('#settings').getBoundingClientRect().top"))
            whole = Image.open(io.BytesIO(chromium.screenshot(height=height)))
    whole.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(PAGE, optimize=True)
    print(f"wrote {PAGE}; look at both", file=sys.stderr)


def main() -> None:
    """Train, and make the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.trainer.browser.pictures")
    parser.add_argument("--data-dir", type=Path, required=True, help="directory of the MNIST files")
    data = parser.parse_args().data_dir.resolve()
    require("chromium")
    with tempfile.TemporaryDirectory() as state:
        draw(train(Path(state), data), data)


if __name__ == "__main__":
    main()
