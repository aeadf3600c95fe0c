"""The verb ``report``: what is known about a training as a page, as a picture or as JSON.

In the page every text is escaped, and no script is allowed.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from ddprun.checkpoint_files import read_newest
from ddprun.errors import DataError, Mismatch, UsageError
from ddprun.files import Json, dumps_json, write_result
from ddprun.reporting import metrics
from ddptrain import __version__
from ddptrain.config import Config
from ddptrain.report_page import figure
from ddptrain.report_page.history import History, Run, read_history

if TYPE_CHECKING:
    from ddptrain.report_page.mistakes import Mistakes

_SHOWN = ("model", "optimizer", "lr", "batch_size", "epochs", "seed", "sync", "dtype", "shift", "label_smoothing")
_VERSIONS = ("torch", "bf16", "threads", "isa", "cpu", "gpu", "cuda")
MISSES = 24  # images in the gallery


@dataclass(frozen=True)
class Contents:
    """All that the page shows.

    Attributes:
        manifest: of the newest valid checkpoint; empty if there is none.
        mistakes: of that checkpoint; None if it could not be examined, and ``problem`` says why.
    """

    name: str
    history: History
    manifest: Mapping[str, Any]
    mistakes: "Mistakes | None"
    problem: str

    @property
    def is_finished(self) -> bool:
        return bool(self.history.total_steps) and self.history.last_step >= (self.history.total_steps or 0)

    @property
    def speed(self) -> float | None:
        """The median of the samples per second."""
        return median(found) if (found := [s.speed for s in self.history.steps if s.speed is not None]) else None

    @property
    def seconds(self) -> float:
        """From the start of the first run to the last row, restarts included."""
        began, ended = ([getattr(run, name) for run in self.history.runs] for name in ("began", "ended"))
        return max(0.0, max(filter(None, ended), default=0.0) - min(filter(None, began), default=0.0))


def report(config: Config, directory: Path, *, out: str, svg: str, print_json: bool) -> int:
    """Write the page to ``out``, the curves to ``svg``, or print JSON. Returns 0.

    Args:
        directory: of the training's checkpoints and metrics; or its metrics file, which a training prints.
        out: default: report.html in ``directory``, unless ``svg`` or ``print_json`` is given.
    Raises:
        DataMissing: there are no metrics. VolumeError: a file cannot be written.
    """
    if directory.is_file() and directory.parent.name == metrics.FOLDER:
        directory = directory.parent.parent
    history = read_history(directory)
    if svg:
        _write(Path(svg), figure.drawing(history))
    if print_json or out or not svg:
        contents = examine(config, directory, history)
        if contents.problem:
            print(f"warning: no confusion matrix: {contents.problem}", file=sys.stderr)
        if print_json:
            print(dumps_json(as_json(contents)))
        if out or not print_json:
            _write(Path(out) if out else directory / "report.html", as_html(contents))
    return 0


def examine(config: Config, directory: Path, history: History) -> Contents:
    """Return what the page shows; without a checkpoint or without the data, it has no mistakes."""
    manifest: dict[str, Any] = {}
    mistakes, problem = None, ""
    try:
        saved, content = read_newest(directory)
        manifest = saved.manifest
        from ddptrain.report_page.mistakes import find_mistakes  # imports torch

        mistakes = find_mistakes(config, saved, content, MISSES)
    except (DataError, Mismatch, UsageError) as error:
        problem = f"{error}; next: {error.next_step}" if error.next_step else str(error)
    return Contents(directory.resolve().name, history, manifest, mistakes, problem)


def _write(path: Path, text: str) -> None:
    write_result(path, text.encode(errors="replace"))
    print(f"wrote {path}", file=sys.stderr)


def as_html(contents: Contents) -> str:
    """Return the page."""
    figure.TEMPLATES.filters["duration"] = duration
    history, config = contents.history, contents.manifest.get("config") or {}
    return figure.TEMPLATES.get_template("page.html.j2").render(
        contents=contents,
        history=history,
        style=figure.STYLE,
        curves=[Markup(figure.drawing(history, width, is_page=True)) for width in (960, 400)],  # noqa: S704 - escapes its texts
        last=history.evaluations[-1] if history.evaluations else None,
        bars={run.number: _bar(run, contents) for run in history.runs},
        settings={name: config[name] for name in _SHOWN if name in config},
        versions={name: contents.manifest[name] for name in _VERSIONS if contents.manifest.get(name) is not None},
        version=__version__,
    )


def as_json(contents: Contents) -> Json:
    """Return the numbers of the page."""
    history, mistakes = contents.history, contents.mistakes
    place = {name: contents.manifest[name] for name in ("run", "step")} if contents.manifest else None
    worst = [{k: v for k, v in asdict(miss).items() if k != "image"} for miss in mistakes.worst] if mistakes else []
    return {
        "schema": 1, "name": contents.name, "data": history.data, "finished": contents.is_finished,
        "step": history.last_step, "totalSteps": history.total_steps, "seconds": round(contents.seconds, 3),
        "samplesPerSecond": contents.speed, "restarts": len(history.restarts),
        "runs": [asdict(run) for run in history.runs],
        "steps": [asdict(step) for step in history.steps],
        "lost": [asdict(step) for step in history.lost],
        "evaluations": [asdict(one) for one in history.evaluations],
        "checkpoint": place, "config": contents.manifest.get("config"),
        "confusion": mistakes.confusion if mistakes else None, "misses": worst, "problem": contents.problem or None,
    }  # fmt: skip


def duration(seconds: float) -> str:
    """Return the time in at most two units, such as ``1 h 20 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, hours = divmod(round(seconds), 60), divmod(round(seconds / 60), 60)
    return f"{minutes[0]} min {minutes[1]} s" if seconds < 3600 else f"{hours[0]:,} h {hours[1]} min"


def _bar(run: Run, contents: Contents) -> dict[str, float]:
    """Return where the run lies in the time of the training, in percent."""
    first = min((one.began for one in contents.history.runs if one.began), default=0.0)
    whole = contents.seconds or 1.0
    left = 100 * max(0.0, (run.began or first) - first) / whole
    width = 100 * max(0.0, (run.ended or first) - (run.began or first)) / whole
    return {"left": min(left, 99.0), "width": max(1.0, min(width, 100 - left))}
