"""The verb ``report``: what is known about a training as a page, as a picture or as JSON.

In the page every text is escaped, and no script is allowed.
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ddpplot import figure, page
from ddpplot.history import History
from ddpplot.timeline import span
from ddprun.checkpoint_files import read_newest
from ddprun.errors import DataError, Mismatch, UsageError
from ddprun.files import Json, dumps_json, with_named_loss, write_result
from ddprun.reporting import metrics
from ddptrain import __version__
from ddptrain.config import Config
from ddptrain.report_page.history import read_history

if TYPE_CHECKING:
    from ddptrain.report_page.mistakes import Mistakes

_SHOWN = ("model", "optimizer", "lr", "batch_size", "epochs", "seed", "sync", "dtype", "shift", "label_smoothing")
_VERSIONS = ("torch", "bf16", "threads", "isa", "cpu", "gpu", "cuda")
_TEMPLATES = Environment(
    loader=PackageLoader("ddptrain.report_page"), undefined=StrictUndefined, autoescape=True, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
_STYLE = Markup((Path(__file__).parent / "templates" / "mistakes.css").read_text())  # noqa: S704 - a constant
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
    config, manifest = contents.manifest.get("config") or {}, contents.manifest
    mistakes = _TEMPLATES.get_template("mistakes.html.j2").render(
        mistakes=contents.mistakes, problem=contents.problem, step=manifest.get("step", 0)
    )
    settings = {name: config[name] for name in _SHOWN if name in config}
    versions = {name: manifest[name] for name in _VERSIONS if manifest.get(name) is not None}
    return page.as_html(
        page.Page(
            contents.name, f"ddptrain {__version__}", contents.history, settings=settings | versions,
            sections=[Markup(mistakes)], style=_STYLE,  # noqa: S704 - the template escapes its texts
        )
    )  # fmt: skip


def as_json(contents: Contents) -> Json:
    """Return the numbers of the page."""
    history, mistakes = contents.history, contents.mistakes
    (first, last), speed = span(history, None), history.throughput
    place = {name: contents.manifest[name] for name in ("run", "step")} if contents.manifest else None
    worst = [{k: v for k, v in asdict(miss).items() if k != "image"} for miss in mistakes.worst] if mistakes else []
    return {
        "schema": 1, "name": contents.name, "data": history.data, "finished": history.is_finished,
        "step": history.last_step, "totalSteps": history.total_steps, "seconds": round(last - first, 3),
        "samplesPerSecond": speed.median if speed.unit == "samples" else None, "restarts": len(history.restarts),
        "runs": [asdict(run) for run in history.runs],
        "steps": [with_named_loss(asdict(step)) for step in history.steps],
        "lost": [with_named_loss(asdict(step)) for step in history.lost],
        "evaluations": [asdict(one) for one in history.evaluations],
        "checkpoint": place, "config": contents.manifest.get("config"),
        "confusion": mistakes.confusion if mistakes else None, "misses": worst, "problem": contents.problem or None,
    }  # fmt: skip
