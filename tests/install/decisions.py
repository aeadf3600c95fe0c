"""Writes docs/develop/decisions/README.md, the list of the decisions: ``make generate``.

A decision is a file ``NNNN-title.md`` with a heading ``# NNNN Title`` and a line ``**Status:** …``. What its status
says beside "accepted" is in the list, so that a reader finds what replaces a decision.
"""

import re
from pathlib import Path

from tests.install.chart import ROOT

FOLDER = ROOT / "docs" / "develop" / "decisions"
INDEX = FOLDER / "README.md"
_HEAD = """# Decisions

Each note gives the decision, the reasons and the rejected alternatives. Add one for every change of direction, and
change the status of a decision that it replaces. Generated from the notes by `make generate`; do not edit.

"""


def notes(folder: Path = FOLDER) -> list[Path]:
    """Return the files of the decisions, by number."""
    return sorted(path for path in folder.glob("*.md") if path != INDEX)


def index(folder: Path = FOLDER) -> str:
    """Return the whole page.

    Raises:
        ValueError: if a note has another number than its name, or no status.
    """
    return _HEAD + "".join(_line(path) for path in notes(folder))


def _line(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    title = re.match(rf"# {path.name[:4]} (.+)\n\n\*\*Status:\*\* (accepted|superseded)(.*?)\n\n", text, re.DOTALL)
    if not title:
        raise ValueError(f"{path.name} does not begin with `# {path.name[:4]} TITLE` and a `**Status:**`")
    rest = " ".join(title[3].split()).lstrip(". ")
    shown = title[2] + " " + rest if title[2] == "superseded" else rest
    return f"- [{path.name[:4]} {title[1]}]({path.name}){f': {shown}' if shown else ''}\n"
