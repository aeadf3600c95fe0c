"""``ddpjob plot``: loss and throughput of a job with what happened, in the terminal, as a picture or as JSON."""

import json
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from ddpjob.cli.options import MetricsDir, Name
from ddpjob.cli.place import Where, find
from ddpjob.cli.text import is_coloured, one_line, time_text
from ddpjob.errors import DDPJobError, InvalidJobError

if TYPE_CHECKING:
    from ddpjob.cli.training import Training
    from ddpplot.history import History
    from ddpplot.job import Job

_WIDEST, _NARROWEST = 160, 40  # characters


def plot(
    name: Name,
    output: Annotated[
        Literal["text", "svg", "json"] | None,
        Option("--output", "-o", metavar="FORM", help="text, svg or json.", show_default="text"),
    ] = None,
    *,
    file: Annotated[
        Path | None,
        Option("--file", "-f", metavar="FILE", help="Write this file, whose name ends in .svg or .json."),
    ] = None,
    metrics: MetricsDir = None,
    where: Where,
) -> int:
    """Draw the loss and the throughput of a job over its steps, with its restarts, failures and saves.

    It needs metrics: of ddptrain, or of a script that calls ddprun.report. Those of a job on a cluster are read through
    a pod, as by ddpjob checkpoints. The JSON has the schema docs/reference/schemas/plot.json.

    \b
    Example:
      ddpjob plot mnist-cpu
    """
    require_ddpplot()
    form: str = output or "text"
    if file is not None:
        form = _form(file.expanduser(), output)
    from ddpjob.cli.training import plot_of, read_training

    with find(name, where) as client:
        training = read_training(client, name, metrics)
    if form == "text":
        width = max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))
        print("\n".join(text_lines(training, width, coloured=is_coloured())))
        return 0
    if form == "svg":
        from ddpplot.figure import drawing

        text = drawing(training.history)
    else:
        text = json.dumps(plot_of(training).wire(), indent=None if file else 2) + "\n"
    if file is None:
        print(text, end="")
    else:
        write_file(file.expanduser(), text, training.job)
    return 0


def require_ddpplot() -> None:
    """Raise ``DDPJobError`` unless the package that draws is installed, with what it needs."""
    try:
        import_module("ddpplot.recorded")
    except ModuleNotFoundError as error:
        raise DDPJobError(
            f"the package {error.name} is not installed",
            "ddpplot draws curves and pages; it belongs to the extra plot of ddpjob",
            "pip install 'ddpjob[plot]'",
        ) from error


def history_in(directory: Path) -> "History | None":
    """Return what the metrics in a directory hold; None without any or without ddpplot: it is only a picture."""
    try:
        from ddpplot import recorded
    except ModuleNotFoundError:
        return None
    try:
        return recorded.read_history(directory)
    except recorded.DataMissing:
        return None


def _form(file: Path, output: str | None) -> str:
    """Return the form of a file: the end of its name."""
    form = file.suffix.removeprefix(".")
    if form not in ("svg", "json") or output not in (None, form):
        raise InvalidJobError(
            f"--file {file}: it would not hold {output or 'svg or json'}",
            "the end of its name is the form, .svg or .json",
            "ddpjob report writes a page, FILE.html" if form.startswith("htm") else "-f plot.svg",
        )
    return form


def write_file(file: Path, text: str, about: "Job") -> None:
    """Write a file about a job that the user named, and say so on standard error."""
    try:
        file.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise DDPJobError(
            f"{file} cannot be written: {error.strerror}",
            "the command writes one file and makes no directory",
            "name a file in a directory that exists and that you can write to",
        ) from error
    typer.echo(one_line(f"wrote {file}: {about.name} ({about.place})"), err=True)


def text_lines(training: "Training", width: int, *, coloured: bool) -> Iterator[str]:
    """Yield the lines for a terminal."""
    from ddpjob.cli.card import restarts_text
    from ddpplot import terminal
    from ddpplot.history import loss_text

    history, job = training.history, training.job
    total = f" of {history.total_steps:,}" if history.total_steps else ""
    facts = [f"step {history.last_step:,}{total}"]
    since = f" from step {history.diverged:,}" if history.diverged is not None else ""
    facts += [f"loss {loss_text(history.loss)}{since}"] if history.loss is not None else []
    facts += [restarts] if (restarts := restarts_text(training.found)) else []
    yield one_line(f"{job.name} {job.state} ({job.place}): {', '.join(facts)}")
    yield from terminal.drawing(history, width, coloured=coloured)
    for failure in job.failures:
        if not any(run.failure is failure for run in history.runs):
            yield one_line(f"  × attempt {failure.attempt} failed, without a step in the metrics: {failure.message}")
    if training.time is not None and training.time.total:
        yield f"time: {time_text(training.time)}"
