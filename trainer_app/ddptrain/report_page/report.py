"""The verb ``report``: collect what is known about a training, and write it as a page, as a picture or as JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ddptrain.checkpoint_files import read_newest
from ddptrain.config import Config
from ddptrain.errors import DataError, Mismatch, TrainerError, UsageError
from ddptrain.files import dumps_json, write_result
from ddptrain.report_page import figure, page
from ddptrain.report_page.history import History, read_history
from ddptrain.reporting import metrics

MISSES = 24  # images in the gallery


def report(config: Config, directory: Path, *, out: str, svg: str, as_json: bool) -> int:
    """Write the page to ``out``, the curves to ``svg``, or print JSON. Returns 0.

    Args:
        directory: of the training's checkpoints and metrics; or its metrics file, which a training prints.
        out: default: report.html in ``directory``, unless ``svg`` or ``as_json`` is given.
    Raises:
        DataMissing: there are no metrics. VolumeError: a file cannot be written.
    """
    if directory.is_file() and directory.parent.name == metrics.FOLDER:
        directory = directory.parent.parent
    history = read_history(directory)
    if svg:
        _write(Path(svg), figure.standalone(history))
    if as_json or out or not svg:
        contents = examine(config, directory, history)
        if contents.problem:
            print(f"warning: no confusion matrix: {contents.problem}", file=sys.stderr)
        if as_json:
            print(dumps_json(page.as_json(contents)))
        if out or not as_json:
            _write(Path(out) if out else directory / "report.html", page.as_html(contents))
    return 0


def examine(config: Config, directory: Path, history: History) -> page.Contents:
    """Return what the page shows; without a checkpoint or without the data, it has no mistakes."""
    manifest: dict[str, Any] = {}
    mistakes, problem = None, ""
    try:
        saved, content = read_newest(directory)
        manifest = saved.manifest
        from ddptrain.report_page.mistakes import find_mistakes  # imports torch

        mistakes = find_mistakes(config, saved, content, MISSES)
    except (DataError, Mismatch, UsageError) as error:
        problem = _sentence(error)
    return page.Contents(directory.resolve().name, history, manifest, mistakes, problem)


def _sentence(error: TrainerError) -> str:
    return f"{error}; next: {error.next_step}" if error.next_step else str(error)


def _write(path: Path, text: str) -> None:
    write_result(path, text.encode(errors="replace"))
    print(f"wrote {path}", file=sys.stderr)
