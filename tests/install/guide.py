"""What the pages of docs/concepts/torch-distributed take from the lessons: differences, and pictures of exchanges."""

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

from tests.install.chart import ROOT
from tests.lessons.draw import pictures

GUIDE = ROOT / "docs" / "concepts" / "torch-distributed"
PICTURES = GUIDE / "pictures"
DRAWN = ("collectives", "groups", "p2p")
_LESSONS = ROOT / "trainer_app" / "ddptrain" / "lessons"
_DIFF = re.compile(r"^```diff\n--- (\w+)\.py\n\+\+\+ (\w+)\.py\n.*?^```$", re.DOTALL | re.MULTILINE)


def with_differences(page: str) -> str:
    """Return the page with every block of the kind diff as it has to be: the change of a lesson's ``main``."""
    return _DIFF.sub(lambda found: f"```diff\n{difference(found[1], found[2])}```", page)


def difference(old: str, new: str) -> str:
    """Return the unified diff of two lessons' ``main``, without line numbers."""
    sources = [_main_of(_LESSONS / f"{name}.py").splitlines(keepends=True) for name in (old, new)]
    lines = difflib.unified_diff(*sources, f"{old}.py", f"{new}.py", n=2, lineterm="\n")
    return "".join("@@\n" if line.startswith("@@") else line.replace("py\n\n", "py\n") for line in lines)


def _main_of(path: Path) -> str:
    source = path.read_text(encoding="utf-8")
    [found] = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    return f"{ast.get_source_segment(source, found)}\n"


def draw_pictures() -> None:
    """Run the lessons whose exchanges are drawn, with four ranks."""
    for old in PICTURES.glob("*.svg"):
        old.unlink()
    for lesson in DRAWN:
        command = [sys.executable, "-m", "ddptrain", "lesson", lesson, "--nproc-per-node", "4"]
        done = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
        for file, picture in pictures(done.stdout):
            (PICTURES / file).write_text(picture, encoding="utf-8")


def write() -> None:
    """Write the pictures and the differences."""
    for path in GUIDE.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        if (new := with_differences(text)) != text:
            path.write_text(new, encoding="utf-8")
    draw_pictures()
